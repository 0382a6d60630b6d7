"""The public conformance checks name what a wrong codec does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from kvpolicy import TokenWise
from kvpolicy.protocols import At, Layout, RotaryView, StageStore, Traits
from kvpolicy.testing.conformance import check


@dataclass(frozen=True, kw_only=True, slots=True)
class Bytes(TokenWise):
    """A codec that can go wrong."""

    how: str = "right"
    group_size: int = 16
    residual_length: int = 8
    block_size: int = 8

    @property
    def traits(self) -> Traits:
        return Traits(block=0 if self.how == "block" else self.block_size, residual=self.residual_length)

    def layout(self, tokens: int) -> Layout:
        found = Layout(16, (max(tokens - 8, 0) // 8 * 8 + 8,))
        wrong = {"few": Layout(8, (tokens // 16 * 8,)), "stages": Layout(16, (*found.coded, 8))}
        return wrong.get(self.how, found)

    def alloc(self, batch: int, heads: int, slots: int, head_dim: int, device: torch.device | str) -> Any:
        found = TokenWise.alloc(self, batch, heads, slots, head_dim, device)
        if self.how == "meta" and str(device) == "meta":
            return found._replace(keys=found.keys[..., :1])
        return found

    def write(
        self, store: StageStore, keys: Tensor, values: Tensor, slots: Tensor, write_mask: Tensor, occupied: Tensor
    ) -> None:
        if self.how == "rows":
            keys = keys.mean(0, keepdim=True).expand_as(keys)
        if self.how == "shift":
            slots = (slots + 1) % store.codes.keys.shape[2]
        if self.how == "inactive":
            write_mask = torch.ones_like(write_mask)
        if self.how == "batch":
            scale = keys.abs().amax() / 127
            keys = (keys / scale).round() * scale
        if self.how == "clears":
            store.codes.keys.masked_fill_(~write_mask.any(-1)[..., None, None], 0)
        if self.how == "once" and bool(store.codes.keys.any()):
            return
        if self.how != "nothing":
            TokenWise.write(self, store, keys, values, slots, write_mask, occupied)

    def keys(self, store: StageStore, at: At) -> Tensor:
        found = TokenWise.keys(self, store, at)
        found = found + torch.randn_like(found) if self.how == "noise" else found
        return found.bfloat16() if self.how == "short" else found

    def score(self, store: StageStore, queries: Tensor, rope: RotaryView | None) -> Tensor:
        found = TokenWise.score(self, store, queries, rope)
        return {"score": found * 2, "hidden": torch.full_like(found, -torch.inf)}.get(self.how, found)

    def mix(self, store: StageStore, weights: Tensor) -> Tensor:
        found = TokenWise.mix(self, store, weights)
        return found.mean(0, keepdim=True).expand_as(found) if self.how == "mix" else found


def test_a_right_one_passes() -> None:
    check(Bytes())


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("block", "block must be at least 1 with stages and 0 without, got 0"),
        ("few", "layout must have 1000 slots for as many tokens, got"),
        ("stages", "layout must have slots for 1 stages, got 2"),
        ("meta", "same sizes on the device meta"),
        ("rows", "the keys of a row must not depend on padding or other rows, got a difference"),
        ("inactive", "write must ignore tokens outside write_mask, got other codes with NaN there: keys"),
        ("batch", "write must encode a row as on its own, got other codes in a batch: keys differs"),
        ("clears", "write must not change heads without a token in write_mask, got a change of keys"),
        ("once", "write must replace codes, got the same for other tokens"),
        ("shift", "must be closer to the original than zeros are, got"),
        ("nothing", "must be closer to the original than zeros are, got"),
        ("noise", "decoding must be deterministic, got other keys in a second call"),
        ("short", "keys must return float32, got bfloat16"),
        ("score", "score must be the product of queries and decoded keys, got"),
        ("hidden", "score must not hide every token, got only -inf"),
        ("mix", "mix must be the weighted sum of decoded values, got"),
    ],
)
def test_a_wrong_one_is_told(how: str, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check(Bytes(how=how))
