"""Moments of queries, against those of the unrotated queries of each row."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from kvpolicy import Policy
from kvpolicy.engine.decode import new_token
from kvpolicy.engine.layer_spec import LayerSpec
from kvpolicy.kernels.rotary import KeyRotation, Rope
from kvpolicy.statistics import Vectors
from kvpolicy.statistics.query_moments import Moments, plain_queries, sum_moments
from kvpolicy.statistics.statistic import Coming, Tile
from tests.conformance.bench import draw
from tests.engine.parts import Ranking

DIM = 8


def rope(**more: Any) -> Rope:
    config = LlamaConfig(hidden_size=2 * DIM, num_attention_heads=2, max_position_embeddings=64, **more)
    return Rope(LlamaRotaryEmbedding(config), apply_rotary_pos_emb, None)


@pytest.mark.parametrize("tile", [1, 1 << 20])
@pytest.mark.parametrize(("first", "side"), [(3, "left"), (0, "left"), (3, "right"), (0, "right")])
def test_moments_leave_out_padding_and_the_first(
    first: int, side: str, tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In tiles of sixteen queries, of which the first or the last ones may have padding."""
    monkeypatch.setattr("kvpolicy.statistics.query_moments.TILE_ELEMENTS", tile)
    q = draw(40, 0, batch=2)[0]
    padding = torch.full((13,), -1)
    tokens = torch.arange(27)
    row = torch.cat([padding, tokens] if side == "left" else [tokens, padding])
    positions = torch.stack([torch.arange(40), row])
    q[1, :, row < 0] = torch.nan
    table = rope()
    got = sum_moments(q, 2, positions, first, table)
    assert got.queries.tolist() == [40 - first, 27 - first]
    for b in range(2):
        columns = (positions[b] >= first).nonzero()[:, 0]
        plain = table.unrotate(q[b : b + 1, :, columns], positions[b, columns].expand(1, 4, -1))[0].double()
        torch.testing.assert_close(got.total[b].flatten(0, 1).double(), plain.sum(1), atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(got.product[b].flatten(0, 1).double(), plain.mT @ plain, atol=1e-3, rtol=1e-4)


def test_without_a_rotary_embedding_queries_are_plain() -> None:
    q, k, v = draw(1, 0, batch=2)
    plain = plain_queries(q.half(), torch.zeros(2, 1), None)
    assert plain.dtype == torch.float32 and torch.equal(plain, q.half().float())
    shown = LayerSpec(0, Ranking(statistics=(Vectors(generated=True), Moments(0))), Policy.parse("full").codec)
    token = new_token(shown, q.half(), k, v, torch.zeros(2, 1), None)
    assert token.query is not None and token.plain_query is not None
    assert torch.equal(token.plain_query.flatten(1, 2), q.half().float().squeeze(2))
    assert torch.equal(token.query.flatten(1, 2), q.half().squeeze(2))
    plain = new_token(
        replace(shown, selector=Ranking(statistics=(Vectors(generated=True),))), q, k, v, torch.zeros(2, 1), None
    )
    assert plain.plain_query is None
    assert not replace(shown, selector=Ranking(statistics=(Moments(0),))).sees_steps
    assert torch.equal(KeyRotation(None).mean(k, torch.tensor([3, 4]), 5), k)


@pytest.mark.parametrize("first", [1, 12, 39])
def test_chunks_have_the_moments_of_the_whole(first: int) -> None:
    """Positions go on behind the chunk before, also in a row that begins in the second one."""
    q = torch.randn(2, 4, 40, DIM)
    k = torch.randn(2, 2, 40, DIM)
    valid = torch.ones(2, 40, dtype=torch.bool)
    valid[1, :13] = False
    table = rope()

    def gather(start: int, stop: int) -> Moments:
        at = slice(start, stop)
        coming = Coming(valid[:, at], stop - start, valid[:, :start].sum(-1), table)
        return Moments(3).begun(coming).added(Tile(q[:, :, at], k[:, :, at], 0, valid[:, at], True))

    whole = gather(0, 40)
    joined = gather(0, first).joined(gather(first, 40), first)
    assert whole.moments is not None and joined.moments is not None
    for found, expected in zip(joined.moments, whole.moments, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-5)
    moved = joined.map_rows(lambda t: t[[1, 0]])
    for before, after in zip(joined.tensors, moved.tensors, strict=True):
        assert torch.equal(after, before[[1, 0]])
