"""Whole models whose codes are read by compiled functions: what decoding gives, for every codec and for pages."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kvpolicy
from kvpolicy import PolicyCache
from tests.codecs.compiling import call_directly
from tests.conformance.access import kept_positions
from tests.conformance.models import build
from tests.conformance.play import TURNS, make_batch, talk
from tests.conformance.policies import CODECS, words

UNCODED = ("plain", "think", "minicache", "lowrank")
"""Codecs that store numbers in fp16, which a CPU reads without a compiled function."""
POLICIES = [words("uniform", "h2o", codec) for codec in CODECS if codec not in UNCODED]
OVER = [words("h2o", f"think/{words(codec, budget='')[:-1]}") for codec in ("tokenwise", "kivi", "turboquant", "bfp")]
PAGES = [f"uniform/{words('adakv', 'snapkv', codec)}" for codec in ("tokenwise", "bfp", "turboquant")]


def converse(model: Any, policy: str) -> tuple[torch.Tensor, list[Any]]:
    ids, mask = make_batch([26, 17])
    with kvpolicy.attach(model, policy):
        cache = PolicyCache(model, new=sum(TURNS[1:]))
        logits = talk(model, ids, mask, TURNS, cache)
    return logits, [kept_positions(layer) for layer in cache.policy_layers]


@pytest.mark.parametrize("policy", [*POLICIES, *OVER, *PAGES])
def test_compiled_functions_change_nothing(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama", layers=1)
    wanted, kept = converse(model, policy)
    called = call_directly(monkeypatch)
    found, also_kept = converse(model, policy)
    assert called and also_kept == kept
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4 * float(wanted.abs().max()))
