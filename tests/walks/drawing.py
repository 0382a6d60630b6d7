"""Policies and models that are drawn at random."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import torch

import kvpolicy
from kvpolicy import KVPolicyError
from kvpolicy.registry import names
from tests.conformance.models import FAMILIES as NAMED
from tests.conformance.models import UNNAMED, build
from tests.conformance.policies import spec_of
from tests.conformance.test_fuzz import draw_codec, draw_merger, draw_selector
from tests.engine.test_by_layer_random import drawn
from tests.walks.life import check_sentence

FAMILIES = [
    *["llama"] * 6,
    *["qwen2", "qwen3", "gemma2", "gemma3", "gemma3n", "gemma4", "gemma4_shared", "phi3", "gpt_oss"],
    *["qwen3_5", "granite_hybrid", "falcon_h1", "lfm2", "nemotron_h", "kimi_linear"],  # states
    *["deepseek_v3", "deepseek_v2", "minicpm3", "mimo_v2_flash"],  # latents, values of another size
    *["gpt2", "opt", "gpt_neox", "falcon_grouped"],
]
BUDGETS = ["0.5", "0.7", "0.3:least=12", "0.9", "16", "24", "40", "20KB", "60KB", "1.0"]
DTYPES = (torch.float32, torch.float32, torch.bfloat16)
SKIPPED = ["1-0", "0-1", "1-1", "last:1", "first:1"]


def draw_model(dice: Random, dtypes: Sequence[torch.dtype]) -> Any:
    """A small model of any family."""
    families = FAMILIES if dice.random() < 0.85 else [*NAMED, *UNNAMED]
    return build(dice.choice(families), dice.choice(dtypes))


def draw_policy(dice: Random) -> str:
    """A spec with parts on any axis; not all of them are allowed."""
    grows = dice.random() < 0.3
    parts: list[str] = []
    allocator = dice.choice(["", "", "", *names("allocator")])
    first = spec_of(allocator) if allocator else ""
    if first and dice.random() < 0.25:
        first += f":skip={dice.choice(SKIPPED)}"
    heads = dice.choice(["", "", "", "adakv", "even", "duo"])
    if heads:
        first = f"{first or 'uniform'}/{spec_of(heads)}"
    if first:
        parts.append(first)
    parts.append(_draw_selector(dice, grows))
    if dice.random() < 0.25:
        parts.append(draw_merger(dice))
    if dice.random() < 0.5:
        parts.append(draw_codec(dice) if dice.random() < 0.5 else spec_of(dice.choice(names("codec"))))
    if dice.random() < 0.25:
        reader = spec_of(dice.choice(names("reader")))
        parts.append(f"{reader}:host=true" if dice.random() < 0.3 and "reuse" not in reader else reader)
    return "+".join(parts) + f"@{dice.choice(BUDGETS)}"


def _draw_selector(dice: Random, grows: bool) -> str:
    roll = dice.random()
    if roll < 0.12:
        return "full"
    if roll < 0.5:
        selector = spec_of(dice.choice(names("selector")))
        if grows and "/" not in selector and selector != "full":
            selector += ":decode=grow"
    else:
        selector = draw_selector(dice)
    if selector != "full" and dice.random() < 0.15:
        first, slash, rest = selector.partition("/")
        selector = f"{first}:protect=prompt{slash}{rest}"
    return selector


def attach(dice: Random, model: Any) -> Any:
    """Attach a policy that the model allows; those that it does not are refused in a sentence."""
    for _ in range(60):
        policy: Any = draw_policy(dice)
        if dice.random() < 0.06:
            policy = drawn(dice, model.config.get_text_config().num_hidden_layers)
        how: dict[str, Any] = {
            "tile": dice.choice([None, None, 4, 7, 64]),
            "chunks": dice.choice(["select", "select", "hold"]),
            "hold": dice.choice(["plain", "plain", "codes"]),
        }
        try:
            return kvpolicy.attach(model, policy, **how)
        except KVPolicyError as error:
            check_sentence(error)
    return kvpolicy.attach(model, "full")
