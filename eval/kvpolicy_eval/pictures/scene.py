"""The prompt that the pictures share, and what a policy keeps of it in a run of the engine."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from random import Random
from typing import Any, NamedTuple

import torch
from torch import Tensor

import kvpolicy
from kvpolicy_eval.common.conversation import run
from kvpolicy_lm_eval.data import prompts

SEED = 6
"""Seed of the prompt, with which the record asked for is in the middle and methods differ on it."""
RECORDS = 35
BUDGET = 0.25
RETRIEVES = 1
"""The layer of the embedded model that looks up records, see its model card."""


@dataclass(frozen=True, slots=True)
class Scene:
    """The prompt, as text and as tokens.

    Attributes:
        ids: Token ids, [1, P].
        answer: The right answer.
        fact: First and last position of the record asked for.
        question: Position of the question.
    """

    ids: Tensor
    answer: str
    fact: tuple[int, int]
    question: int

    @property
    def length(self) -> int:
        """Tokens of the prompt, P."""
        return self.ids.shape[1]


class Kept(NamedTuple):
    """Tokens of the scene that a policy keeps.

    Attributes:
        share: Share of the KV heads that keep a position, [L, P].
        mark: Share of the KV heads in which a position is a representative of `kvcrush`, [L, P].
        budgets: Budget of each layer in tokens.
        answer: The model's answer, up to the end of the line.
        score: The selector's statistic of each position, averaged over KV heads, [L, P]; NaN if it has none.
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
    encoded = tokenizer(text, return_offsets_mapping=True)
    starts = [start for start, _ in encoded.offset_mapping]  # character at which each token starts
    first = starts.index(fact)
    last = starts.index(text.index("\n", fact))
    return Scene(torch.tensor([encoded.input_ids]), answer, (first, last), starts.index(question))


@functools.cache
@torch.inference_mode()
def kept(policy: str) -> Kept:
    """Run the scene under a policy: inspect the cache after the prompt, then generate the answer."""
    model, tokenizer = embedded()
    prompt = scene()
    cache = cache_under(policy)
    layers = [_inspect(layer.store, prompt.length) for layer in cache.policy_layers]
    budgets = [int(layer.budget[0].clamp_max(prompt.length)) for layer in cache.policy_layers]
    with kvpolicy.attach(model, policy):
        out = model.generate(prompt.ids, max_new_tokens=len(prompt.answer), do_sample=False)
    share, mark, score = (torch.stack(rows) for rows in zip(*layers, strict=True))
    completion = tokenizer.decode(out[0, prompt.length :], skip_special_tokens=True)
    return Kept(share, mark, budgets, completion.split("\n")[0].strip(), score)


@functools.cache
def cache_under(policy: str) -> kvpolicy.PolicyCache:
    """The cache after the scene's prompt, with capacity for the answer."""
    model, _ = embedded()
    return run(model, policy, [scene().ids], new=len(scene().answer)).cache


def cosines() -> list[float]:
    """Cosine of each layer that `squeeze` measures on the scene."""
    return cache_under(f"squeeze+window@{BUDGET}").cosines()[0].tolist()


def heads_of(policy: str) -> list[list[int]]:
    """Tokens that each KV head of every layer keeps of the scene."""
    return [layer.store.geometry.tokens_by_head()[0].tolist() for layer in cache_under(policy).policy_layers]


def _inspect(store: Any, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Share of KV heads that keep each position of a layer, that keep it as a representative, and its mean score."""
    positions: Tensor = store.tensors.positions[0].long()  # [H, S]
    heads = len(positions)
    occupied = positions >= 0
    index = positions.where(occupied, length).flatten()  # empty slots count in an extra column, which is dropped
    kept_count = torch.zeros(length + 1).index_add_(0, index, occupied.flatten().float())
    mark_count = torch.zeros(length + 1)
    if hasattr(store.tensors.state, "mark"):
        mark_count.index_add_(0, index, (store.tensors.state.mark[0] > 0).flatten().float())
    score = torch.full((length,), torch.nan)
    statistic = _statistic(store.tensors.state)
    if statistic is not None:
        total = torch.zeros(length + 1).index_add_(0, index, statistic[0].flatten().float())
        score = (total / kept_count.clamp_min(1)).where(kept_count > 0, torch.nan)[:length]
    return kept_count[:length] / heads, mark_count[:length] / heads, score


def _statistic(state: Any) -> Tensor | None:
    """The statistic that a selector, or the base of `kvcrush`, ranks tokens by; None if it has none."""
    base = getattr(state, "base", state)
    if not base:
        return None
    if hasattr(base, "attn_sum"):
        return base.attn_sum / base.probes.clamp_min(1)
    return getattr(base, "score", None)
