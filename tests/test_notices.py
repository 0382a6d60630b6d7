"""The logger is silent until asked and then says what happened; warnings are of kvpolicy's own category."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import kvpolicy
from kvpolicy.reporting.logging import log


def own() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(num_hidden_layers=2, hidden_size=32, num_attention_heads=2, intermediate_size=32, vocab_size=9)
    return LlamaForCausalLM(config).eval()


@torch.no_grad()
def use(model: Any, policy: str) -> kvpolicy.PolicyCache:
    with kvpolicy.attach(model, policy):
        cache = kvpolicy.PolicyCache(model, new=0)
        model(torch.arange(8)[None], cache=cache)
        model(torch.zeros(1, 1, dtype=torch.int64), cache=cache)
    return cache


def test_info_tells_of_attaching(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="kvpolicy"):
        use(own(), "window@0.5")
    assert caplog.messages == [
        "attached window@0.5 to LlamaForCausalLM: 2 layers",
        "detached window@0.5 from LlamaForCausalLM",
    ]


def test_debug_tells_of_prompts_and_growth_and_not_of_steps(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="kvpolicy"):
        use(own(), "snapkv:decode=grow@0.5")
    told = [record.getMessage() for record in caplog.records if record.levelno == logging.DEBUG]
    assert told[0].startswith(
        "snapkv:decode=grow@0.5 compressed a prompt: at most [4, 4] tokens in the layers of 1 row(s), "
    )
    assert told[1:] == [f"layer {index} extended by 16 tokens to 20" for index in (0, 1)]


def test_an_attachment_that_failed_is_not_told_of(caplog: pytest.LogCaptureFixture) -> None:
    model = own()
    with (
        caplog.at_level(logging.DEBUG, logger="kvpolicy"),
        kvpolicy.attach(model, "window@0.5") as handle,
        pytest.raises(ValueError, match="already attached"),
    ):
        kvpolicy.attach(model, "window@0.5")
    handle.detach()  # again does nothing, and says nothing
    assert len(caplog.messages) == 2


def test_silent_where_nobody_listens(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """Not even what logging prints by itself of warnings without a handler."""
    monkeypatch.setattr(logging.root, "handlers", [])  # pytest listens
    logging.getLogger("of no library").warning("heard")
    assert "heard" in capfd.readouterr().err
    for tell in (log.warning, log.error):
        tell("heard")
    assert "".join(capfd.readouterr()) == ""


def test_a_model_that_generates_without_a_cache_is_warned_of() -> None:
    model = own()
    assert model.generation_config is not None
    model.generation_config.use_cache = False
    with pytest.warns(kvpolicy.KVPolicyWarning, match="generates without a cache") as caught:
        kvpolicy.attach(model, "window@0.5").detach()
    assert caught[0].filename == __file__
    assert issubclass(kvpolicy.KVPolicyWarning, UserWarning)
