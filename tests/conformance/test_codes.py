"""Every codec's stages against the reference codecs: what is read back of every token must be the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvpolicy.codecs.rotation import mix
from kvpolicy.engine.state import tensors
from tests.conformance.twins import CASES, DATA, SLOTS, B, H, Twin, signs, tokens
from tests.reference.codecs import rotate
from tests.sampling import Row, product


@pytest.mark.parametrize("dim", [8, 40, 64, 80, 96, 128])
def test_mixing(dim: int) -> None:
    torch.testing.assert_close(mix(torch.eye(dim)), torch.tensor(rotate.mixing(dim)))
    assert {-1.0, 1.0} == set(signs(dim, 3))


DIMS = [32, 64, 80, 96, 128]
KINDS = [*DATA]
NAMES = [*CASES]
SOME = [(name,) for number, name in enumerate(NAMES) if number % 2 or name.partition("-")[0] not in NAMES[number - 1]]
"""The first case of each codec, and every other one, for what is no question of numbers of bits."""


def dealt(values: list[Any], step: int, times: int = 1) -> list[Row]:
    """Each case with the next of these values, and again with one that is some steps away."""
    return [
        (name, values[(number + step * time) % len(values)])
        for number, name in enumerate(NAMES)
        for time in range(times)
    ]


@product("name,dim", NAMES, DIMS, sample=dealt(DIMS, 0))
def test_all_dimensions(name: str, dim: int) -> None:
    twin = Twin(CASES[name], dim)
    twin.write(tokens(dim, "outliers", [0, 1, 2, 3, 4], [(1, 0, 0), (1, 0, 3), (1, 1, 4)]))
    twin.check()


@product("name,kind", NAMES, KINDS, sample=dealt(KINDS, 2, times=2))
def test_all_data(name: str, kind: str) -> None:
    twin = Twin(CASES[name], 64)
    twin.write(tokens(64, kind, [0, 1, 2, 3, 4], [(1, 0, 0), (1, 0, 3), (1, 1, 4)]))
    # The means of these latent vectors are 1e7 times their spread: their last bits may change a code of the base.
    twin.check(5e-4 if (name, kind) == ("lowrank-tokenwise", "tiny") else None)


HARD = ["outliers", "constant", "zero", "huge"]


@product("name,kind", NAMES, HARD, sample=dealt(HARD, 0))
def test_one_token(name: str, kind: str) -> None:
    twin = Twin(CASES[name], 32)
    twin.write(tokens(32, kind, [5], []))
    twin.check()


@product("name", NAMES, sample=SOME)
def test_later_writes_keep_what_was_fixed(name: str) -> None:
    twin = Twin(CASES[name], 64)
    twin.write(tokens(64, "outliers", [0, 1, 2, 3], [(1, 0, 0)], seed=1))
    twin.drop(1, 2)
    twin.write(tokens(64, "normal", [1, 6, 7], [(0, 1, 1), (1, 0, 2)], seed=2))
    twin.write(tokens(64, "outliers", [2, 5], [(0, 1, 0), (0, 1, 1)], seed=3))
    twin.check()


@product("name", NAMES, sample=SOME)
def test_a_head_whose_tokens_are_all_gone_starts_anew(name: str) -> None:
    twin = Twin(CASES[name], 64)
    twin.write(tokens(64, "outliers", [0, 1, 2], [(0, 0, j) for j in range(3)], seed=1))
    twin.drop(0, 1, 2)
    twin.write(tokens(64, "normal", [1, 2, 3, 4], [(1, 1, 2)], seed=2))
    twin.write(tokens(64, "channels", [0, 5], [(1, 0, 0)], seed=3))
    twin.check()


@product("name", NAMES, sample=SOME)
def test_heads_without_an_active_token_stay_as_they_are(name: str) -> None:
    twin = Twin(CASES[name], 32)
    twin.write(tokens(32, "normal", [0, 1, 2, 3], [], seed=1))
    before = [part.clone() for part in tensors(twin.store.codes)]
    twin.write(tokens(32, "huge", [4, 5], [(b, 1, j) for b in range(B) for j in range(2)], seed=2))
    for old, new in zip(before, tensors(twin.store.codes), strict=True):
        assert torch.equal(old[:, 1] if old.shape[1] == H else old, new[:, 1] if old.shape[1] == H else new)
    twin.check()


@product("name", NAMES, sample=SOME)
def test_attention_is_that_of_what_is_read(name: str) -> None:
    twin = Twin(CASES[name], 64)
    twin.write(tokens(64, "outliers", list(range(SLOTS)), [(0, 1, 3), (1, 0, 0)], seed=1))
    every = slice(0, SLOTS)
    generator = torch.Generator().manual_seed(4)
    queries = torch.randn(B, H, 3, 64, generator=generator)
    weights = torch.rand(B, H, 3, SLOTS, generator=generator)
    want = queries @ twin.stage.keys(twin.store, every).transpose(-1, -2)
    torch.testing.assert_close(twin.stage.score(twin.store, queries, None), want, rtol=1e-4, atol=1e-3)
    want = weights @ twin.stage.values(twin.store, every)
    torch.testing.assert_close(twin.stage.mix(twin.store, weights), want, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        ("tokenwise-4", 4.25),
        ("tokenwise-3", 3.25),
        ("tokenwise-2", 2.25),
        ("tokenwise-fp8", 8.125),
        ("bfp-4", 4.25),
        ("bfp-3", 3.25),
        ("zipcache-2", 2.25),
        ("mikv-2", 2.25),
        ("mikv-3", 3.25),
        ("turboquant-4", 4.1875),
        ("turboquant-3", 3.1875),
        ("rotate-2", 2.1875),
        ("think-none", 16),
        ("think-half", 12),
        ("think-tokenwise", (80 * 4 + 5 * 32 + 128 * 4 + 8 * 32) / 256),
        ("kvquant-3", 3.3125),
        ("csr-prompt-atoms", 2.0),
        ("csr-fp8", 0.75),
    ],
)
def test_bits_of_a_number(name: str, bits: float) -> None:
    """What one more token takes, per number of key and value, where the head dimension is 128."""
    codes = [[*tensors(CASES[name].stage.alloc(1, 1, slots, 128, "meta"))] for slots in (1000, 2000)]
    assert all(part.device.type == "meta" for part in codes[0]), "nothing is allocated to count bytes"
    few, more = (sum(part.nbytes for part in each) for each in codes)
    assert (more - few) * 8 / 1000 / 256 == bits
