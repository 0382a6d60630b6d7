"""A codec with a statistic of its own, in one file: kept for each row, over chunks and tiles."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

import kvpolicy
from kvpolicy import Policy, PolicyCache
from kvpolicy.codecs.tokenwise import TokenWise
from kvpolicy.protocols import StageStore
from kvpolicy.selectors.window import SlidingWindow
from kvpolicy.statistics import KeptStatistic, Sizes, Tile, Working
from kvpolicy.statistics.ranks import Ranks
from tests.conformance.models import build
from tests.conformance.play import forward, make_batch

LENGTHS = [26, 11]


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


def policy(codec: TokenWise) -> Policy:
    return Policy(selector=SlidingWindow(), codec=codec, budget=20)


def prefilled(policy: Policy, pieces: list[int], **how: Any) -> PolicyCache:
    """A cache of a padded prompt of two rows, which comes in pieces."""
    model = build("llama")
    ids, mask = make_batch(LENGTHS, [LENGTHS[0]])
    with kvpolicy.attach(model, policy, **how):
        cache = PolicyCache(model, prompt=LENGTHS, new=1)
        start = 0
        for size in pieces:
            forward(model, ids, mask, start, start + size, cache)
            start += size
        return cache


def keys_of(cache: PolicyCache) -> list[Tensor]:
    pasts: list[Any] = [layer.store.past() for layer in cache.policy_layers]
    return [past.keys for past in pasts]


def kept(cache: PolicyCache) -> list[Tensor]:
    limits = [layer.store.tensors.limits for layer in cache.policy_layers]
    return [each.statistics[0] for each in limits if each is not None]


def largest() -> list[Tensor]:
    """The same numbers from the whole keys."""
    keys = keys_of(prefilled(Policy.parse("full"), [LENGTHS[0]]))
    return [layer.abs().amax(2) for layer in keys]


@pytest.mark.parametrize(("pieces", "how"), [([26], {}), ([26], {"tile": 7}), ([20, 6], {"chunks": "hold"})], ids=str)
def test_every_key_of_a_prompt_counts(pieces: list[int], how: dict[str, Any]) -> None:
    cache = prefilled(policy(Clipped()), pieces, **how)
    found = kept(cache)
    assert len(found) == len(cache.policy_layers) > 1
    torch.testing.assert_close(found, largest(), atol=1e-5, rtol=1e-5)
    ordinary = keys_of(prefilled(policy(TokenWise()), pieces, **how))
    assert all(torch.equal(*pair) for pair in zip(keys_of(cache), ordinary, strict=True)), "a key was clipped"


def test_what_is_kept_follows_its_row() -> None:
    cache = prefilled(policy(Clipped()), [26])
    found = kept(cache)
    cache.reorder_cache(torch.tensor([1, 0]))
    assert all(torch.equal(one, other[[1, 0]]) for one, other in zip(kept(cache), found, strict=True))
