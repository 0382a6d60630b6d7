"""The oracle hides from a stock model what it is told to, also where a layer reads the keys of another one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from kvpolicy_eval.families.conversation import with_stock
from kvpolicy_eval.families.differences import difference, largest
from kvpolicy_eval.families.entries import CAUSAL, Entry, installed
from kvpolicy_eval.families.oracle import owners_of
from kvpolicy_eval.families.prompts import PROMPT, prompt, turns
from kvpolicy_eval.families.small_model import build
from tests.engine.test_attach import trace

HEADS = {"llama": 2, "falcon": 1, "gemma3n_text": 2, "deepseek_v3": 1}
"""KV heads of families whose attention is reached in different ways: by the interface, outside it, shared, latent."""


def played(model: Any, entry: Entry, held: dict[int, torch.Tensor]) -> list[torch.Tensor]:
    pieces = turns().pieces
    return with_stock(model, prompt(entry), turns(), [{}, *([held] * len(pieces))] if held else ())


@pytest.mark.parametrize("name", HEADS)
def test_hidden_tokens_do_not_matter(name: str) -> None:
    """A later layer sees the hidden tokens of no earlier one: with all hidden in each, the prompt does not matter."""
    entry = Entry(CAUSAL, name)
    if entry not in installed():
        pytest.skip("this version of transformers lacks it")
    model = build(entry)
    before = trace(model)
    stock = played(model, entry, {})
    everything = {layer: torch.ones(1, HEADS[name], PROMPT, dtype=torch.bool) for layer in range(4)}
    assert largest(played(model, entry, everything), stock) == 0.0
    some = {layer: marks.clone() for layer, marks in everything.items()}
    some[1][:, :, 5] = False
    hidden = played(model, entry, some)
    assert difference(hidden[0], stock[0]) == 0.0, "the prompt itself attends to all of it"
    assert largest(hidden[1:], stock[1:]) > 1e-3
    assert trace(model) == before
    assert largest(played(model, entry, {}), stock) == 0.0, "nothing stays behind"


def test_readers_of_a_layer_see_what_it_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = Entry(CAUSAL, "gemma3n_text")
    model = build(entry)
    assert owners_of(model) == {2: 0, 3: 1}
    assert owners_of(build(Entry(CAUSAL, "llama"))) == {}
    held = {1: torch.ones(1, HEADS[entry.name], PROMPT, dtype=torch.bool)}
    held[1][:, :, 5] = False
    both = played(model, entry, held)
    monkeypatch.setattr("kvpolicy_eval.families.oracle.owners_of", lambda _: {})
    assert largest(played(model, entry, held)[1:], both[1:]) > 1e-4
