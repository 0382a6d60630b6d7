"""Codes in pages against the same codes in heads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kvpolicy.codecs.bfp import BFP
from kvpolicy.codecs.tokenwise import TokenWise
from kvpolicy.engine.page_codes import CodedPages, alloc_codes, by_field, decode_heads, encode
from kvpolicy.engine.pages import Owners, page_table
from kvpolicy.protocols import ALONE, StageStore
from kvpolicy.statistics.windows import ScoreTransform

ROWS = 2
HEADS = 2
SIZE = 4
DIM = 8
OWNER = torch.tensor([[0, 1, 1, 0, 1], [1, 1, 0, HEADS, HEADS]])
"""The last two pages of the second row are not used."""
CODECS = [TokenWise(group_size=4), TokenWise(bits="fp8", normalize=False), BFP(block_channels=3)]


def tokens(seed: int, count: int) -> tuple[Tensor, Tensor]:
    dice = torch.Generator().manual_seed(seed)
    keys, values = (torch.randn(ROWS, HEADS, count, DIM, generator=dice) for _ in range(2))
    return keys + 9 * torch.arange(HEADS)[:, None, None], values


def filled(codec: Any) -> tuple[Any, Any]:
    """Codes in pages, and those of the tokens of each head, which they hold in order."""
    keys, values = tokens(0, 3 * SIZE)
    codes = alloc_codes(codec, ROWS, HEADS, OWNER.shape[1], SIZE, DIM, "cpu")
    mask = torch.ones(ROWS, HEADS, 3 * SIZE, dtype=torch.bool)
    fresh = encode(codec, codes, (), keys, values, mask, torch.zeros(ROWS, HEADS, dtype=torch.bool))
    for b, row in enumerate(OWNER.tolist()):
        for page, head in enumerate(row):
            start = SIZE * row[:page].count(head)
            if head < HEADS:
                by_field(
                    codec,
                    codes,
                    lambda name, t, at=(b, page, head, start): t[at[0], at[1]].copy_(
                        getattr(fresh, name)[at[0], at[2], at[3] : at[3] + SIZE]
                    ),
                    lambda name, t: t,
                )
    return codes, fresh


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_a_page_is_read_as_its_head(codec: Any) -> None:
    codes, fresh = filled(codec)
    every = slice(0, 3 * SIZE)
    keys, values = (read(StageStore(fresh), every) for read in (codec.keys, codec.values))
    table = page_table(OWNER, HEADS)
    found = decode_heads(codec, codes, (), table, torch.float32)
    used = table.used.repeat_interleave(SIZE, -1)
    for part, whole in zip(found, (keys, values), strict=True):
        assert torch.equal(part[used], whole[used])
    pages = CodedPages(codec, codes, (), OWNER.clamp_max(HEADS - 1), HEADS, torch.float32)
    owners = Owners.of(OWNER, HEADS, ALONE.once)
    queries = torch.randn(ROWS, HEADS, 3, DIM)
    score = pages.scores(queries, owners, ScoreTransform(1.0))
    weights = torch.rand(ROWS, OWNER.shape[1], 3, SIZE)
    mixed = pages.mix(weights, owners)
    expected = torch.zeros_like(mixed)
    for b, row in enumerate(OWNER.tolist()):
        for page, head in enumerate(row):
            if head < HEADS:
                at = slice(SIZE * row[:page].count(head), SIZE * (row[:page].count(head) + 1))
                torch.testing.assert_close(score[b, page], queries[b, head] @ keys[b, head, at].T)
                expected[b, head] += weights[b, page] @ values[b, head, at]
    torch.testing.assert_close(mixed, expected)


def test_parameters_of_a_head_with_codes_stay() -> None:
    codec = CODECS[0]
    codes, _ = filled(codec)
    before = codes.channel_zero.clone()
    mask = torch.ones(ROWS, HEADS, 2, dtype=torch.bool)
    has_codes = torch.tensor([[True, False], [True, True]])
    encode(codec, codes, (), *tokens(1, 2), mask, has_codes)
    same = (codes.channel_zero == before).all(-1).all(-1)
    assert same.tolist() == has_codes.tolist()
    assert codes.channel_zero.shape == (ROWS, HEADS, 1, DIM), "once per head, not per page"
