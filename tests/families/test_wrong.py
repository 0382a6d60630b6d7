"""The check finds what is wrong: other keys than a cache says, errors of others, models that show nothing."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import kvpolicy
from kvpolicy_eval.families import check as checks
from kvpolicy_eval.families import conversation
from kvpolicy_eval.families.check import ERROR, FAILED, REFUSED, RIGHT, WITHIN, WRONG, check
from kvpolicy_eval.families.conversation import Held, under_policy, with_stock
from kvpolicy_eval.families.differences import largest
from kvpolicy_eval.families.entries import CAUSAL, Entry
from kvpolicy_eval.families.page import faults_of
from kvpolicy_eval.families.prompts import PROMPT, prompt, turns
from kvpolicy_eval.families.small_model import build

LLAMA = Entry(CAUSAL, "llama")


@pytest.fixture(scope="module")
def model() -> Any:
    return build(LLAMA)


def swap(held: Held) -> Held:
    """One head of one layer said to hold an evicted token in place of one that it holds."""
    marks = held[0][0, 0]
    kept = marks.nonzero()[0, 0]
    evicted = (~marks).nonzero()
    if len(evicted):
        marks[kept] = False
        marks[evicted[0, 0]] = True
    return held


def test_one_swapped_position_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    held_by = conversation.held_by
    monkeypatch.setattr(conversation, "held_by", lambda cache: swap(held_by(cache)))
    result = check(LLAMA)
    assert result["verdict"] == WRONG and "Under window@0.5, logits differ by" in result["sentence"]
    assert result["full"] <= WITHIN, "a cache that evicts nothing has nothing to swap"
    (fault,) = faults_of(result)
    assert fault.startswith("WRONG: Under window@0.5")


@pytest.mark.parametrize("spec", checks.EVICTING)
def test_one_key_of_another_token_is_seen(model: Any, spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache itself is changed: behind the prompt, the newest token of one head gets the key of another token."""
    given = prompt(LLAMA)
    following = turns()

    def differs() -> float:
        played = under_policy(model, spec, given, following)
        return largest(played.logits, with_stock(model, given, following, played.held))

    assert differs() <= WITHIN
    forward = conversation._forward

    def spoiled(model: Any, cache: Any, inputs: Any) -> torch.Tensor:
        logits = forward(model, cache, inputs)
        if isinstance(cache, kvpolicy.PolicyCache) and inputs is given:
            tensors = cache.policy_layers[0].store.tensors
            keys = tensors.keys.view(-1, tensors.keys.shape[-1])
            positions = tensors.positions.flatten()
            newest = positions.argmax()
            other = positions.eq(PROMPT - 2).nonzero()[0, 0]
            assert positions[newest] == PROMPT - 1 and not torch.equal(keys[newest], keys[other])
            keys[newest] = keys[other]
        return logits

    monkeypatch.setattr(conversation, "_forward", spoiled)
    assert differs() > 100 * WITHIN


def result_of(monkeypatch: pytest.MonkeyPatch, name: str, instead: Callable[..., Any]) -> dict[str, Any]:
    monkeypatch.setattr(checks, name, instead)
    return check(LLAMA)


def test_a_model_that_does_not_depend_on_what_is_evicted_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "SEEN_FROM", 1e9)
    result = check(LLAMA)
    assert result["verdict"] == WRONG and "this shows nothing" in result["sentence"]


def test_an_error_of_others_is_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    def attach(*_: Any) -> Any:
        raise AttributeError("'LlamaConfig' object has no attribute 'made_up'")

    result = result_of(monkeypatch, "kvpolicy", type("module", (), {"attach": attach, "plan": kvpolicy.plan}))
    assert result["verdict"] == ERROR and result["sentence"].startswith("AttributeError: 'LlamaConfig' object has no")
    assert len([*faults_of(result)]) == 1


def test_a_trace_left_behind_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    attach = kvpolicy.attach

    @contextmanager
    def leaving(model: Any, spec: str) -> Generator[Any]:
        with attach(model, spec) as handle:
            yield handle
        with torch.no_grad():
            next(model.parameters()).mul_(1.01)

    result = result_of(monkeypatch, "kvpolicy", type("module", (), {"attach": leaving, "plan": kvpolicy.plan}))
    assert result["verdict"] == WRONG and "After detach" in result["sentence"]


def test_rows_that_differ_in_a_padded_batch_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = iter([1e-6, 0.3])
    result = result_of(monkeypatch, "_padded_difference", lambda *_: next(rows))
    assert result["verdict"] == WRONG and "Rows of a padded batch differ by 0.3" in result["sentence"]
    rows = iter([0.2, 0.3])
    assert check(LLAMA)["verdict"] == RIGHT, "where stock is wrong, nothing is required"


@pytest.mark.parametrize(
    ("result", "words"),
    [
        ({"verdict": REFUSED, "sentence": "No."}, "the page has no reason for: No."),
        (
            {"verdict": REFUSED, "sentence": "A Falcon ..., got one with ALiBi.", "planned": {"nbytes": 9}},
            "attach and plan must say the same, and plan says {'nbytes': 9}",
        ),
        ({"verdict": RIGHT, "planned": {"refused": "No."}}, "attach accepts it, and plan says {'refused': 'No.'}"),
        (
            {"verdict": RIGHT, "planned": {"nbytes": 9}, "policies": {checks.PLANNED: {"nbytes": 10}}},
            "plan says 9 bytes, and the cache holds 10",
        ),
    ],
)
def test_faults(result: dict[str, Any], words: str) -> None:
    assert any(words in fault for fault in faults_of(result))
    said = "Every layer must attend once in a forward, got layer 1 twice."
    refused = {"verdict": REFUSED, "sentence": said, "attached": True, "planned": {"nbytes": 9}}
    assert [*faults_of(refused)] == [] and REFUSED not in FAILED, "a refusal by the forward alone is none of the plan"
