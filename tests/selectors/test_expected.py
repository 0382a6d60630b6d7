"""ExpectedAttention: its closed form, the mean rotation, and moments over padding, chunks and steps."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

import kvpolicy
from kvpolicy import PolicyCache
from kvpolicy.kernels.rotary import KeyRotation, Rope
from kvpolicy.protocols import HeadShape, View
from kvpolicy.selectors.expected import Expectation, ExpectedAttention
from kvpolicy.statistics import Candidates, Moments, ObservedMoments, Results, Vectors
from kvpolicy.statistics.query_moments import sum_moments
from kvpolicy.text.errors import KVPolicyError
from tests.conformance.bench import Bench, draw, padding
from tests.conformance.models import build
from tests.conformance.play import forward, make_batch

DIM = 8


def rope(**more: Any) -> Rope:
    config = LlamaConfig(hidden_size=2 * DIM, num_attention_heads=2, max_position_embeddings=64, **more)
    return Rope(LlamaRotaryEmbedding(config), apply_rotary_pos_emb, None)


YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}


@pytest.mark.parametrize("scaled", [{}, {"rope_parameters": YARN}], ids=["default", "yarn"])
def test_the_mean_rotation_is_the_mean_of_rotations(scaled: dict[str, Any]) -> None:
    """Of the model's own tables, attention scaling included, for each row's own positions."""
    table = rope(**scaled)
    vectors = torch.randn(2, 3, 5, DIM, generator=torch.Generator().manual_seed(0))
    first = torch.tensor([7, 30])
    got = table.mean_rotation(vectors, first, 11)
    every = [table.rotate(vectors, (first + ahead)[:, None, None].expand(2, 3, 5)) for ahead in range(11)]
    torch.testing.assert_close(got, torch.stack(every).mean(0), atol=2e-6, rtol=1e-5)
    undone = table.unrotate_rows(table.rotate(vectors, torch.arange(5).expand(2, 3, 5)), torch.arange(5).expand(2, 5))
    torch.testing.assert_close(undone, vectors, atol=1e-6, rtol=1e-5)


def scores(queries: Tensor, keys: Tensor, values: Tensor, table: Rope | None = None, **options: Any) -> Expectation:
    """The state after a prompt of plain queries [1, Hq, P, D]."""
    count = keys.shape[2]
    selector = ExpectedAttention(sinks=0, **options)
    positions = torch.arange(count, dtype=torch.int32)
    view = View(positions.expand(1, keys.shape[1], -1), torch.tensor([count]), torch.tensor([2]), 0)
    state = selector.alloc(1, keys.shape[1], count, "cpu", HeadShape(queries.shape[1] // keys.shape[1], DIM))
    moments = sum_moments(queries, keys.shape[1], torch.arange(queries.shape[2])[None], 0, None)
    tokens = Candidates(keys, values, DIM**-0.5)
    seen = Results({Vectors: tokens, Moments: ObservedMoments(moments, KeyRotation(table))})
    return selector.observe(state, seen, view)  # pyright: ignore[reportReturnType]


def test_it_is_the_mean_over_a_normal_distribution() -> None:
    """Against a million queries drawn with the same mean and covariance, at one position."""
    generator = torch.Generator().manual_seed(0)
    basis = torch.randn(DIM, DIM, generator=generator) / 3
    sample = torch.randn(4000, DIM, generator=generator) @ basis + torch.randn(DIM, generator=generator) / 2
    keys = torch.randn(1, 1, 6, DIM, generator=generator)
    values = torch.ones(1, 1, 6, DIM)
    table = rope()
    got = scores(sample[None, None], keys, values, table, horizon=1)
    mean = sample.mean(0)
    spread = torch.cov(sample.T, correction=0)
    drawn = torch.distributions.MultivariateNormal(mean, spread).sample((1_000_000,))
    turned = table.rotate(drawn[None, None], torch.full((1, 1, 1_000_000), 6))[0, 0]
    want = (turned @ keys[0, 0].T * DIM**-0.5).exp().mean(0)
    share = (got.score[0, 0] - math.log(DIM**0.5)).exp()
    torch.testing.assert_close(share, want / want.sum(), atol=0, rtol=0.02)


def test_small_weights_do_not_tie() -> None:
    """Whose share of the attention is far below what fp32 holds."""
    queries = torch.full((1, 1, 9, DIM), 5.0)
    keys = -torch.arange(6).float()[None, None, :, None].expand(1, 1, 6, DIM) * 3
    score = scores(queries, keys, torch.ones(1, 1, 6, DIM)).score[0, 0]
    assert bool((score.diff() < -10).all()) and float(score[-1]) < -200


def test_a_value_of_zeros_is_worth_nothing_and_no_loss() -> None:
    values = torch.ones(1, 1, 4, DIM)
    values[0, 0, 2] = 0
    got = scores(torch.zeros(1, 2, 4, DIM), torch.randn(1, 1, 4, DIM), values)
    assert got.score[0, 0].argmin() == 2 and bool(got.score.isfinite().all())
    assert got.score[0, 0, [0, 1, 3]].unique().numel() == 1


@pytest.mark.parametrize("prompt", [1, 2, 3, 6])
def test_prompts_that_are_hardly_longer_than_the_sinks(prompt: int) -> None:
    bench = Bench("expected:sinks=2:every=3", [5, 4])
    for number, size in enumerate([prompt, *[1] * 12]):
        bench.forward(*draw(size, number, batch=2))
    assert bench.turns[-1].kept[0][0][:2] == [0, 1] and bench.turns[-1].kept[0][0][-1] == prompt + 11
    bench.check()


def test_unscored_tokens_never_fill_more_than_half_a_budget() -> None:
    """So that generated tokens do not push the prompt out before they are compared with it."""
    bench = Bench("expected:sinks=1:every=500", [12])
    bench.forward(*draw(40, 0))
    for number in range(60):
        bench.forward(*draw(1, number + 1))
        state: Any = bench.layer.tensors.state
        assert int((bench.layer.tensors.positions >= state.ranked[:, None, None]).sum(-1).max()) <= 6
    assert bench.layer.tensors.state.queries.tolist() == [99] and bench.check().turns == 61


@pytest.mark.parametrize(
    "policy", ["expected:sinks=2:every=5", "expected:sinks=2:every=5+kivi:group_size=4:residual_length=4"]
)
def test_steps_of_some_rows(policy: str) -> None:
    bench = Bench(policy, [12, 10])
    bench.forward(*draw(20, 0, batch=2), padding(20, 20, 13))
    for number in range(24):
        valid = torch.tensor([[True], [number % 3 != 0]])
        bench.forward(*draw(1, number + 1, batch=2), None if number % 2 else valid)
    bench.forward(*draw(7, 99, batch=2), padding(7, 0, 5))
    assert bench.layer.tensors.state.queries.tolist() == [42, 13 - 2 + 20 + 5]
    bench.check()


@pytest.mark.parametrize(
    "policy",
    [
        "expected:sinks=2:decode=grow:moments=prompt",
        "expected:sinks=0:epsilon=0.01:decode=grow:moments=prompt+kivi:group_size=4:residual_length=4",
    ],
)
def test_moments_of_the_newest_prompt_alone(policy: str) -> None:
    """A second prompt of two queries, one of one, and one in which a row has only padding."""
    bench = Bench(policy, [9, 8], new=12)
    bench.forward(*draw(20, 0, batch=2), padding(20, 20, 13))
    for turn, valid in enumerate([padding(9, 2, 9), padding(3, 1, 3), padding(9, 9, 0)]):
        for number in range(4):
            bench.forward(*draw(1, 10 * turn + number + 1, batch=2))
        bench.budgets = [11 + turn, 9]
        bench.forward(*draw(valid.shape[1], 99 + turn, batch=2), valid)
        state: Any = bench.layer.tensors.state
        assert not state.total.numel() and not state.product.numel() and not state.queries.any()
    bench.check()


def test_moments_are_only_forgotten_if_no_token_is_scored_while_decoding() -> None:
    with pytest.raises(KVPolicyError, match=r"must be 'grow' with moments='prompt', got 'evict'.* try decode='grow'"):
        ExpectedAttention(moments="prompt")
    assert ExpectedAttention(moments="prompt", decode="grow").rerank_every == 0


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "gemma2"])
def test_a_row_is_itself_whatever_its_positions_begin_with(family: str) -> None:
    """Left padding that counts as positions shifts the rotation of queries and keys alike."""
    model = build(family)
    ids, mask = make_batch([20, 13], [20])
    with kvpolicy.attach(model, "expected:sinks=2:horizon=5@9"):
        cache = PolicyCache(model)
        alone = PolicyCache(model)
        with torch.no_grad():
            model(ids, attention_mask=mask, cache=cache)  # its position_ids count the padding
        forward(model, ids[1:, 7:], mask[1:, 7:], 0, 13, alone)
    for some, one in zip(cache.policy_layers, alone.policy_layers, strict=True):
        for name in ("positions", "state.score"):
            got, want = (
                (t.store.tensors.state.score if "." in name else t.positions).sort(-1).values for t in (some, one)
            )
            torch.testing.assert_close(got[1:].float(), want.float(), atol=1e-3, rtol=1e-3)


def test_positions_that_jump_are_refused() -> None:
    model = build("llama")
    with kvpolicy.attach(model, "expected:sinks=2@9") as _, pytest.raises(KVPolicyError, match="must go on by one"):
        model(torch.ones(1, 6, dtype=torch.int64), position_ids=torch.tensor([[0, 1, 2, 9, 10, 11]]))


def test_another_cache_needs_the_rotary_embedding() -> None:
    model = build("llama")
    with kvpolicy.attach(model, "h2o@9"), pytest.raises(KVPolicyError, match="same selector"):
        PolicyCache(model, "expected@9")


@pytest.mark.parametrize("wrong", [{"sinks": -1}, {"horizon": 0}, {"every": 0}, {"epsilon": -0.5}, {"moments": "none"}])
def test_wrong_options(wrong: dict[str, Any]) -> None:
    with pytest.raises(KVPolicyError):
        ExpectedAttention(**wrong)
