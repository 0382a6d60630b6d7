"""Pictures of the board: right answers against bytes of the cache, bytes read and the time of a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, get_args

from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from kvpolicy_eval.board.cells import Board, Cell, accuracy
from kvpolicy_eval.board.policies import Entry, Library
from kvpolicy_eval.pictures import style
from kvpolicy_lm_eval.data.modes import MODES

COLORS = {
    "all tokens": style.INK,
    "selector": style.BLUE,
    "allocator": style.SKY,
    "head allocator": style.GREEN,
    "merger": style.PURPLE,
    "codec": style.ORANGE,
    "reader": style.GREY,
    "combination": style.VERMILION,
    "kvpress": style.VERMILION,
    "transformers": style.BLUE,
}
"""Color of each kind."""
HOLLOW = get_args(Library)
"""Kinds that are drawn as circles: methods of other libraries."""
AXES = {"held": "bytes held", "moved": "bytes read by a step", "time": "time of a step"}
"""The costs, each over the full cache's."""


class Point(NamedTuple):
    """A policy at a budget: what it costs, and the fraction of right answers in all three modes."""

    entry: Entry
    cost: float
    answers: float


def points(board: Board, listed: Sequence[Entry], shares: Sequence[float], length: int, axis: str) -> list[Point]:
    """All policies of which everything has been measured.

    Args:
        board: Has the results.
        listed: The policies.
        shares: Budgets.
        length: Rough prompt length in tokens.
        axis: `held`, `moved` or `time`.
    """
    found: list[Point] = []
    for entry in listed:
        for share in shares:
            results = [board.known_cell(Cell(entry, share, mode, length)) for mode in MODES]
            known = [result for result in results if result is not None]
            right = accuracy(known) if len(known) == len(MODES) else None
            if right is None:
                continue
            if axis == "time":
                time = board.known_time(entry, share)
                if time is None or "ratio" not in time:
                    continue
                cost = time["ratio"]
            else:
                costs = [result[axis] for result in known if axis in result]
                if not costs:  # other libraries do not say what a step reads
                    continue
                cost = max(costs)
            found.append(Point(entry, cost, right.mean))
    return found


def frontier(given: Sequence[Point]) -> list[Point]:
    """The points that no other one beats: none is cheaper and answers at least as much.

    >>> entry = Entry("full", "all tokens")
    >>> [p.cost for p in frontier([Point(entry, 1, 0.5), Point(entry, 2, 0.4), Point(entry, 3, 0.9)])]
    [1, 3]
    """
    best: list[Point] = []
    for point in sorted(given, key=lambda point: (point.cost, -point.answers)):
        if not best or point.answers > best[-1].answers:
            best.append(point)
    return best


def picture(board: Board, listed: Sequence[Entry], shares: Sequence[float], length: int) -> Figure:
    """Answers against each of the three costs; a line joins the policies that no other one beats."""
    figure = style.blank(3.4)
    panels = figure.subplots(1, len(AXES), sharey=True)
    for panel, (axis, label) in zip(panels, AXES.items(), strict=True):
        _draw(panel, points(board, listed, shares, length, axis))
        panel.set_xlabel(f"{label}\n(full cache: 1)")
        panel.set_ylim(-0.03, 1.05)
    panels[0].set_ylabel(f"right answers, {length:,} tokens")
    drawn = {point.entry.kind for point in points(board, listed, shares, length, "held")}
    handles = [_scatter(panels[0], kind, []) for kind in COLORS if kind in drawn]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False)
    return figure


def _draw(axes: Any, given: list[Point]) -> None:
    for kind in COLORS:
        _scatter(axes, kind, [point for point in given if point.entry.kind == kind])
    best = frontier(given)
    axes.step([p.cost for p in best], [p.answers for p in best], where="post", color=style.GREY, linewidth=1)
    if given:  # an empty axis has no logarithm
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter(NullFormatter())


def _scatter(axes: Any, kind: str, given: list[Point]) -> Any:
    face = "none" if kind in HOLLOW else COLORS[kind]
    return axes.scatter(
        [point.cost for point in given],
        [point.answers for point in given],
        facecolors=face,
        edgecolors=COLORS[kind],
        s=14,
        zorder=3,
        label=kind,
    )
