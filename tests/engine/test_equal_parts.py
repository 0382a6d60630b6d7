"""Texts of models whose positions have several parts (M-RoPE): the parts are equal, and everything works."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kvpolicy
from tests.conformance.pictures import NAMES, build, prompt, words

POLICIES = [
    "expected:sinks=2:horizon=6:every=7@0.5",
    "compactor:sinks=2:recent=2:block=8:sketch=4@0.5",
    "kvzip:chunk=9:sinks=2@0.5",
    "full+rotate:group_size=4:sinks=2:residual_length=2:block_size=4",
]


def told(model: Any, policy: str, **given: Any) -> tuple[list[torch.Tensor], torch.Tensor]:
    """What layers hold, and the logits of a prompt, of a second turn and of two steps."""
    ids = words(30)
    found: list[torch.Tensor] = []
    with torch.no_grad(), kvpolicy.attach(model, policy):
        cache = kvpolicy.PolicyCache(model, prompt=20, new=10)
        for start, stop in ((0, 20), (20, 28), (28, 29), (29, 30)):
            more = {name: at[..., start:stop] for name, at in given.items()}
            found.append(model(ids[:, start:stop], cache=cache, **more).logits)
        return [layer.positions.clone() for layer in cache.policy_layers], torch.cat(found, 1)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_text_is_as_with_one_part(name: str, policy: str) -> None:
    model = build(name)
    kept, logits = told(model, policy, position_ids=torch.arange(30)[None])
    again, own = told(model, policy)
    parts, of_parts = told(model, policy, position_ids=torch.arange(30).expand(4, 1, -1))
    assert all(torch.equal(*pair) for pair in zip(kept, again, strict=True))
    assert all(torch.equal(*pair) for pair in zip(kept, parts, strict=True))
    assert torch.allclose(logits, own, atol=1e-5) and torch.allclose(logits, of_parts, atol=1e-5)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_picture_is_refused(policy: str) -> None:
    model = build("qwen2_5_vl")
    refused = pytest.raises(kvpolicy.KVPolicyError, match="M-RoPE")
    with torch.no_grad(), kvpolicy.attach(model, policy), refused:
        model(**prompt())
