"""One prompt, the same in every picture, and what a policy keeps of it in a run of the engine."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from random import Random
from typing import Any, NamedTuple

import torch
from torch import Tensor

import kvpolicy
from kvpolicy_eval.data import prompts

SEED, RECORDS = 6, 35
"""Of the prompt; its asked fact stands in the middle, and methods differ on it."""
BUDGET = 0.25
RETRIEVES = 1
"""The layer that looks up records in the embedded model, as its card says."""


@dataclass(frozen=True, slots=True)
class Scene:
    """The prompt, as text and as tokens.

    Attributes:
        ids: Its tokens, [1, P].
        answer: What is right.
        fact: First and last position of the record that is asked for.
        question: Where the question begins.
    """

    ids: Tensor
    answer: str
    fact: tuple[int, int]
    question: int

    @property
    def length(self) -> int:
        """P."""
        return self.ids.shape[1]


class Kept(NamedTuple):
    """What a policy keeps of the scene.

    Attributes:
        share: Share of the KV heads that hold a position, [L, P].
        mark: Share of them in which it is a representative of `kvcrush`, [L, P].
        budgets: Tokens of each layer.
        answer: What the model then says, up to the end of the line.
        score: What the selector remembers of each position, mean over KV heads, [L, P]; nan where nothing.
    """

    share: Tensor
    mark: Tensor
    budgets: list[int]
    answer: str
    score: Tensor


@functools.cache
def embedded() -> tuple[Any, Any]:
    """The embedded model and its tokenizer."""
    return kvpolicy.tiny()


@functools.cache
def scene() -> Scene:
    """Records, `key=value` each, and a question about one of them."""
    _, tokenizer = embedded()
    text, answer = prompts.recall(Random(SEED), RECORDS)
    question = text.rindex("?")
    fact = text.index(text[question + 1 :] + answer)
    found = tokenizer(text, return_offsets_mapping=True)
    begins = [start for start, _ in found.offset_mapping]
    first, last = begins.index(fact), begins.index(text.index("\n", fact))
    return Scene(torch.tensor([found.input_ids]), answer, (first, last), begins.index(question))


@functools.cache
@torch.inference_mode()
def kept(policy: str) -> Kept:
    """Run the scene under a policy: read what the cache holds after the prompt, then let the model answer."""
    model, tokenizer = embedded()
    now = scene()
    with kvpolicy.attach(model, policy):
        cache = kvpolicy.PolicyCache(model, new=len(now.answer))
        model(now.ids, past_key_values=cache, logits_to_keep=1)
        layers = [_layer(slot, now.length) for slot in cache.policy_layers]
        budgets = [int(slot.budget[0].clamp_max(now.length)) for slot in cache.policy_layers]
        out = model.generate(now.ids, max_new_tokens=len(now.answer), do_sample=False)
    share, mark, score = (torch.stack(rows) for rows in zip(*layers, strict=True))
    said = tokenizer.decode(out[0, now.length :], skip_special_tokens=True)
    return Kept(share, mark, budgets, said.split("\n")[0].strip(), score)


@functools.cache
@torch.inference_mode()
def cosines() -> list[float]:
    """What `squeeze` measures of the scene in each layer."""
    model, _ = embedded()
    with kvpolicy.attach(model, f"squeeze+window@{BUDGET}"):
        cache = kvpolicy.PolicyCache(model)
        model(scene().ids, past_key_values=cache, logits_to_keep=1)
        return cache.cosines()[0].tolist()


def _layer(slot: Any, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of one layer: share of heads that hold each position, that hold it as a representative, and its score."""
    positions: Tensor = slot.positions[0].long()  # [H, S]
    heads, valid = len(positions), positions >= 0
    at = positions.where(valid, length)
    base = getattr(slot.state, "base", slot.state)
    count = torch.zeros(3, length + 1)
    count[0].index_add_(0, at.flatten(), valid.flatten().float())
    if hasattr(slot.state, "mark"):
        count[1].index_add_(0, at.flatten(), (slot.state.mark[0] > 0).flatten().float())
    score = torch.full((length,), torch.nan)
    worth = base.score if hasattr(base, "score") else base.total / base.probes.clamp_min(1) if base else None
    if worth is not None:
        count[2].index_add_(0, at.flatten(), worth[0].flatten().float())
        score = (count[2] / count[0].clamp_min(1)).where(count[0] > 0, torch.nan)[:length]
    return count[0, :length] / heads, count[1, :length] / heads, score
