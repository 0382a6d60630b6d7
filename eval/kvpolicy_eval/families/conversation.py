"""A conversation of given tokens, under a policy and with a stock model: a prompt, steps, a second turn, steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import DynamicCache

import kvpolicy
from kvpolicy.hf.cache_names import cache_argument
from kvpolicy.hf.discovery import find_sites
from kvpolicy_eval.families.oracle import Held, oracle
from kvpolicy_eval.families.prompts import Inputs, Turns

Written = tuple[Tensor, Tensor]
"""Tokens, [B, new], and their logits, [B, new, vocabulary]."""


class Played(NamedTuple):
    """A conversation under a policy.

    Attributes:
        logits: Of each forward, of the prompt those of its last token.
        held: What each forward could read of the tokens before it.
        nbytes: Bytes of the cache behind the prompt.
    """

    logits: list[Tensor]
    held: list[Held]
    nbytes: int


def under_policy(model: nn.Module, spec: str, prompt: Inputs, turns: Turns) -> Played:
    """Play a conversation under a policy."""
    with torch.no_grad(), kvpolicy.attach(model, spec):
        cache = kvpolicy.PolicyCache(model)
        logits = [_forward(model, cache, prompt)[:, -1:]]
        nbytes = cache.nbytes
        held: list[Held] = [{}]
        for piece in turns.pieces:
            # A step evicts before it writes its token; a second turn attends first.
            before = held_by(cache)
            logits.append(_forward(model, cache, {"input_ids": piece}))
            held.append(held_by(cache) if piece.shape[1] == 1 else before)
    return Played(logits, held, nbytes)


def with_stock(model: nn.Module, prompt: Inputs, turns: Turns, held: Sequence[Held] = ()) -> list[Tensor]:
    """Play it with the stock model and its stock cache; return the logits of each forward.

    Args:
        model: The stock model.
        prompt: Inputs of the prompt.
        turns: What follows.
        held: What each forward may read of the tokens before it; everything if empty.
    """
    logits = list[Tensor]()
    with torch.no_grad(), oracle(model) as read:
        cache = DynamicCache(config=model.config)  # pyright: ignore[reportArgumentType]
        for place, inputs in enumerate([prompt, *({"input_ids": piece} for piece in turns.pieces)]):
            read(held[place] if held else {})
            logits.append(_forward(model, cache, inputs))
    return [logits[0][:, -1:], *logits[1:]]


def held_by(cache: Any, padding: Tensor | None = None) -> Held:
    """Which columns each KV head of a cache holds, by layer: [B, H, columns seen] bool.

    Args:
        cache: The cache.
        padding: Columns of padding before each row's first token, [B]; None without any.
    """
    seen = cache.get_seq_length()
    found: Held = {}
    for layer in cache.policy_layers:
        positions = layer.head_positions.long().cpu()
        columns = positions if padding is None else positions + padding[:, None, None]
        found[layer.layer_idx] = _mark(columns.where(positions >= 0, -1), seen)
    return found


def _mark(columns: Tensor, seen: int) -> Tensor:
    """Columns [B, H, n], -1 for none, as [B, H, seen] bool."""
    marks = torch.zeros(*columns.shape[:2], seen + 1, dtype=torch.bool)
    return marks.scatter_(2, columns % (seen + 1), torch.tensor(True).expand(columns.shape))[..., :-1]


def _forward(model: nn.Module, cache: Any, inputs: Inputs) -> Tensor:
    """Logits of a forward, [B, tokens, vocabulary] fp32."""
    return model(**inputs, **cache_argument(model, cache), use_cache=True).logits.float()


def written_under(model: nn.Module, spec: str, inputs: Inputs) -> tuple[Written, list[Held]]:
    """What `generate` writes under a policy, and what each of its forwards could read."""
    held = list[Held]()
    with kvpolicy.attach(model, spec) as handle:

        def note(*_: Any) -> None:
            if handle.cache is not None and handle.cache.get_seq_length():
                held.append(held_by(handle.cache) if held else {})

        hook = find_sites(model).decoder.register_forward_hook(note)
        try:
            written = generated(model, inputs)
        finally:
            hook.remove()
    return written, held


def written_by_stock(model: nn.Module, inputs: Inputs, held: Sequence[Held]) -> Written:
    """What `generate` writes with the stock model, whose forwards read what a policy held."""
    with oracle(model) as read:
        left = iter(held)
        hook = find_sites(model).decoder.register_forward_pre_hook(lambda *_: read(next(left)))
        try:
            return generated(model, inputs)
        finally:
            hook.remove()


def generated(model: nn.Module, inputs: Inputs, new: int = 8) -> Written:
    """Tokens that `generate` finds greedily, [B, new], and their logits, [B, new, vocabulary] fp32."""
    generate: Callable[..., Any] = model.generate  # pyright: ignore[reportAssignmentType]
    with torch.no_grad():
        output = generate(
            **inputs,
            max_new_tokens=new,
            min_new_tokens=new,
            do_sample=False,
            num_beams=1,
            return_dict_in_generate=True,
            output_logits=True,
        )
    logits = torch.stack([step.float() for step in output.logits], 1)
    return output.sequences[:, -logits.shape[1] :], logits
