"""Bits of keys and of values: what the options mean together, and what they cost."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kvpolicy
from kvpolicy import KIVI, Policy, TokenWise, TurboQuant
from kvpolicy.protocols import ModelInfo, StageStore
from kvpolicy.text.errors import KVPolicyError

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
    "spec", ["tokenwise:bits=4", "kivi:bits=4", "gear:bits=8", "rotate:bits=3", "turboquant:bits=2"]
)
def test_bits_are_those_of_both(spec: str) -> None:
    codec: Any = Policy.parse(spec).codec
    assert codec.bits_of_keys == codec.bits_of_values == codec.bits
    assert (codec.key_bits, codec.value_bits) == ("auto", "auto")


def test_wrong_bits_are_refused() -> None:
    with pytest.raises(KVPolicyError, match=r"KIVI\.key_bits must be one of 2, 4, 8, 'auto', got 3; try 'auto'"):
        KIVI(key_bits=3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(KVPolicyError, match=r"multiple of 4 for KIVI\.bits=2, got 6"):
        KIVI(key_bits=8).check(info(6))
    with pytest.raises(KVPolicyError, match=r"multiple of 8 for TurboQuant\.value_bits=3, got 4; try value_bits=4"):
        TurboQuant(value_bits=3).check(info(4))


def info(head_dim: int) -> ModelInfo:
    return ModelInfo(2, 2, head_dim)


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


def test_more_bits_of_one_side_lower_its_error_alone() -> None:
    x = torch.randn(1, 2, 64, 32, generator=torch.Generator().manual_seed(0))
    lost = [
        errors(f"tokenwise:{sides}", x) for sides in ("bits=2", "key_bits=8:value_bits=2", "key_bits=2:value_bits=8")
    ]
    assert lost[1][0] < lost[0][0] / 30 and lost[1][1] == lost[0][1]
    assert lost[2][0] == lost[0][0] and lost[2][1] < lost[0][1] / 30


def errors(spec: str, x: torch.Tensor) -> tuple[float, float]:
    """The error of keys and of values."""
    codec = Policy.parse(spec).codec
    assert isinstance(codec, TokenWise)
    store = StageStore(codec.alloc(1, 2, 64, 32, "cpu"), ())
    slots = torch.arange(64).expand(1, 2, -1)
    empty = torch.zeros(1, 2, 64, dtype=torch.bool)
    codec.write(store, x, x, slots, ~empty, empty)
    every = slice(0, 64)
    return float((codec.keys(store, every) - x).norm()), float((codec.values(store, every) - x).norm())
