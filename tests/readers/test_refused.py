"""Options of readers, models and policies that are refused, each in a sentence, and what is near and taken."""

from __future__ import annotations

from typing import Any

import pytest

from kvpolicy import Policy, Reuse, ShadowKV
from kvpolicy.protocols import ModelInfo
from kvpolicy.readers.rocket import RocketKV
from kvpolicy.registry import lookup
from tests.conformance.calibration import write
from tests.readers.bench import DIM, HEADS

ONE = ModelInfo(1, 1, DIM)
SOME_LAYERS = ModelInfo(2, HEADS, DIM, None, (1, 3))
NEWEST = "must see the newest token's attention to every kept token"
SAME = "must keep the same tokens in every head to be combined with shadowkv"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        *((f"quest:read={value}", "read must be at least 1 token or a fraction") for value in ("0", "1.5", "0.0")),
        *((f"full+retrieval:{option}", r"Retrieval\.[a-z]+ must be") for option in ("cluster=0", "sinks=-1")),
        *((f"full+retrieval:{option}", r"Retrieval\.[a-z]+ must be") for option in ("rebuild=0", "read=0")),
        *((f"full+shadowkv:{option}", r"ShadowKV\.[a-z]+ must be") for option in ("rank=0", "page=0", "sinks=-1")),
        *((f"full+shadowkv:{option}", r"ShadowKV\.[a-z]+ must be") for option in ("rebuild=0", "recent=0")),
        *((f"reuse:{option}/exact", r"Reuse\.{} must") for option in ("every=1", "layers=2_1", "layers=2-3")),
        ("reuse:layers=1:dense=2/exact", r"Reuse\.layers must"),
        ("loki:calibration=", "Loki.calibration must be a folder or 'tiny', got an empty string"),
        *((f"{policy}@0.5", NEWEST) for policy in ("tova+labels:read=4", "kvcrush/tova+quest", "tova+exact")),
        ("snapkv+tokenwise+quest@0.5", "must not evict while decoding"),
        ("snapkv+tokenwise+centroids@0.5", "must not evict while decoding"),
        ("h2o+mikv+quest", "in the order of their positions"),
        ("h2o:decode=grow+zipcache+quest@0.5", "in the order of their positions"),
        ("csr:key_space=unrotated:read_top_k=4+labels", "must not choose the slots"),
        *((f"{selector}+shadowkv:joint=true@0.5", SAME) for selector in ("h2o", "snapkv")),
        ("tokenwise+shadowkv", "The codec must be plain for the reader shadowkv"),
        ("h2o+merge+shadowkv:host=true@0.5", "The merger must not merge while decoding"),
        ("full+reuse/shadowkv", "Reuse.base must be a reader that reads keys as they are stored"),
        *((f"reuse/{base}", "Reuse.base must be a reader that chooses") for base in ("all", "reuse")),
        # Layers that choose for none but themselves have a summary, and the others would have no correction.
        ("reuse/sparq", r"without estimates of unread tokens, got .*; try sparq:"),
        ("full+reuse/retrieval", "without estimates of unread tokens"),
    ],
)
def test_specs(spec: str, message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("{}", spec[6:].partition("=")[0])):
        Policy.parse(spec)


@pytest.mark.parametrize(
    "spec",
    [
        *(f"{base}+{reader}" for base in ("snapkv+tokenwise", "h2o+mikv") for reader in ("labels", "quest:page=1")),
        "snapkv+tokenwise+centroids:page=1",
        "reuse/sparq:correct=false",
        "reuse/centroids:estimate=false",
    ],
)
def test_what_is_combined(spec: str) -> None:
    assert Policy.parse(f"{spec}@0.5" if spec[0] != "r" else spec)


@pytest.mark.parametrize(
    "spec",
    [
        "quest:read=64:dense=0",
        "labels:read=64:dense=0",
        "exact:read=64",
        "tokenwise+quest:read=64",
        "reuse:layers=2_13/exact:read=256",
    ],
)
def test_specs_are_written_as_they_are_read(spec: str) -> None:
    assert str(Policy.parse(spec)) == spec
    assert Policy.parse(f"full+{spec}") == Policy.parse(spec)


@pytest.mark.parametrize(
    ("reader", "options", "model", "message"),
    [
        ("labels", {"channels": 9}, ONE, "at most the head dimension of 8, got 9; try 8"),
        ("sparq", {"channels": 9}, ONE, r"SparQ.channels must be at most the head dimension of 8, got 9; try 2"),
        ("rocket", {"channels": 9}, ONE, "at most the head dimension of 8, got 9; try 2"),
        ("loki", {"channels": 9}, ONE, "at most the head dimension of 8, got 9; try 2"),
        ("loki", {}, ONE, "The calibration 'tiny' must be"),
        ("shadowkv", {"rank": 9}, ONE, r"ShadowKV\.rank must be at most the head dimension, 8, got 9; try 4"),
        ("shadowkv", {"rank": 25, "joint": True}, ModelInfo(1, 3, DIM), "channels of all heads, 24, got 25; try 3"),
        ("reuse", {"dense": 1, "every": 2}, ModelInfo(2, HEADS, DIM, None, (0, 2)), "got 'auto', by which layer 1"),
        (
            "reuse",
            {"layers": "1_2"},
            SOME_LAYERS,
            "the policy manages, got '1_2', by which layer 2 chooses",
        ),
    ],
)
def test_models(reader: str, options: dict[str, Any], model: ModelInfo, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        lookup(reader)[1](**options).check(model)


def test_models_that_are_taken() -> None:
    ShadowKV(rank=8).check(ONE)
    ShadowKV().check(ModelInfo(1, 1, 1))
    ShadowKV(rank=24, joint=True).check(ModelInfo(1, 3, DIM))
    Reuse(layers="1").check(SOME_LAYERS)
    loki = lookup("loki")[1](calibration=str(write("lowrank")))
    loki.check(ONE)
    with pytest.raises(ValueError, match="must be for a head dimension of 9, got 8"):
        loki.check(ModelInfo(1, 1, 9))


@pytest.mark.parametrize("share", [0, 1.5, -1])
def test_a_share_of_rocket_that_is_out_of_range(share: float) -> None:
    with pytest.raises(ValueError, match="share must be above 0 and up to 1"):
        RocketKV.split(share)
