"""The best policies for each situation, from results of the board and of the long generation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from kvpolicy import Policy
from kvpolicy_eval.board import walk
from kvpolicy_eval.board.cells import Board, Cell, Interval, Result, accuracy
from kvpolicy_eval.board.policies import Entry, within_bytes
from kvpolicy_eval.common.markdown import fill, table
from kvpolicy_eval.common.results import Known, read_results
from kvpolicy_lm_eval.data.modes import MODES

PLACE = "choices"
"""Name of the place for the tables in a page."""

BEST = 3
"""Policies of a situation."""
SHARE = 0.1
"""Budget at which policies are compared, as a fraction of the full cache's bytes."""
FEW = 0.02
"""Budget at which few bytes are held."""
ANSWERED = 0.5
"""Fraction of right answers, with the question in the prompt, below which a fast policy is not counted."""


class Choice(NamedTuple):
    """A policy, and what it was measured to do.

    Attributes:
        entry: Its row of the board; a bare spec for a policy of the long generation.
        answers: Its right answers, with their interval.
        worth: What policies are ordered by, the best first; equal ones stay in the order of the board.
    """

    entry: Entry
    answers: Interval
    worth: float


Choose = Callable[[Board, Sequence[Entry], Known], Iterator[Choice]]
"""Every policy that was measured for a situation, from results of the board, its policies, and long generations."""


class Situation(NamedTuple):
    """A situation of a user.

    Attributes:
        title: What is asked for, in the words of a user.
        measured: What `choices` compares, in a sentence.
        choices: Finds the policies that were measured for it.
    """

    title: str
    measured: str
    choices: Choose


def fill_choices(found: Sequence[Path], board: Board, listed: Sequence[Entry], walks: Path) -> None:
    """Fill pages that have a place for the tables.

    Args:
        found: The pages.
        board: Results of the board.
        listed: Policies of the board.
        walks: File of results of the long generation.
    """
    for page in found:
        fill(page, PLACE, tables(board, listed, read_results(walks)))


def tables(board: Board, listed: Sequence[Entry], walks: Known) -> str:
    """A table for each situation; its last comment has the numbers of results that the tables were made from.

    Args:
        board: Results of the board.
        listed: Policies of the board.
        walks: Results of the long generation.
    """
    parts: list[str] = []
    for situation in SITUATIONS:
        best = sorted(situation.choices(board, listed, walks), key=lambda choice: choice.worth, reverse=True)[:BEST]
        if best:
            rows = [_row(board, choice) for choice in best]
            found = table(["policy", "right answers", "step", "prefill"], rows)
            parts += [f"### {situation.title}", situation.measured, found]
    return "\n\n".join([*parts, f"<!-- {len(board.known)} results, {len(walks)} walks -->"])


def _row(board: Board, choice: Choice) -> list[str]:
    spec = choice.entry.at(SHARE)
    step = board.known_time(choice.entry, SHARE)
    ratio = f"{step['ratio']:.2f}" if step and "ratio" in step else ""
    return [f"`{spec}`", str(choice.answers), ratio, _prefill(spec)]


def _prefill(spec: str) -> str:
    """Costs of a policy's prefill in time or memory; empty for most."""
    policy = Policy.parse(spec)
    if policy.replay is not None:
        return "runs twice; layers wait for the last one"
    return "layers wait for the last one" if policy.layer_metric else ""


def _answered(modes: Sequence[str], share: float) -> Choose:
    """Policies by their right answers to the questions of some places; one that is listed twice counts once."""

    def choices(board: Board, listed: Sequence[Entry], _: Known) -> Iterator[Choice]:
        return _by_answers(board, within_bytes(listed), modes, share)

    return choices


def _by_answers(board: Board, compared: Sequence[Entry], modes: Sequence[str], share: float) -> Iterator[Choice]:
    """Policies by their right answers, of all lengths together at which at least half of them were measured."""

    def results(entry: Entry, length: int) -> list[Result]:
        return [board.known_cell(Cell(entry, share, mode, length)) or {} for mode in modes]

    found = {length: {entry: results(entry, length) for entry in compared} for length in board.docs}
    counts = {length: sum(map(_is_measured, each.values())) for length, each in found.items()}
    lengths = [length for length, count in counts.items() if count and 2 * count >= max(counts.values())]
    for entry in compared:
        right = accuracy([result for length in lengths for result in found[length][entry]])
        if right is not None:
            yield Choice(entry, right, right.mean)


def _is_measured(results: list[Result]) -> bool:
    return accuracy(results) is not None


def _generated(board: Board, _: Sequence[Entry], walks: Known) -> Iterator[Choice]:
    """Policies by their right answers in a long generation, and the lowest and highest of the walks."""
    task = walk.Walk(model=board.model)
    for policy in walk.policies():
        result = walks.get(task.key(policy, min(walk.SHARES)), {})
        if policy != "full" and "right" in result:
            each = [count / (task.passes * task.records) for count in result["right"]]
            mean = sum(each) / len(each)
            yield Choice(Entry(policy, "selector"), Interval(min(each), mean, max(each)), mean)


def _fast(board: Board, listed: Sequence[Entry], _: Known) -> Iterator[Choice]:
    """Policies by the time of a decode step, of those that answer enough."""
    for choice in _answered(["inside"], SHARE)(board, listed, {}):
        step = board.known_time(choice.entry, SHARE)
        if step and "ratio" in step and choice.answers.mean >= ANSWERED:
            yield choice._replace(worth=-step["ratio"])


def _read(board: Board, listed: Sequence[Entry], _: Known) -> Iterator[Choice]:
    """Readers by their right answers, but for the one that computes every score to choose."""
    readers = [entry for entry in listed if entry.kind == "reader" and "exact" not in entry.spec]
    return _by_answers(board, readers, MODES, SHARE)


SITUATIONS = (
    Situation(
        "The question is in the prompt",
        f"Documents, code or examples, then the question: right answers over all lengths, {SHARE:.0%} of the bytes.",
        _answered(["inside"], SHARE),
    ),
    Situation(
        "The question comes later",
        f"A document that is compressed before the question is known: all lengths, {SHARE:.0%} of the bytes.",
        _answered(["after"], SHARE),
    ),
    Situation(
        "Several questions, one after the other",
        f"The second question, after an answer to the first one, as in a chat: all lengths, {SHARE:.0%} of the bytes.",
        _answered(["second"], SHARE),
    ),
    Situation(
        "A long generation",
        "A short prompt and thousands of generated tokens, of which early and late ones are needed again: "
        f"{min(walk.SHARES):.0%} of the bytes of the full cache at the end. In brackets, the worst and the best text.",
        _generated,
    ),
    Situation(
        "As few bytes as possible",
        f"All three places of the question together, {FEW:.0%} of the bytes.",
        _answered(MODES, FEW),
    ),
    Situation(
        "Fast decoding",
        f"The shortest decode step among policies that answer at least {ANSWERED:.0%} with the question in the prompt; "
        f"{SHARE:.0%} of the bytes.",
        _fast,
    ),
    Situation(
        "Memory suffices, and steps are slow",
        f"Readers hold all tokens, and read {SHARE:.0%} of them in a step: all three places of the question together.",
        _read,
    ),
)
