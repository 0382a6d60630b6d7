"""Numbers of tokens, rows and ranks out of range, and configs of models without a cache: one sentence each."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import BertConfig, GPTNeoXConfig, LlamaConfig

import kvpolicy
from tests.conformance.models import build

CONFIG = LlamaConfig(num_hidden_layers=2, hidden_size=32, num_attention_heads=2, vocab_size=9)


@pytest.mark.parametrize("policy", ["full", "window@0.2", "window@8", "window@1MB"])
@pytest.mark.parametrize(
    ("sizes", "error", "named"),
    [
        ({"prompt": -3}, ValueError, "prompt must be between 0 and 2\\^40, got -3"),
        ({"prompt": 2**63}, ValueError, "prompt must be"),
        ({"prompt": 3.5}, TypeError, "prompt must be an integer, got 3.5"),
        ({"prompt": [4, -1], "batch": 2}, ValueError, "prompt must be .*, got -1"),
        ({"prompt": [4, True], "batch": 2}, TypeError, "prompt must be an integer, got True"),
        ({"prompt": [4], "batch": 2}, ValueError, "got 1 lengths for 2 rows"),
        ({"batch": 0}, ValueError, "batch must be .*, got 0"),
        ({"new": -1}, ValueError, "new must be .*, got -1"),
        ({"tp": 0}, ValueError, "tp must be .*, got 0"),
        ({"prompt": "128k"}, TypeError, "prompt must be an integer, got '128k'"),
        ({"dtype": torch.int8}, ValueError, "dtype must be one of floating-point numbers, got torch.int8; try"),
    ],
)
def test_plan(policy: str, sizes: dict[str, Any], error: type[Exception], named: str) -> None:
    with pytest.raises(error, match=named):
        kvpolicy.plan(CONFIG, policy, **sizes)


def test_plan_of_numpy_integers() -> None:
    numpy = pytest.importorskip("numpy")
    planned = kvpolicy.plan(CONFIG, "window@8", batch=numpy.int64(2), prompt=numpy.int32(50), new=numpy.int64(3))
    assert planned == kvpolicy.plan(CONFIG, "window@8", batch=2, prompt=50, new=3)
    assert type(planned.batch) is int


def test_plan_of_no_causal_model() -> None:
    """GPT-NeoX has `is_decoder=False` too, and is one."""
    with pytest.raises(ValueError, match="got bert, which is not causal"):
        kvpolicy.plan(BertConfig(), "window@0.2")
    with pytest.raises(ValueError, match="at least one layer, got 0 for llama"):
        kvpolicy.plan(LlamaConfig(num_hidden_layers=0), "window@0.2")
    assert kvpolicy.plan(GPTNeoXConfig(), "window@0.2").nbytes > 0
    assert kvpolicy.plan(BertConfig(is_decoder=True), "window@0.2").nbytes > 0


@pytest.mark.parametrize(
    ("sizes", "error"),
    [
        ({"new": -1}, ValueError),
        ({"new": 2.5}, TypeError),
        ({"prompt": "many"}, TypeError),
        ({"prompt": 2**50}, ValueError),
    ],
)
def test_cache(sizes: dict[str, Any], error: type[Exception]) -> None:
    model = build("llama")
    with kvpolicy.attach(model, "window@0.5"), pytest.raises(error, match=f"{next(iter(sizes))} must be"):
        kvpolicy.PolicyCache(model, **sizes)


@pytest.mark.parametrize(
    ("prompt", "budgets"), [([30, 40], [15, 20]), (torch.tensor([30, 40]), [15, 20]), (40, [20, 20])]
)
def test_expected_prompts(prompt: Any, budgets: list[int]) -> None:
    """Rows' lengths may come as a list, a tensor, or one number; the budget is of what is expected."""
    model, tokens = build("llama"), torch.arange(20).expand(2, -1)
    with torch.no_grad(), kvpolicy.attach(model, "window@0.5"):
        cache = kvpolicy.PolicyCache(model, prompt=prompt)
        model(tokens, past_key_values=cache)
        assert cache.policy_layers[0].budget.tolist() == budgets


def test_other_rows_than_expected() -> None:
    model = build("llama")
    with torch.no_grad(), kvpolicy.attach(model, "window@0.5"):
        cache = kvpolicy.PolicyCache(model, prompt=[30, 40])
        with pytest.raises(ValueError, match="one length or one per row, got 2 lengths for 3 rows"):
            model(torch.arange(20).expand(3, -1), past_key_values=cache)
        model(torch.arange(20)[None])  # the model itself is as before
