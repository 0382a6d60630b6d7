"""A cache that is saved between two dates of work that is due every few tokens does it when the original does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import kvpolicy
from kvpolicy import PolicyCache
from tests.conformance.access import static_tensors
from tests.conformance.models import build
from tests.conformance.play import forward, make_batch

PROMPT = 26
STEPS = 13
CUTS = (PROMPT, PROMPT + 2, PROMPT + 6)
"""Columns before a file: behind the prompt, and inside the first and the second period."""

PERIODS = [
    "keydiff:every=5@0.5",
    "expected:sinks=2:horizon=6:every=5@0.5",
    "uniform/adakv+h2o+tokenwise:residual_length=2:block_size=5@0.5",
    "probe:recent=0.2:random=0.2+zipcache:recode_every=5@0.5",
    "h2o+mikv:high=0.3:high_bits=8:residual_length=2:block_size=5@0.5",
    "h2o+kivi:bits=4:group_size=5:residual_length=5@0.5",
    "h2o+quest:read=6:page=2:dense=0:resort=5@0.8",
    "keydiff:every=5:decode=grow@0.5",
    "kvcrush:split=0.25/keydiff:every=4@0.5",
    "snapkv+staircase:tokens_8bit=4:tokens_4bit=4:group_size=4:residual_length=2@0.8",
]


@pytest.mark.parametrize("policy", PERIODS)
def test_work_inside_a_period(policy: str, tmp_path: Path) -> None:
    model = build("llama", layers=1)
    ids, mask = make_batch([PROMPT, 17], [PROMPT, *[1] * STEPS])
    with kvpolicy.attach(model, policy):
        cache = PolicyCache(model)
        forward(model, ids, mask, 0, PROMPT, cache)
        logits: dict[int, torch.Tensor] = {}
        for column in range(PROMPT, PROMPT + STEPS):
            if column in CUTS:
                cache.save(tmp_path / f"{column}.safetensors")
            logits[column] = forward(model, ids, mask, column, column + 1, cache)
        for cut in CUTS:
            loaded = PolicyCache.load(model, tmp_path / f"{cut}.safetensors")
            for column in range(cut, PROMPT + STEPS):
                assert torch.equal(forward(model, ids, mask, column, column + 1, loaded), logits[column])
            pairs = zip(static_tensors(cache), static_tensors(loaded), strict=True)
            assert all(torch.equal(one, other) for one, other in pairs)


def test_an_announced_prompt_of_which_a_part_was_seen(tmp_path: Path) -> None:
    """The next chunk is compressed to a share of the whole prompt."""
    model = build("llama", layers=2)
    ids, mask = make_batch([20, 12], [20, 4, 16])
    with kvpolicy.attach(model, "h2o@0.5"):
        cache = PolicyCache(model, prompt=[40, 32])
        forward(model, ids, mask, 0, 20, cache)
        cache.save(tmp_path / "cache.safetensors")
        loaded = PolicyCache.load(model, tmp_path / "cache.safetensors")
        for start, stop in ((20, 24), (24, 40)):
            logits = [forward(model, ids, mask, start, stop, each) for each in (cache, loaded)]
            assert torch.equal(*logits)
            assert [layer.budget.tolist() for layer in loaded.policy_layers] == [[20, 16]] * 2
