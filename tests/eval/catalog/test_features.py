"""The table of supported models says what the tests run, and nothing else."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvpolicy_eval.catalog import features
from tests.conformance import test_models, test_tiles
from tests.conformance.models import FAMILIES, UNNAMED
from tests.deepspeed.checkpoints import MORE, NAMED
from tests.engine import test_compile, test_features
from tests.parallel import test_by_plan

ROOT = Path(__file__).parents[3]
FILE = ROOT / "eval" / "kvpolicy_eval" / "catalog" / "features.yaml"
FOUND = features.load()


def cases(test: Callable[..., Any]) -> set[str]:
    """The values of the argument `family` of a test."""
    found: set[str] = set()
    for mark in vars(test)["pytestmark"]:
        if mark.name == "product" and "family" in mark.args[0].names:
            found |= {*mark.args[0].axes[mark.args[0].names.index("family")]}
    assert found, test
    return found


def mixes_layers(family: str) -> bool:
    """Whether a family of the tests has layers with a sliding window beside others."""
    config = {**FAMILIES, **UNNAMED}[family]().get_text_config()
    return {"sliding_attention", "full_attention"} <= {*(getattr(config, "layer_types", None) or ())}


SHARDED = {*NAMED, *(MORE.keys() & FOUND.families.keys())}
RUN: dict[str, set[str]] = {
    "padding": cases(test_models.test_methods_and_families),
    "beams": cases(test_features.test_beams_and_chunks),
    "chunks": cases(test_features.test_beams_and_chunks),
    "tiles": cases(test_tiles.test_every_family),
    "compile": {*cases(test_compile.test_families), "llama"},  # test_one_graph_for_all_steps is of llama
    "deepspeed": SHARDED,
    "transformers": {*test_by_plan.MODELS},
    "offload": cases(test_features.test_offloaded_weights),
    "hybrid": {family for family in (*FAMILIES, *UNNAMED) if mixes_layers(family)},
}


@pytest.mark.parametrize("name", [*RUN])
def test_a_yes_is_a_case_of_a_test(name: str) -> None:
    (feature,) = (some for some in FOUND.features if some.name == name)
    assert feature.families == RUN[name]
    assert all((ROOT / path).is_file() for path in feature.tests)


def test_every_feature_and_every_family_is_compared() -> None:
    assert [feature.name for feature in FOUND.features] == [*RUN]
    assert FOUND.families.keys() == {*FAMILIES, *UNNAMED} | SHARDED


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"only": ["lllama"]}, "must name families of its list, got 'lllama'"),
        ({"only": ["llama"], "except": ["opt"]}, "must have one of 'only' and 'except'"),
        ({}, "must have one of 'only' and 'except'"),
    ],
)
def test_a_wrong_entry_is_one_sentence(change: dict[str, Any], message: str) -> None:
    content = copy.deepcopy(yaml.safe_load(FILE.read_text(encoding="utf-8")))
    entry = content["features"]["compile"]
    del entry["only"]
    entry |= change
    with pytest.raises(ValueError, match=message):
        features.read(content)
