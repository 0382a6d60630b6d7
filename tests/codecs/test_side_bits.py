"""Bits of keys and of values: what the options mean together, and what they cost."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kvpolicy
from kvpolicy import Policy

SAME = [
    ("tokenwise:key_bits=8:value_bits=4", "tokenwise:key_bits=8"),
    ("tokenwise:bits=8:value_bits=4", "tokenwise:key_bits=8"),
    ("tokenwise:bits=2:key_bits=8", "tokenwise:key_bits=8:value_bits=2"),
    ("tokenwise:key_bits=fp8:value_bits=fp8", "tokenwise:bits=fp8"),
    ("tokenwise:bits=8:key_bits=4:value_bits=4", "tokenwise"),
    ("kivi:key_bits=4:value_bits=4", "kivi:bits=4"),
    ("kivi:key_bits=4:value_bits=2", "kivi:key_bits=4"),
    ("gear:value_bits=8:rank=0", "gear:value_bits=8:rank=0"),
    ("rotate:bits=4:value_bits=2", "rotate:key_bits=4"),
    ("turboquant:value_bits=2", "turboquant:value_bits=2"),
    ("h2o+zipcache:bits=4:value_bits=3", "h2o+zipcache:key_bits=4:value_bits=3"),
]


@pytest.mark.parametrize(("given", "text"), SAME)
def test_the_text_is_the_shortest(given: str, text: str) -> None:
    policy = Policy.parse(given)
    assert str(policy) == text
    assert Policy.parse(text) == policy and hash(Policy.parse(text)) == hash(policy)


@pytest.mark.parametrize(
    "spec",
    [
        "tokenwise:key_bits=8:value_bits=4",
        "snapkv+tokenwise:key_bits=3:value_bits=fp8@0.5",
        "uniform/adakv+snapkv+tokenwise:key_bits=8:value_bits=2@0.5",
        "kivi:key_bits=8:value_bits=2",
        "gear:key_bits=4:value_bits=2",
        "rotate:key_bits=4:value_bits=2",
        "turboquant:key_bits=4:value_bits=2",
        "h2o+zipcache:key_bits=4:value_bits=2@0.9",
        "think/tokenwise:key_bits=8:value_bits=2",
    ],
)
def test_planned_bytes_are_held(spec: str) -> None:
    model, _ = kvpolicy.tiny()
    with torch.no_grad(), kvpolicy.attach(model, spec) as handle:
        output: Any = model(torch.arange(60, 360)[None])
        for _ in range(5):
            output = model(output.logits[:, -1:].argmax(-1), cache=handle.cache)
        cache: Any = handle.cache
        plan: Any = handle.plan
        assert cache.nbytes == plan.nbytes
    assert output.logits.isfinite().all()
