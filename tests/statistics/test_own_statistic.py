"""A statistic of one's own, in one file: gathered by tile, over chunks and padding, and found by its selector."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

import kvpolicy
from kvpolicy import Policy, PolicyCache
from kvpolicy.cli.explanation import _statistics as of_selector
from kvpolicy.protocols import SMALLEST_HEAD, HeadShape, Selector, State, View, scoped
from kvpolicy.selectors.kvcrush import KVCrush
from kvpolicy.statistics import Context, Results, Sizes, Statistic, Tile, Working
from tests.conformance.models import build
from tests.conformance.play import forward, make_batch

LENGTHS = [26, 11]


@dataclass(frozen=True)
class PositiveKeys(Statistic[Tensor]):
    """How many tokens of a prompt have a key whose first channel is positive, [B, H] int64."""

    count: Tensor | None = None
    words: ClassVar[str] = "how many keys point upwards"

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return () if self.count is None else (self.count,)

    def added(self, tile: Tile) -> PositiveKeys:
        up = tile.keys[..., 0] > 0
        if tile.valid is not None:
            up &= tile.valid[:, None]
        return self.joined(PositiveKeys(up.sum(-1)), 0)

    def joined(self, later: Any, columns: int) -> PositiveKeys:
        return later if self.count is None else PositiveKeys(self.count + later.count)

    def map_rows(self, fn: Callable[[Tensor], Tensor]) -> PositiveKeys:
        return PositiveKeys(None if self.count is None else fn(self.count))

    def reduced(self, context: Context) -> Tensor:
        assert self.count is not None
        return self.count

    def working(self, sizes: Sizes) -> Working:
        return Working(chosen=1_000_000 * sizes.tokens)


@scoped(upwards="head")
class Counted(NamedTuple):
    """How many keys of each head were positive, [B, H] int64."""

    upwards: Tensor


@dataclass(frozen=True)
class OldIfUpwards(Selector):
    """Keeps the oldest tokens of heads in which more than half of the keys point upwards, else the newest."""

    @property
    def statistics(self) -> tuple[Statistic[Any], ...]:
        return (PositiveKeys(),)

    def alloc(
        self, batch: int, heads: int, slots: int, device: torch.device | str, head: HeadShape = SMALLEST_HEAD
    ) -> State:
        return Counted(torch.zeros(batch, heads, dtype=torch.int64, device=device))

    def observe(self, state: Counted, seen: Results, view: View) -> State:
        return Counted(state.upwards + seen[PositiveKeys])

    def priority(self, state: Counted, view: View) -> Tensor:
        old = (2 * state.upwards > view.length[:, None])[..., None]
        position = view.positions.float()
        return torch.where(old, -position, position).masked_fill(view.newest(1), torch.inf)


POLICY = Policy(selector=OldIfUpwards(), budget=6)


def counts(policy: Policy, pieces: list[int], rows: list[int] | None = None, **how: Any) -> list[Tensor]:
    """How many keys of each layer were positive in a prompt of two rows, [B, H]."""
    model = build("llama")
    ids, mask = make_batch(LENGTHS, [LENGTHS[0]])
    with kvpolicy.attach(model, policy, **how):
        cache = PolicyCache(model, prompt=LENGTHS, new=1)
        start = 0
        for size in pieces:
            if rows is not None and start:
                cache.reorder_cache(torch.tensor(rows))
                ids = ids[rows]
                mask = mask[rows]
                rows = None
            forward(model, ids, mask, start, start + size, cache)
            start += size
        return [state_of(layer).upwards for layer in cache.policy_layers]


def state_of(layer: Any) -> Counted:
    state = layer.store.tensors.state
    return state if isinstance(state, Counted) else state.base


def positive() -> list[Tensor]:
    """The same numbers from the whole keys."""
    model = build("llama")
    ids, mask = make_batch(LENGTHS, [LENGTHS[0]])
    with kvpolicy.attach(model, "full"):
        cache = PolicyCache(model)
        forward(model, ids, mask, 0, LENGTHS[0], cache)
        return [((layer.keys[..., 0] > 0) & (layer.positions >= 0)).sum(-1) for layer in cache.policy_layers]


@pytest.mark.parametrize(
    ("pieces", "how"),
    [
        ([26], {}),
        ([26], {"tile": 7}),
        ([26], {"tile": 1}),
        ([20, 6], {"chunks": "hold"}),
        ([3, 10, 13], {"chunks": "hold"}),
        ([20, 6], {"chunks": "hold", "tile": 4}),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "policy", [POLICY, Policy(selector=KVCrush(base=OldIfUpwards()), budget=8)], ids=["own", "base"]
)
def test_every_piece_of_a_prompt_counts_once(policy: Policy, pieces: list[int], how: dict[str, Any]) -> None:
    """Whatever pieces it comes in, without padding, and also as the base of a selector that asks for more."""
    expected = positive()
    found = counts(policy, pieces, **how)
    assert len(found) == len(expected) > 1
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    assert all(bool((one[0] > 0).all()) and bool((one <= torch.tensor([[26], [11]])).all()) for one in found)


def test_counts_follow_their_rows() -> None:
    """While the first chunk of them waits."""
    for one, other in zip(counts(POLICY, [20, 6], [1, 0], chunks="hold"), positive(), strict=True):
        assert torch.equal(one, other[[1, 0]])


def test_a_selector_decides_by_it() -> None:
    model = build("llama")
    ids, mask = make_batch(LENGTHS, [LENGTHS[0]])
    expected = positive()
    sides = set()
    with kvpolicy.attach(model, POLICY):
        cache = PolicyCache(model, prompt=LENGTHS, new=1)
        forward(model, ids, mask, 0, LENGTHS[0], cache)
        for layer, numbers in zip(cache.policy_layers, expected, strict=True):
            for row, length in enumerate(LENGTHS):
                for head, number in enumerate(numbers[row].tolist()):
                    old = 2 * number > length
                    want = [*range(5), length - 1] if old else [*range(length - 6, length)]
                    assert layer.positions[row, head].sort().values.tolist()[-6:] == want
                    sides.add(old)
    assert sides == {False, True}, "heads of both kinds"


def test_plans_and_explanations_name_it() -> None:
    assert "how many keys point upwards" in of_selector(OldIfUpwards())
    model = build("llama")
    planned, plain = (
        kvpolicy.plan(model, policy, prompt=100).activation_nbytes
        for policy in (POLICY, Policy(selector=kvpolicy.SlidingWindow(), budget=6))
    )
    assert planned - plain > 90_000_000, "what it holds while tokens are chosen"
