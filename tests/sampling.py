"""Which cases of a product run when: a pairwise sample of it, or a star, and `pytest -m full` runs the rest.

Of a pairwise sample, the rows in which a value stands for the first time run on every commit. `bash .ci/run slow` runs
the others, which have the marker `heavy`.

    @product(("selector", "codec", "mode"), SELECTORS, CODECS, MODES)
    def test_something(selector: str, codec: str, mode: str) -> None: ...

The hook that makes the cases stands in `tests/conftest.py`.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from random import Random
from typing import Any, NamedTuple

import pytest

Row = tuple[Any, ...]
Allowed = Callable[[Row], bool]
Pair = tuple[int, int, int, int]
"""An axis and the place of a value in it, and a later axis with a place."""

SEED = 0


def anything(row: Row) -> bool:
    """The rule of products without exceptions."""
    return True


def pairwise(
    *axes: Sequence[Any], seed: int = SEED, allowed: Allowed = anything, apart: Collection[tuple[int, int]] = ()
) -> list[Row]:
    """Rows in which every value of an axis meets every value of every other axis, in random but fixed order.

    Args:
        axes: The values of each axis.
        seed: Decides between values that are equally good; the rows depend on it and the axes alone.
        allowed: Which rows may be used. Pairs that stand in no such row are left out.
        apart: Pairs of axes, the earlier one first, whose values do not have to meet: where two long axes do not
            interact, their product would decide how many rows there are.

    Raises:
        ValueError: An axis has no values, or has a value twice.
    """
    for axis in axes:
        if not axis or any(value in axis[:place] for place, value in enumerate(axis)):
            raise ValueError(f"an axis must have values, each of them once, got {list(axis)}")
    if len(axes) == 1:
        return [(value,) for value in axes[0] if allowed((value,))]
    return [*_Search(axes, Random(seed), allowed, apart)]


def star(*axes: Sequence[Any], centers: Sequence[Row]) -> list[Row]:
    """Rows that vary one axis at a time.

    Args:
        axes: The values of each axis.
        centers: For each axis a row, in which that axis takes each of its values.
    """
    rows = [
        (*center[:place], value, *center[place + 1 :])
        for place, (axis, center) in enumerate(zip(axes, centers, strict=True))
        for value in axis
    ]
    return [row for number, row in enumerate(rows) if row not in rows[:number]]


def each_once(*axes: Sequence[Any]) -> list[Row]:
    """The fewest rows in which each value of each axis stands: for axes that do not interact."""
    rows = max(map(len, axes))
    return [tuple(axis[row % len(axis)] for axis in axes) for row in range(rows)]


class _Search:
    """A greedy search for a pairwise sample, by the places of values in their axes.

    Each row begins with the value that has most pairs left. The other axes follow, the longest first, with the value
    that makes most pairs with those before it. A partner that the first value still lacks is such a value, so that
    each row makes at least one pair.
    """

    def __init__(
        self, axes: Sequence[Sequence[Any]], dice: Random, allowed: Allowed, apart: Collection[tuple[int, int]]
    ) -> None:
        self._axes = axes
        self._allowed = allowed
        self._luck = {(axis, place): dice.random() for axis, values in enumerate(axes) for place in range(len(values))}
        self._longest = sorted(range(len(axes)), key=lambda axis: (-len(axes[axis]), self._luck[axis, 0]))
        self._missing: set[Pair] = set()
        self._left = Counter[tuple[int, int]]()
        for (i, first), (j, second) in itertools.combinations(enumerate(axes), 2):
            if (i, j) in apart:
                continue
            self._missing |= {(i, a, j, b) for a in range(len(first)) for b in range(len(second))}
            self._left.update({(i, a): len(second) for a in range(len(first))})
            self._left.update({(j, b): len(first) for b in range(len(second))})

    def __iter__(self) -> Iterator[Row]:
        while self._missing:
            axis, place = max(self._luck, key=lambda value: (self._left[value], self._luck[value]))
            row = self._complete({axis: place})
            if not self._allowed(self._values(row)):
                pair = min(pair for pair in self._missing if (axis, place) in (pair[:2], pair[2:]))
                found = self._best_with(pair)
                if found is None:
                    self._remove({pair})
                    continue
                row = found
            self._remove(self._gain(row))
            yield self._values(row)

    def _complete(self, row: dict[int, int]) -> dict[int, int]:
        for axis in self._longest:
            if axis not in row:
                partners = list(row.items())

                def worth(
                    place: int, axis: int = axis, partners: list[tuple[int, int]] = partners
                ) -> tuple[float, ...]:
                    pairs = sum(_pair((axis, place), partner) in self._missing for partner in partners)
                    return pairs, self._left[axis, place], self._luck[axis, place]

                row[axis] = max(range(len(self._axes[axis])), key=worth)
        return row

    def _best_with(self, pair: Pair) -> dict[int, int] | None:
        """The allowed row with this pair that makes most pairs, by trying all."""
        fixed = {pair[0]: pair[1], pair[2]: pair[3]}
        places = [[fixed[axis]] if axis in fixed else range(len(values)) for axis, values in enumerate(self._axes)]
        rows = (dict(enumerate(row)) for row in itertools.product(*places))
        return max(
            (row for row in rows if self._allowed(self._values(row))),
            key=lambda row: len(self._gain(row)),
            default=None,
        )

    def _gain(self, row: dict[int, int]) -> set[Pair]:
        return {_pair(one, other) for one, other in itertools.combinations(row.items(), 2)} & self._missing

    def _remove(self, pairs: set[Pair]) -> None:
        self._missing -= pairs
        for i, a, j, b in pairs:
            self._left[i, a] -= 1
            self._left[j, b] -= 1

    def _values(self, row: dict[int, int]) -> Row:
        return tuple(self._axes[axis][row[axis]] for axis in range(len(self._axes)))


def _pair(one: tuple[int, int], other: tuple[int, int]) -> Pair:
    return (*one, *other) if one[0] < other[0] else (*other, *one)


class Product(NamedTuple):
    """The cases of a test.

    Attributes:
        names: Of the test's arguments.
        axes: The values of each argument.
        sample: The rows that run on every commit.
        allowed: Which rows there are.
        ids: Makes the name of a value, as in `pytest.mark.parametrize`.
        drawn: The axes whose values are drawn in the rest of the rows, one for each combination of the others.
        heavy: The rows of the sample that are left to `bash .ci/run slow`.
    """

    names: tuple[str, ...]
    axes: tuple[Sequence[Any], ...]
    sample: tuple[Row, ...]
    allowed: Allowed
    ids: Callable[[Any], str | None] | None
    drawn: Collection[int] = ()
    heavy: tuple[Row, ...] = ()

    def rest(self) -> Iterator[Row]:
        """The rows that only `pytest -m full` runs."""
        taken = {tuple(axis.index(value) for axis, value in zip(self.axes, row, strict=True)) for row in self.sample}
        dice = Random(SEED)
        ranges = [range(1) if number in self.drawn else range(len(axis)) for number, axis in enumerate(self.axes)]
        for places in itertools.product(*ranges):
            drawn = enumerate(zip(places, self.axes, strict=True))
            places = tuple(dice.randrange(len(axis)) if i in self.drawn else place for i, (place, axis) in drawn)
            row = tuple(axis[place] for axis, place in zip(self.axes, places, strict=True))
            if places not in taken and self.allowed(row):
                yield row


def product(
    names: str | Sequence[str],
    *axes: Sequence[Any],
    sample: Iterable[Row] | None = None,
    allowed: Allowed = anything,
    ids: Callable[[Any], str | None] | None = None,
    drawn: Collection[int] = (),
) -> pytest.MarkDecorator:
    """Parametrize a test by a product, of which a sample runs on every commit.

    Args:
        names: Of the test's arguments.
        axes: The values of each argument.
        sample: The rows that run on every commit, all of them, in place of a pairwise sample.
        allowed: Which rows there are.
        ids: Makes the name of a value, as in `pytest.mark.parametrize`.
        drawn: Axes whose values are drawn, with a fixed seed, in the rows that only `pytest -m full` runs: one row for
            each combination of the other axes.

    Raises:
        ValueError: A row of the sample is no row of the product.
    """
    rows = pairwise(*axes, allowed=allowed) if sample is None else [*sample]
    for row in rows:
        if not allowed(row) or any(value not in axis for axis, value in zip(axes, row, strict=True)):
            raise ValueError(f"the sample must consist of rows of the product, got {row}")
    names = tuple(names.split(",")) if isinstance(names, str) else tuple(names)
    heavy = () if sample is not None else tuple(_without_news(rows))
    return pytest.mark.product(Product(names, axes, tuple(rows), allowed, ids, drawn, heavy))


def _without_news(rows: Sequence[Row]) -> Iterator[Row]:
    """The rows in which each value stands in an earlier one too."""
    for number, row in enumerate(rows):
        earlier = rows[:number]
        if all(any(value == before[axis] for before in earlier) for axis, value in enumerate(row)):
            yield row


def wants_full(expression: str) -> bool:
    """Whether a marker expression of pytest may select what has the marker `full`; the default one excludes it."""
    return not expression or re.search(r"(?<!\bnot )\bfull\b", expression) is not None


def cases(some: Product, expression: str) -> Iterator[Any]:
    """The parameters of a test, under a marker expression: making 40,000 cases to leave them out takes long."""
    rest = (pytest.param(*row, marks=pytest.mark.full) for row in some.rest())
    for row in some.sample:
        yield pytest.param(*row, marks=[pytest.mark.heavy] * (row in some.heavy))
    if wants_full(expression):
        yield from rest
    elif not some.sample:
        yield next(rest)  # pytest skips a test that has no case, and says so
