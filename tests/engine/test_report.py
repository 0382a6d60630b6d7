"""The report says what a cache holds, and why where that may surprise."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import LlamaConfig

import kvpolicy
from kvpolicy.kernels import compiled
from tests.conformance.models import build


def test_reason_for_an_even_division_and_another_remark() -> None:
    """Two layers make no three groups."""
    model = build("llama", layers=2)
    with torch.no_grad(), kvpolicy.attach(model, "squeeze+window+kivi@0.5") as handle:
        model(torch.arange(40)[None], use_cache=True)
        report = handle.report()
    assert "row(s) 0: all layers have the same budget" in str(report)
    assert [layer.budget for layer in report.layers] == [(20,), (20,)]
    assert handle.plan is not None
    assert [part.split(",")[0] for part in handle.plan.note.split("; ")] == [
        "row(s) 0: all layers have the same budget",
        "no token is encoded",
    ]


def test_no_reason_where_layers_differ() -> None:
    model = build("llama")
    with torch.no_grad(), kvpolicy.attach(model, "squeeze+window@0.5") as handle:
        model(torch.arange(40)[None], use_cache=True)
        report = handle.report()
    assert report.note == ""
    assert sum(layer.budget[0] for layer in report.layers) == 20 * len(report.layers)
    assert json.loads(json.dumps(report.as_dict()))["nbytes"] == report.nbytes == handle.cache.nbytes  # pyright: ignore[reportOptionalMemberAccess]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("window@40", ""),
        ("window+kivi:residual_length=128@40", "no token is encoded"),
        ("window+tokenwise:residual_length=0:block_size=4@40", ""),
        (
            "window+tokenwise:residual_length=8:block_size=8@40",
            "full-precision buffer, whose length its parameters set, takes ",
        ),
    ],
)
def test_a_codec_that_codes_little_is_remarked_on(words: str, told: str) -> None:
    """The plan says so before anything runs, and the report after it."""
    model = build("llama")
    before = kvpolicy.plan(model.config, words, prompt=60).note
    with torch.no_grad(), kvpolicy.attach(model, words) as handle:
        model(torch.arange(40)[None], use_cache=True)
        after = handle.report().note
    assert before == after
    assert (told in before) if told else not before


@pytest.mark.parametrize(
    ("words", "compiler", "told"),
    [
        ("window+tokenwise@4096", "", True),
        ("window+tokenwise@4096", "g++", False),
        ("window+tokenwise@1024", "", False),
        ("window@4096", "", False),
    ],
)
def test_many_codes_without_a_compiler_are_remarked_on(
    words: str, compiler: str, told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "_failures", [])
    monkeypatch.setattr(compiled, "_is_on", True)
    monkeypatch.setattr(compiled, "_missing_compiler", lambda device: "" if compiler else "C++ compiler")
    note = kvpolicy.plan(build("llama").config, words, prompt=8192).note
    assert ("codes are decoded before they are read, which is slower, since no C++ compiler was found" in note) == told


@pytest.mark.parametrize(("words", "told"), [("window@0.2", True), ("window@0.5", False), ("window@4", False)])
def test_a_share_that_leaves_hardly_anything_is_remarked_on(words: str, told: bool) -> None:
    """The plan says so before anything runs, and the report after it; a number of tokens was the user's own."""
    model = build("llama")
    before = kvpolicy.plan(model.config, words, prompt=40).note
    with torch.no_grad(), kvpolicy.attach(model, words) as handle:
        model(torch.arange(40)[None], use_cache=True)
    assert handle.report().note == before
    assert ("row(s) 0: the budget 0.2 keeps as few as 8 of 40 prompt tokens" in before) == told


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("window@20", "the budget @20 is 20 tokens per layer; for 20% of the prompt, write @0.2"),
        ("window@5", "for 5% of the prompt, write @0.05"),
        ("window@64", ""),
        ("window@0.3", ""),
        ("window@64KiB", ""),
    ],
)
def test_a_number_of_tokens_that_may_be_a_percentage_is_remarked_on(words: str, told: str) -> None:
    config = build("llama").config
    note = kvpolicy.plan(config, words, prompt=[80, 200], batch=2).note
    assert (told in note) if told else not note
    assert not kvpolicy.plan(config, words, prompt=100).note, "of so many tokens, a percentage is no more"


@pytest.mark.parametrize(("prompt", "new", "rows"), [([9, 60], 4, ""), ([9, 61], 4, "row(s) 1"), (65, 0, "every row")])
def test_a_text_behind_the_trained_positions_is_remarked_on(prompt: int | list[int], new: int, rows: str) -> None:
    """The plan says so; when it is fed, a warning does."""
    config = LlamaConfig(num_hidden_layers=1, hidden_size=32, num_attention_heads=2, max_position_embeddings=64)
    note = kvpolicy.plan(config, "window@32", batch=2, prompt=prompt, new=new).note
    told = f"{rows}: prompt and new tokens, up to 65, exceed the 64 positions"
    assert note.startswith(told) if rows else not note
    config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    assert not kvpolicy.plan(config, "window@32", batch=2, prompt=prompt, new=new).note, "reaches further by itself"
