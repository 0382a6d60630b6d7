"""Statistics of one's own, in one file: gathered by tile, over chunks and padding, for a selector and for a codec.

A codec keeps its statistic for each row.
"""

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
from kvpolicy.codecs.tokenwise import TokenWise
from kvpolicy.protocols import SMALLEST_HEAD, HeadShape, Selector, StageStore, State, View, scoped
from kvpolicy.selectors.kvcrush import KVCrush
from kvpolicy.selectors.window import SlidingWindow
from kvpolicy.statistics import Context, KeptStatistic, Results, Sizes, Statistic, Tile, Working
from kvpolicy.statistics.ranks import Ranks
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


def prefilled(policy: Policy | str, pieces: list[int], rows: list[int] | None = None, **how: Any) -> PolicyCache:
    """A cache of a padded prompt of two rows, which comes in pieces; the rows change places behind the first one."""
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
        return cache


def counts(policy: Policy, pieces: list[int], rows: list[int] | None = None, **how: Any) -> list[Tensor]:
    """How many keys of each layer were positive in a prompt of two rows, [B, H]."""
    return [state_of(layer).upwards for layer in prefilled(policy, pieces, rows, **how).policy_layers]


def state_of(layer: Any) -> Counted:
    state = layer.store.tensors.state
    return state if isinstance(state, Counted) else state.base


def positive() -> list[Tensor]:
    """The same numbers from the whole keys."""
    layers = prefilled("full", [26]).policy_layers
    return [((layer.keys[..., 0] > 0) & (layer.positions >= 0)).sum(-1) for layer in layers]


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
    sides = set()
    for layer, numbers in zip(prefilled(POLICY, [26]).policy_layers, positive(), strict=True):
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


@dataclass(frozen=True)
class LargestKeys(KeptStatistic):
    """The largest absolute key of each channel in the prompts of a row, [B, H, D] fp32."""

    largest: Tensor | None = None
    file_name: ClassVar[str] = "largest_keys"

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return () if self.largest is None else (self.largest,)

    def added(self, tile: Tile) -> LargestKeys:
        keys = tile.keys.abs().float()
        if tile.valid is not None:
            keys = keys.masked_fill(~tile.valid[:, None, :, None], 0)
        return self.joined(LargestKeys(keys.amax(2)), 0)

    def joined(self, later: Any, columns: int) -> LargestKeys:
        return later if self.largest is None else LargestKeys(self.largest.maximum(later.largest))

    def map_rows(self, fn: Callable[[Tensor], Tensor]) -> LargestKeys:
        return LargestKeys(None if self.largest is None else fn(self.largest))

    def kept(self, held: Tensor, ranks: Ranks) -> Tensor:
        return held if self.largest is None else held.maximum(self.largest)

    def working(self, sizes: Sizes) -> Working:
        return Working()


class Clipped(TokenWise):
    """Clips keys to the largest ones of the prompt before it encodes them; in a prompt, nothing is clipped."""

    @property
    def statistics(self) -> tuple[KeptStatistic, ...]:
        return (LargestKeys(),)

    def write_keys(self, store: StageStore, keys: Tensor, slots: Tensor, write_mask: Tensor, occupied: Tensor) -> None:
        most = store.statistics[LargestKeys][:, :, None].to(keys.dtype)
        super().write_keys(store, keys.clamp(-most, most), slots, write_mask, occupied)


def with_codec(codec: TokenWise) -> Policy:
    return Policy(selector=SlidingWindow(), codec=codec, budget=20)


def keys_of(cache: PolicyCache) -> list[Tensor]:
    pasts: list[Any] = [layer.store.past() for layer in cache.policy_layers]
    return [past.keys for past in pasts]


def kept(cache: PolicyCache) -> list[Tensor]:
    limits = [layer.store.tensors.limits for layer in cache.policy_layers]
    return [each.statistics[0] for each in limits if each is not None]


@pytest.mark.parametrize(("pieces", "how"), [([26], {}), ([26], {"tile": 7}), ([20, 6], {"chunks": "hold"})], ids=str)
def test_every_key_of_a_prompt_counts(pieces: list[int], how: dict[str, Any]) -> None:
    """For a codec, which clips none of them; what is kept follows its row."""
    cache = prefilled(with_codec(Clipped()), pieces, **how)
    found = kept(cache)
    assert len(found) == len(cache.policy_layers) > 1
    largest = [layer.abs().amax(2) for layer in keys_of(prefilled("full", [26]))]
    torch.testing.assert_close(found, largest, atol=1e-5, rtol=1e-5)
    ordinary = keys_of(prefilled(with_codec(TokenWise()), pieces, **how))
    assert all(torch.equal(*pair) for pair in zip(keys_of(cache), ordinary, strict=True)), "a key was clipped"
    cache.reorder_cache(torch.tensor([1, 0]))
    assert all(torch.equal(one, other[[1, 0]]) for one, other in zip(kept(cache), found, strict=True))
