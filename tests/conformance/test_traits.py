"""What codecs tell the engine, against the reference: traits and layouts of every number of tokens."""

from __future__ import annotations

import pytest

from kvpolicy import Policy
from kvpolicy.codecs.demotion import ByPriority
from kvpolicy.protocols import Layout
from tests.conformance.policies import CODECS, words
from tests.conformance.replay import reference_codec

SIZES = "residual_length=32:block_size=32"
"""Sizes that are given; the automatic ones have tests of their own in tests/codecs/test_auto_buffer.py."""
MORE = [
    "kivi:group_size=3:residual_length=7",
    f"tokenwise:{SIZES}",
    f"rotate:sinks=0:{SIZES}",
    "staircase:residual_length=32",
    "staircase:tokens_8bit=1:tokens_4bit=7:group_size=3:residual_length=1",
    f"mikv:{SIZES}",
    f"mikv:high=0.07:high_bits=8:{SIZES}",
    "mikv:high=1.0:residual_length=32:block_size=5",
    f"mikv:high=1.0:high_bits=8:{SIZES}",
    "mikv:high=0.0:high_bits=8:residual_length=0:block_size=32",
    "zipcache:recode_every=100",
    "zipcache:high=0.29:recode_every=1",
]


@pytest.mark.parametrize("method", [*(words("h2o", codec) for codec in CODECS), *(f"h2o+{more}@0.5" for more in MORE)])
def test_traits_and_layouts(method: str) -> None:
    fast = Policy.parse(method).codec
    slow = reference_codec(fast)
    traits = fast.traits
    if slow is None:
        assert fast.layout(7) == Layout(7)
        return
    for name in ("block", "group_size", "residual", "key_space", "pins", "pinned"):
        assert getattr(traits, name) == getattr(slow, name), name
    assert traits.demotion == (ByPriority(slow.recode_all) if slow.demote_by == "priority" else None)
    assert len(fast.stages) == len(slow.layout(10**4)[1]) or not slow.layout(10**4)[1]
    for tokens in [*range(1, 300), 999, 1000, 1001, 10**4]:
        exact, coded = slow.layout(tokens)
        assert fast.layout(tokens) == Layout(exact, tuple(coded)), tokens
