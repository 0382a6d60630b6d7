"""The public conformance checks name what a wrong codec does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

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
        return {
            "few": Layout(8, (tokens // 16 * 8,)), "stages": Layout(16, (*found.coded, 8))
        }.get(self.how, found)  # fmt: skip

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
        ("block", "has a block of at least 1"),
        ("few", "slots for 1000 tokens"),
        ("stages", "1 stages, and the layout has 2"),
        ("meta", "on the device meta"),
        ("rows", "the other row, changes the keys"),
        ("inactive", "write heeds tokens that are not write_mask: keys differs"),
        ("batch", "write codes a row otherwise beside another one: keys differs"),
        ("clears", "write changes a head that is given no write_mask token: keys differs"),
        ("once", "write leaves a head as it was"),
        ("shift", "no nearer to those written"),
        ("nothing", "no nearer to those written"),
        ("noise", "read twice are not the same"),
        ("short", "keys returns fp32, and not bfloat16"),
        ("score", "score is not the products"),
        ("hidden", "score hides every token"),
        ("mix", "mix is not the weighted sum"),
    ],
)
def test_a_wrong_one_is_told(how: str, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check(Bytes(how=how))
