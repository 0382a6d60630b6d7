"""The facts of a layer's parts that its spec asks once."""

from __future__ import annotations

from typing import Any

import pytest

from kvpolicy import Policy
from kvpolicy.engine.layer_spec import LayerSpec
from kvpolicy.planning.memory import layer_spec
from kvpolicy.statistics import union


@pytest.mark.parametrize(
    ("policy", "merges"), [("h2o+merge@0.5", True), ("h2o:decode=grow+merge@0.5", False), ("h2o@0.5", False)]
)
def test_a_cache_that_grows_merges_nothing_in_steps(policy: str, merges: bool) -> None:
    assert layer_spec(Policy.parse(policy), 0).merges_in_steps == merges


def test_the_statistics_of_a_prompt_are_those_of_selector_and_merger() -> None:
    spec = layer_spec(Policy.parse("h2o+regress@0.5"), 3)
    assert spec.layer_idx == 3 and spec.statistics == spec.selector.statistics
    assert spec.prompt_statistics == union(spec.selector.statistics, spec.merger.statistics) != spec.statistics


@pytest.mark.parametrize("codec", ["csr", "kivi", "plain"])
def test_keys_are_rotated_back_only_for_codecs_of_unrotated_keys(codec: str) -> None:
    rope: Any = object()
    policy = Policy.parse(f"snapkv+{codec}@0.5")
    spec = layer_spec(policy, 0, rope)
    assert spec.rope is rope and (spec.key_rope is rope) == (codec == "csr")
    assert spec.codec_traits == policy.codec.traits and len(spec.stages) == len(policy.codec.stages)


def test_by_default_tokens_are_dropped_and_every_slot_is_read() -> None:
    policy = Policy.parse("h2o@0.5")
    spec = LayerSpec(0, policy.selector, policy.codec)
    assert spec == layer_spec(policy, 0) and not spec.grows
