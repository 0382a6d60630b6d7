"""The tables agree with transformers: the counted entries, special cases, aliases, reasons."""

from __future__ import annotations

import re
from importlib.metadata import version

import pytest

pytest.importorskip("transformers")

from kvpolicy_eval.families import entries, special
from kvpolicy_eval.families.aliases import aliases
from kvpolicy_eval.families.entries import CAUSAL, IMAGE, Entry, classes, counted, installed, named, newer
from kvpolicy_eval.families.reasons import REASONS, reason_of
from kvpolicy_eval.families.sizes import ONLY_IF_SET, SIZES

RELEASE = tuple(map(int, version("transformers").split(".")[:2]))
KNOWN = {*counted(), *installed()}


def test_counts_are_over_the_entries_of_one_version() -> None:
    found = counted()
    assert entries.counted_version() == "5.23.0"
    assert len(set(found)) == len(found) == 286
    assert (sum(entry.kind == CAUSAL for entry in found), sum(entry.kind == IMAGE for entry in found)) == (189, 97)
    assert found == sorted(found)


def test_installed_entries_are_those_of_the_mappings() -> None:
    from transformers.models.auto import modeling_auto as auto

    assert classes()[CAUSAL] is auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    assert len(installed()) == len(auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) + len(
        auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    )
    if RELEASE >= (5, 23):
        assert {*counted()} <= {*installed()}
        assert {*newer()} == {*installed()} - {*counted()}
    if RELEASE == (5, 23):
        assert newer() == []


def test_a_new_class_appears_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.auto import modeling_auto as auto

    names = {**auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, "of_tomorrow": "OfTomorrowForCausalLM"}
    monkeypatch.setattr(auto, "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", names)
    entry = Entry(CAUSAL, "of_tomorrow")
    assert entry in installed() and entry in newer() and entry not in counted()


def test_names_choose_entries_of_both_kinds() -> None:
    assert named(["gemma3", "llama"]) == [Entry(CAUSAL, "gemma3"), Entry(CAUSAL, "llama"), Entry(IMAGE, "gemma3")]
    assert named([]) == installed()
    with pytest.raises(ValueError, match="causal or image-text models, got 'unheard_of'"):
        named(["unheard_of"])


def test_special_cases_are_of_entries() -> None:
    keys = {entry.key for entry in KNOWN} | {entry.name for entry in KNOWN}
    for table in (special.FIELDS, special.ATTRIBUTES, special.LARGE, special.WHY_STOCK_FAILS):
        assert not table.keys() - keys
    assert SIZES.keys() >= ONLY_IF_SET


PUBLIC = {
    "DeepSeek R1": "deepseek_v3",
    "Kimi K2": "deepseek_v3",
    "Llama 3.1": "llama",
    "Phi-4": "phi3",
    "Qwen3.5": "qwen3_5_text",
    "Granite 4": "granitemoehybrid",
    "SmolLM3": "smollm3",
    "GLM-4.5": "glm4_moe",
    "gpt-oss 20B": "gpt_oss",
}


def test_aliases_are_of_names_and_in_their_order() -> None:
    found = aliases()
    assert not found.keys() - {entry.name for entry in KNOWN}
    assert [*found] == sorted(found)
    assert all(called and len(set(called)) == len(called) for called in found.values())
    assert not [name for name, called in found.items() if any(re.search(r"[|`<>]", one) for one in called)]
    for public, name in PUBLIC.items():
        assert [key for key, called in found.items() if public in called] == [name], public


def test_a_sentence_has_one_reason() -> None:
    assert all(re.compile(pattern) for pattern in REASONS.values())
    said = (
        "Every layer must have full or sliding-window attention, a state, or both, got layer 3 of qwen4_exp_text, "
        "whose cache (DynamicIndexedLayer) also holds an index, by which sparse attention chooses tokens; try another "
        "model."
    )
    assert [reason for reason, pattern in REASONS.items() if re.search(pattern, said)] == [reason_of(said)]
    assert reason_of("Something else is wrong.") == ""
