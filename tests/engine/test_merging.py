"""What mergers are given, where their results go, and attention with counts against a slow version."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from kvpolicy.engine import merging
from kvpolicy.engine.attention import attend
from kvpolicy.engine.columns import ExactColumns, attend_columns
from kvpolicy.engine.state import tensors
from kvpolicy.statistics.windows import Past, ScoreTransform, window_attention
from tests.conformance.bench import Bench, draw
from tests.conformance.policies import words
from tests.engine.parts import newest_queries, slots_of
from tests.readers.bench import Layer
from tests.readers.bench import draw as draw_tokens
from tests.sampling import each_once

SINKS = torch.tensor([0.3, -0.5, 1.0, 0.1])


def slow_attention(
    q: Tensor, keys: Tensor, values: Tensor, counts: Tensor, visible: Tensor, transform: ScoreTransform, hq: int
) -> tuple[list[float], list[float]]:
    """One query, number by number: a slot that stands for c tokens has c times the weight of its key."""
    weights: list[float] = []
    for j in range(len(keys)):
        score = transform.scale * sum(a * b for a, b in zip(q.tolist(), keys[j].tolist(), strict=True))
        if transform.softcap is not None:
            score = transform.softcap * math.tanh(score / transform.softcap)
        weights.append(math.exp(counts[j].item()) * math.exp(score) if visible[j] else 0.0)
    total = sum(weights) + (0.0 if transform.sinks is None else math.exp(transform.sinks[hq].item()))
    weights = [weight / total for weight in weights]
    out = [sum(w * values[j, d].item() for j, w in enumerate(weights)) for d in range(values.shape[1])]
    return out, weights


@pytest.mark.parametrize(
    ("softcap", "sinks", "want"), [(None, None, False), (None, SINKS, True), (1.5, None, True), (1.5, SINKS, False)]
)
def test_counts_in_prompts_and_steps(softcap: float | None, sinks: Tensor | None, want: bool) -> None:
    transform = ScoreTransform(0.35, softcap, sinks)
    _, k, v = draw(9, 0, batch=2)
    q, new_k, new_v = draw(3, 1, batch=2)
    counts = torch.randint(1, 6, (2, 2, 9), generator=torch.Generator().manual_seed(2)).float().log()
    occupied = torch.rand(2, 2, 9, generator=torch.Generator().manual_seed(3)) > 0.3
    past = Past(k, v, occupied, counts)
    out, total = attend(q, new_k, new_v, transform, past, None, want)
    rows = window_attention(newest_queries(q, None, 3), new_k, transform, past, None)
    step, weights = attend_columns(q[:, :, :1], ExactColumns(k, v), (), ~occupied, transform, want, counts)
    for b in range(2):
        for hq in range(4):
            h = hq // 2
            keys = torch.cat([k[b, h], new_k[b, h]])
            values = torch.cat([v[b, h], new_v[b, h]])
            every = torch.cat([counts[b, h], torch.zeros(3)])
            summed = torch.zeros(12)
            for n in range(3):
                visible = torch.cat([occupied[b, h], torch.arange(3) <= n])
                want_out, want_row = slow_attention(q[b, hq, n], keys, values, every, visible, transform, hq)
                torch.testing.assert_close(out[b, hq, n], torch.tensor(want_out), atol=1e-5, rtol=1e-5)
                torch.testing.assert_close(rows[b, hq, n], torch.tensor(want_row), atol=1e-6, rtol=1e-5)
                summed += torch.tensor(want_row)
            if total is not None:
                torch.testing.assert_close(total[b, hq], summed, atol=1e-5, rtol=1e-5)
            mine, its = slow_attention(q[b, hq, 0], k[b, h], v[b, h], counts[b, h], occupied[b, h], transform, hq)
            torch.testing.assert_close(step[b, hq, 0], torch.tensor(mine), atol=1e-5, rtol=1e-5)
            if weights is not None:
                torch.testing.assert_close(weights[b, h, hq % 2], torch.tensor(its), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("codec", ["tokenwise:block_size=4:residual_length=2", "staircase"])
def test_a_token_is_read_from_any_slot(codec: str) -> None:
    bench = Bench(words("h2o", "merge", codec.split(":")[0], budget="14"), [14] * 2)
    bench.forward(*draw(30, 0, batch=2))
    for step in range(4):
        bench.forward(*draw(1, step + 1, batch=2))
    store = bench.layer
    past = store.past()
    assert past is not None and sum(store.layout.coded)
    for slot in range(store.layout.slots):
        at = torch.full((2, 2, 1), slot)
        token = merging.slot_tokens(
            at,
            at >= 0,
            (store.tensors.keys, store.tensors.values),
            slots_of(store).codes.view(),
            store.tensors.positions,
            store.tensors.counts,
        )
        torch.testing.assert_close(token.keys[:, :, 0], past.keys[:, :, slot])
        torch.testing.assert_close(token.values[:, :, 0], past.values[:, :, slot])
        assert torch.equal(token.positions[..., 0], store.tensors.positions[..., slot])
        assert token.counts is not None and past.counts is not None
        assert torch.equal(token.counts[..., 0], past.counts[..., slot])


@pytest.mark.parametrize("codec", ["plain", "tokenwise", "kivi"])
@pytest.mark.parametrize("decode", ["evict", "grow"])
def test_every_token_is_counted_once(codec: str, decode: str) -> None:
    """Without a gate nothing is lost: the counts of a head add up to all tokens that it has seen."""
    policy = words(f"snapkv:window=4:decode={decode}", "merge:least=-1", codec, budget="12")
    bench = Bench(policy, [12], new=20)
    seen = 0
    for size in (20, 1, 1, 1, 1, 1, 7, 1, 1, 1, 1, 1, 1):
        bench.forward(*draw(size, seen))
        seen += size
        past: Any = bench.layer.past()
        counts = (past.counts.exp() * past.occupied).sum(-1)
        torch.testing.assert_close(counts, torch.full_like(counts, seen), rtol=1e-5, atol=1e-4)


ROWS_OF = [
    ["merge", "d2o", "compensate", "elastic", "zsmerge", "keepkv:least=-1"],
    ["plain", "plain", "tokenwise:block_size=3:residual_length=2", "tokenwise:block_size=3:residual_length=2"],
]


@pytest.mark.parametrize(("merger", "codec"), [*each_once(*ROWS_OF), ("merge", ROWS_OF[1][2])])
def test_a_row_without_a_token_merges_nothing(merger: str, codec: str) -> None:
    """Neither its slots nor what the merger keeps of it change, while the other row evicts and merges."""
    layer = Layer(f"h2o+{codec}+{merger}@0.5", [13, 13])
    layer.prompt(*draw_tokens(26, 0, batch=2))
    layer.between()
    for step in range(3):
        before = {name: [t.clone() for t in tensors(part)] for name, part in layer.store.tensors.parts().items()}
        layer.step(*draw_tokens(1, 10 + step, batch=2), valid=torch.tensor([[True], [False]]))
        for name, part in layer.store.tensors.parts().items():
            for old, new in zip(before[name], tensors(part), strict=True):
                assert name == "columns" or torch.equal(new[1:], old[1:]), name
        layer.between()
        layer.step(*draw_tokens(1, 20 + step, batch=2))
        layer.between()
