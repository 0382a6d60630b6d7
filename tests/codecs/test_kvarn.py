"""KVarN against vectors of the authors' code, and its rules; tests/codecs/test_groups.py has its slow version.

`kvarn.safetensors` has groups of 16 tokens of 32 channels, which their Hadamard transform would give, and what
`variance_normalize_batched`, `kvarn_store_tile_k_batch_from_sinkhorn` (4 bits) and
`kvarn_store_tile_v_batch_from_sinkhorn` (2 bits) made of them in 8 and in 16 rounds, recorded on a CPU.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from kvpolicy import KVarN, Policy
from kvpolicy.codecs.rotation import mix, unmix
from kvpolicy.kernels.balance import balance
from kvpolicy.protocols import StageStore

RECORDED = load_file(Path(__file__).parent / "kvarn.safetensors")
SIDES = ["keys", "values"]


def groups(side: str) -> Tensor:
    """The groups that were recorded, in the slots of one head, [1, 1, 64, 32]."""
    return RECORDED[side].flatten(0, 1)[None, None]


def written(rounds: int) -> tuple[KVarN, StageStore]:
    codec = KVarN(group_size=16, iterations=rounds)
    keys, values = (unmix(groups(side)) for side in SIDES)
    count = keys.shape[2]
    store = StageStore(codec.alloc(1, 1, count, keys.shape[3], "cpu"))
    yes = torch.ones(1, 1, count, dtype=torch.bool)
    codec.write(store, keys, values, torch.arange(count)[None, None], yes, ~yes)
    return codec, store


@pytest.mark.parametrize("rounds", [8, 16])
def test_scales_are_the_authors(rounds: int) -> None:
    """But for the last group: so small that all scales are at a bound, where rounding decides between it and 1."""
    for side, name in (("keys", "s_row_K"), ("values", "s_col_V")):
        x = RECORDED[side][:3].double()
        found = balance(x, torch.ones(*x.shape[:2], 1, dtype=torch.bool), rounds, tokens_first=side == "keys")
        got = found[0].squeeze(-1) if side == "keys" else found[1].squeeze(1)
        torch.testing.assert_close(got, RECORDED[f"{rounds}.{name}"][:3].double(), rtol=1e-3, atol=0)


@pytest.mark.parametrize("rounds", [8, 16])
def test_what_is_read_is_what_the_authors_read(rounds: int) -> None:
    """But for numbers half way between two codes, which their scales in fp32 and ours in fp16 put to either side."""
    codec, store = written(rounds)
    have = {name.partition(".")[2]: t.float() for name, t in RECORDED.items() if name.startswith(f"{rounds}.")}
    keys = (have["key_codes"] * have["s_col_K"][..., None] + have["zp_K"][..., None]) * have["s_row_K"][:, None]
    values = have["value_codes"] * have["s_row_V"][..., None] + have["zp_V"][..., None]
    values = values * have["s_col_V"][:, None]
    key_step = have["s_col_K"][:, None] * have["s_row_K"][..., None]
    value_step = have["s_row_V"][..., None] * have["s_col_V"][:, None]
    pairs = ((codec.keys, keys.mT, key_step), (codec.values, values, value_step))
    for read, want, step in pairs:
        got = mix(read(store, slice(0, 64)))[0, 0].unflatten(0, (4, 16))
        off = (got - want).abs() / step.clamp(min=1e-6)
        assert off.max() < 1.1, "never more than the next code"
        assert (off > 0.1).double().mean() < 0.002


def test_the_layout_is_that_of_the_paper() -> None:
    codec = KVarN()
    assert codec.layout(1000) == (256, (896,)) and codec.layout(255) == (255, ())
    assert (codec.traits.pins, codec.traits.pinned, codec.traits.residual) == ("first", 128, 0)
    assert Policy.parse("kvarn:key_bits=4:value_bits=2:group_size=128") == Policy(codec=codec)


def test_bits_of_a_number() -> None:
    codes = [KVarN().alloc(1, 1, slots, 128, "meta") for slots in (1024, 2048)]
    few, more = (sum(part.nbytes for part in each) for each in codes)
    # As in the authors' layout: 3 numbers of fp16 for each channel and each token, and a number of fp32 for a group.
    assert (more - few) * 8 / 1024 / 256 == 3 + (3 * 128 + 3 * 128) * 16 / (128 * 256) + 32 / (128 * 256)
