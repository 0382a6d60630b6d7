"""The report says what a cache holds, and why where that may surprise."""

from __future__ import annotations

import json

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import kvpolicy
from tests.conformance.models import build


def test_reason_for_an_even_division() -> None:
    """Two layers make no three groups."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, hidden_size=32, num_attention_heads=2, vocab_size=48))
    with torch.no_grad(), kvpolicy.attach(model.eval(), "squeeze+window@0.5") as handle:
        model(torch.arange(20)[None], use_cache=True)
        report = handle.report()
    assert "row(s) 0: layers share evenly" in str(report)
    assert [layer.budget for layer in report.layers] == [(10,), (10,)]


def test_no_reason_where_layers_differ() -> None:
    model = build("llama")
    with torch.no_grad(), kvpolicy.attach(model, "squeeze+window@0.5") as handle:
        model(torch.arange(20)[None], use_cache=True)
        report = handle.report()
    assert report.note == ""
    assert sum(layer.budget[0] for layer in report.layers) == 10 * len(report.layers)
    assert json.loads(json.dumps(report.as_dict()))["nbytes"] == report.nbytes == handle.cache.nbytes  # pyright: ignore[reportOptionalMemberAccess]
