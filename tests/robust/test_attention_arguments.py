"""What a forward hands to attention: it is followed, or refused by name, and never swallowed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.utils.generic import TransformersKwargs

import kvpolicy
from kvpolicy import KVPolicyError
from kvpolicy.hf.attention_interface import KNOWN
from tests.conformance.models import build
from tests.conformance.play import make_batch
from tests.engine.test_refused import one_sentence


def run(model: Any, **given: Any) -> Tensor:
    ids, _ = make_batch([20], [20])
    with torch.no_grad():
        return model(ids, **({"use_cache": True} | given)).logits


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("name", ["indices", "block_indices", "anything"])
def test_unknown_tensors_are_refused(name: str, cached: bool) -> None:
    """Models of sparse attention pass the chosen tokens so; attention without them would be dense."""
    model = build("llama")
    for value in (torch.zeros(1, 20, 4), [torch.zeros(1)], {"a": torch.zeros(1)}):
        with kvpolicy.attach(model, "full"):
            with pytest.raises(KVPolicyError, match=f"without '{name}' under a policy") as error:
                run(model, **{"use_cache": cached, name: value})
            one_sentence(error.value)


@pytest.mark.parametrize("name", ["position_bias", "sinks"])
def test_what_stock_attention_would_add_is_refused(name: str) -> None:
    model = build("llama")
    with kvpolicy.attach(model, "full"), pytest.raises(KVPolicyError, match=f"without '{name}' under a policy"):
        run(model, **{name: torch.zeros(1, 4, 20, 20)})


def test_other_arguments_change_nothing() -> None:
    """Stock attention ignores what it does not know, and so is it where nothing could be meant."""
    model = build("llama")
    want = run(model)
    with kvpolicy.attach(model, "full"):
        others: list[dict[str, Any]] = [
            {"indices": None},
            {"num_items_in_batch": torch.tensor(3)},
            {"purpose": "a word", "level": 3},
        ]
        for given in others:
            assert torch.allclose(run(model, **given), want, atol=1e-5)


def test_every_argument_of_transformers_is_known() -> None:
    assert TransformersKwargs.__annotations__.keys() <= KNOWN


def test_attention_to_later_tokens_is_refused_behind_a_cache() -> None:
    """Without one, the stock function does what it is told."""
    model = build("llama")
    want = run(model, use_cache=False, is_causal=False)
    assert (want - run(model, use_cache=False)).abs().max() > 0.1
    with kvpolicy.attach(model, "full"):
        with pytest.raises(KVPolicyError, match="causal where a policy keeps a cache, got is_causal=False") as error:
            run(model, is_causal=False)
        one_sentence(error.value)
        assert torch.equal(run(model, use_cache=False, is_causal=False), want)
        assert torch.allclose(run(model, is_causal=True), run(model, use_cache=False), atol=1e-5)
