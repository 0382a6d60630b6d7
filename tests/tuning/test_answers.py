"""Rows of changes that are run together are as alone, and what is seen of a prompt does not depend on its answer."""

from __future__ import annotations

import pytest
import torch

from kvpolicy.statistics.windows import Past
from kvpolicy.tuning.answers import Answer, Changes, over
from kvpolicy.tuning.compression import LayerPrompt, prompt_of, whole
from kvpolicy.tuning.tap import LayerCall, tapped
from tests.tuning.test_measure import llama, window


def test_rows_that_change_several_layers_are_as_alone() -> None:
    text = window(40, 6)
    prompts: list[LayerPrompt] = []
    with tapped(llama(num_hidden_layers=3)) as tap:
        cache = tap.run(text.prompt, 40, lambda call: prompts.append(prompt_of(call, 40)))
        full = {prompt.layer_idx: whole(prompt.keys, prompt.values) for prompt in prompts}
        few = {layer: over(Past(*(t[:, :, ::3] for t in past[:3]))) for layer, past in full.items()}  # pyright: ignore[reportOptionalSubscript]
        answer = Answer(tap.model, cache, full, text.answer)
        rows: dict[str, Changes] = {
            "last": {2: few[2]},
            "ends": {0: few[0], 2: few[2]},
            "first": {0: few[0]},
            "none": {},
            "all": few,
        }
        together = dict(answer.kls(rows.items()))
        alone = {name: kl for pair in rows.items() for name, kl in answer.kls([pair])}
    assert together == pytest.approx(alone, rel=1e-4, abs=1e-9)
    assert together["none"] < 1e-9 and min(together[name] for name in ("last", "ends", "first")) > 1e-4


def test_the_largest_activations_of_a_prompt_are_those_without_its_answer() -> None:
    text = window(12, 40)
    seen: list[list[LayerCall]] = [[], []]
    with tapped(llama()) as tap:
        tap.run(torch.cat([text.prompt, text.answer]), 12, seen[0].append, pins=(1, 3))
        tap.run(text.prompt, 12, seen[1].append, pins=(1, 3))
    for call, alone in zip(*seen, strict=True):
        assert all(torch.equal(call.massive[count], alone.massive[count]) for count in (1, 3))
        assert call.massive[1].shape == (1, 12) and bool(call.massive[1].any())
