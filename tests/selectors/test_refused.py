"""Options of selectors, and policies with them, that are refused, each in a sentence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvpolicy import (
    A2SF,
    CAOTE,
    TOVA,
    Compactor,
    CriticalKV,
    ExpectedAttention,
    FairEviction,
    KeyDiff,
    Keyformer,
    KVPolicyError,
    KVzap,
    Policy,
    SlidingWindow,
    SnapKV,
)
from kvpolicy.text.errors import KVPolicyTypeError

FAIR = "at must be auto or ascending positions from 1 on such as 120_300"
DECODE = "decode must be one of 'evict', 'grow'"
BASE = "base must hold the attention of each token .* try snapkv, h2o or probe"
COMPACTOR = r"Compactor.* must be .*got.* try"
OPTIONS: list[tuple[Callable[..., object], dict[str, Any], str]] = [
    *((A2SF, {"factor": n}, r"A2SF.factor must be above 0 and at most 1, got .*; try 0.95") for n in (0.0, 1.5, -1.0)),
    *((wrapper, {"base": KeyDiff()}, BASE) for wrapper in (CriticalKV, CAOTE)),
    *((wrapper, {"base": TOVA()}, "base must") for wrapper in (CriticalKV, CAOTE)),
    *((wrapper, {"base": 3}, "base must be a selector, got 3") for wrapper in (CriticalKV, CAOTE)),
    (Compactor, {"sinks": -1}, COMPACTOR),
    (Compactor, {"recent": 0}, COMPACTOR),
    (Compactor, {"block": 0}, COMPACTOR),
    (Compactor, {"sketch": 0}, COMPACTOR),
    (Compactor, {"blend": -0.5}, COMPACTOR),
    (Compactor, {"blend": 1e9}, COMPACTOR),
    (Compactor, {"regular": 0.0}, COMPACTOR),
    (Compactor, {"blend": "half"}, r"Compactor.blend must be a number, got 'half'"),
    (ExpectedAttention, {"sinks": -1}, "ExpectedAttention.sinks must be"),
    (ExpectedAttention, {"horizon": 0}, "ExpectedAttention.horizon must be"),
    (ExpectedAttention, {"every": 0}, "ExpectedAttention.every must be"),
    (ExpectedAttention, {"epsilon": -0.5}, "ExpectedAttention.epsilon must be"),
    (ExpectedAttention, {"moments": "none"}, "ExpectedAttention.moments must be"),
    (
        ExpectedAttention,
        {"moments": "prompt"},
        r"must be 'grow' with moments='prompt', got 'evict'.* try decode='grow'",
    ),
    *((FairEviction, {"at": at}, FAIR) for at in ("", "0_5", "9_3", "3_3", "3,9", "x", "9_")),
    (Keyformer, {"tau_init": 3.0}, r"Keyformer.tau_end must be at least tau_init, got 2.0 and 3.0; try"),
    (KVzap, {"window": 0}, "KVzap.window must be"),
    *((kind, {"decode": mode}, DECODE) for kind in (SlidingWindow, SnapKV) for mode in ("keep", "", 5, None)),
]


@pytest.mark.parametrize(("selector", "options", "message"), OPTIONS, ids=str)
def test_options(selector: Callable[..., object], options: dict[str, Any], message: str) -> None:
    with pytest.raises((KVPolicyError, KVPolicyTypeError), match=message):
        selector(**options)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("uniform/adakv+chunk/h2o@0.5", "compares_heads is not True"),
        ("uniform/adakv+fair/h2o@0.5", "compares_heads is not True"),
        ("uniform/adakv+compactor:block=8@20", "compares them across"),
        ("rkv:window=1000000000@0.5", r"window must be between 1 and 32767, got 1000000000; try 8\."),
        ("vase:window=1000000000@0.5", r"window must be between 1 and 32767, got 1000000000; try 64\."),
    ],
)
def test_specs(spec: str, message: str) -> None:
    with pytest.raises(KVPolicyError, match=message):
        Policy.parse(spec)


@pytest.mark.parametrize("spec", ["critical/a2sf@0.2", "critical/keyformer@0.2", "uniform/even+chunk/h2o@0.5"])
def test_what_is_combined(spec: str) -> None:
    assert str(Policy.parse(spec)) == spec
