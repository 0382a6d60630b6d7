"""Options of allocators, and policies with them, that are refused, each in a sentence."""

from __future__ import annotations

from typing import Any

import pytest

from kvpolicy import KVPolicyError, Policy
from kvpolicy.allocators.pyramid import Pyramid
from kvpolicy.allocators.uniform import Uniform
from kvpolicy.protocols import MeasuresAttention
from kvpolicy.selectors.h2o import H2O

SKIP = "uniform:skip must be 2-2, got '{}'; try skip=2-2"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("cake:entropy=0", r"CAKE.entropy must be at least 0.001, got 0.*; try 1.0"),
        ("cake:variance=-1", r"CAKE.variance must be at least 0.001, got -1.*; try 1.0"),
        ("dynamickv:kernel=6", "DynamicKV.kernel must be odd, got 6; try 7"),
        ("lava:kernel=4", "LAVa.kernel must be odd, got 4; try 5"),
        ("mass:share=0", r"AttentionMass.share must be greater than 0 and at most 1, got 0.*; try 0.975"),
        ("simlayer:threshold=2", r"SimLayerKV.threshold must be greater than 0 and at most 1, got 2.*; try 0.9"),
        ("squeeze:keep_share=0.0", r"SqueezeAttention.keep_share must be .*, got .*; try .*\."),
        ("squeeze:keep_share=1.1", r"SqueezeAttention.keep_share must be .*, got .*; try .*\."),
        ("squeeze:groups=1", r"SqueezeAttention.groups must be .*, got .*; try .*\."),
        ("zigzag:bound=1.5", "ZigZagKV.bound must be at least 0 and at most 1, got 1.5; try 0.2"),
        ("zigzag:mass=0", r"ZigZagKV.mass must be greater than 0 and at most 1, got 0.*; try 0.9"),
        ("zigzag:window=0", "window must be"),
        ("kvcompose+window", r"must rank tokens by attention .* across layers, got window.* try kvzip or"),
        ("uniform/duo:sparsity=1.5", "DuoAttention.sparsity must be between 0 and 1, got 1.5; try 0.5."),
        ("uniform/duo:sinks=-1", "DuoAttention.sinks must be at least 0"),
        ("uniform/duo:recent=0", "DuoAttention.recent must be at least 1"),
        ("uniform/duo:file=", "DuoAttention.file must be a file or 'tiny', got an empty string; try 'tiny'."),
        ("uniform:skip=two", SKIP.format("two")),
        ("uniform:skip=first:2last:2", SKIP.format("first")),
        ("uniform:skip=", SKIP.format("")),
        ("uniform:skip=2-2:skip=1-1", "must be given once, got 'skip' twice"),
        ("uniform:skip=0-0", "must skip at least one layer, got none"),
        ("uniform:skip", "got 'skip'"),
        ("h2o:skip=2-2", "options of 'h2o' must be among .*, got 'skip'"),
    ],
)
def test_specs(spec: str, message: str) -> None:
    with pytest.raises(KVPolicyError, match=message):
        Policy.parse(spec if "+" in spec or "h2o" in spec else f"{spec}+snapkv@0.2")


@pytest.mark.parametrize("beta", [0.5, -1, float("inf"), float("nan")])
def test_pyramid(beta: float) -> None:
    with pytest.raises(KVPolicyError, match=r"Pyramid\.beta must be at least 1 and finite, got"):
        Pyramid(beta=beta)


@pytest.mark.parametrize("metric", ["attention", "curve"])
def test_an_allocator_without_a_measure(metric: Any) -> None:
    class Plain(Uniform):
        """An allocator that asks for attention or curves, and cannot measure them."""

        layer_metric = metric  # pyright: ignore[reportIncompatibleMethodOverride]

    assert not isinstance(Plain(), MeasuresAttention)
    with pytest.raises(
        TypeError, match=rf"must have attention and a method measure\(seen\) for layer_metric='{metric}'"
    ):
        Policy(allocator=Plain(), selector=H2O(), budget=0.5)
