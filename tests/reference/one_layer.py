"""What a layer that holds less of a prompt does to a model: attention of the whole text, one query after the other."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

import kvpolicy

NAME = "one_layer_reference"


class Held(NamedTuple):
    """What one KV head holds of a prompt: keys and values [n, D], and of how many tokens each is, as a logarithm."""

    keys: Tensor
    values: Tensor
    counts: Tensor


@dataclass
class Reference:
    """The attention of every layer of a model, as a model calls it.

    Attributes:
        prompt: Tokens of the prompt.
        held: What the heads of some layers hold of it, by layer; other layers hold all.
        calls: Queries, keys and values of each layer in the last forward, [heads, n, D].
        outputs: What attention returned in it, [Hq, n, D] fp64.
    """

    prompt: int = 0
    held: dict[int, list[Held]] = field(default_factory=dict)
    calls: dict[int, tuple[Tensor, Tensor, Tensor]] = field(default_factory=dict)
    outputs: dict[int, Tensor] = field(default_factory=dict)

    def __call__(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: None,
        scaling: float,
        softcap: float | None = None,
        sliding_window: int | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Attend; see `AttentionInterface`."""
        q = query[0].double()
        k = key[0].double()
        v = value[0].double()
        self.calls[module.layer_idx] = (query[0], key[0], value[0])
        out = torch.empty_like(q)
        for head in range(len(q)):
            of = head // (len(q) // len(k))
            for i in range(q.shape[1]):
                first = 0 if sliding_window is None else max(i - sliding_window + 1, 0)
                keys = k[of, first : i + 1]
                values = v[of, first : i + 1]
                counts = torch.zeros(len(keys), dtype=torch.float64)
                if module.layer_idx in self.held and i >= self.prompt:
                    held = self.held[module.layer_idx][of]
                    keys = torch.cat([held.keys.double(), k[of, self.prompt : i + 1]])
                    values = torch.cat([held.values.double(), v[of, self.prompt : i + 1]])
                    counts = torch.cat([held.counts.double(), torch.zeros(i + 1 - self.prompt)])
                score = keys @ q[head, i] * scaling
                if softcap is not None:
                    score = softcap * torch.tanh(score / softcap)
                out[head, i] = torch.softmax(score + counts, 0) @ values
        self.outputs[module.layer_idx] = out
        return out.to(query.dtype).transpose(0, 1)[None], None


@contextmanager
def reference_attention(model: Any) -> Generator[Reference]:
    """Let a model use the slow attention inside."""
    reference = Reference()
    AttentionInterface.register(NAME, reference)  # pyright: ignore[reportArgumentType]
    AttentionMaskInterface.register(NAME, lambda **_: None)  # pyright: ignore[reportArgumentType]
    before = model.config._attn_implementation
    model.set_attn_implementation(NAME)
    try:
        yield reference
    finally:
        model.set_attn_implementation(before)


def held_by_cache(
    model: nn.Module, policy: kvpolicy.Policy | str, prompt: Tensor, new: int
) -> dict[int, list[Held]] | None:
    """What each layer of a real cache under a policy holds of a prompt [N] before `new` tokens; None if it cannot."""
    found: dict[int, list[Held]] = {}
    with torch.no_grad(), kvpolicy.attach(model, policy):
        cache = kvpolicy.PolicyCache(model, prompt=len(prompt), new=new)
        try:
            model(prompt[None], cache=cache)
        except kvpolicy.KVPolicyError:
            return None
        for layer in cache.policy_layers:
            past = layer.store.past()
            assert past is not None
            counts = torch.zeros(past.occupied.shape) if past.counts is None else past.counts
            heads = zip(past.keys[0], past.values[0], counts[0], past.occupied[0], strict=True)
            found[layer.layer_idx] = [Held(*(t[flags] for t in parts)) for *parts, flags in heads]
    return found


def predictions(model: Any, text: Tensor, prompt: int) -> Tensor:
    """Logarithms of the probabilities that the tokens of an answer predict with, [M - 1 or 1, vocabulary] fp64."""
    with torch.no_grad():
        logits = model(text[None], use_cache=False).logits[0, prompt:].double()
    return (logits[:-1] if len(logits) > 1 else logits).log_softmax(-1)


def measured(
    model: Any, prompt: Tensor, answer: Tensor, policies: Sequence[kvpolicy.Policy | str]
) -> tuple[Tensor, Tensor, Tensor]:
    """Errors of attention outputs and KL divergences, [L, C] each, and the divergences of all layers together, [C].

    NaN where a policy's budget is too small.
    """
    everything = [held_by_cache(model, policy, prompt, len(answer)) for policy in policies]
    layers = next(sorted(held) for held in everything if held is not None)
    errors = torch.full((len(layers), len(policies)), torch.nan, dtype=torch.float64)
    kls = errors.clone()
    together = errors[0].clone()
    text = torch.cat([prompt, answer])
    with reference_attention(model) as reference:
        reference.prompt = len(prompt)
        full = predictions(model, text, len(prompt))
        exact = dict(reference.outputs)
        for column, held in enumerate(everything):
            for row, layer in enumerate(layers):
                if held is None:
                    continue
                # The input of this layer is that of the full model, and so is its attention but for what it holds.
                reference.held = {layer: held[layer]}
                changed = predictions(model, text, len(prompt))
                out, right = (x[layer][:, len(prompt) :] for x in (reference.outputs, exact))
                errors[row, column] = (out - right).pow(2).sum() / right.pow(2).sum()
                kls[row, column] = (full.exp() * (full - changed)).sum(-1).mean()
            if held is not None:
                reference.held = held
                changed = predictions(model, text, len(prompt))
                together[column] = (full.exp() * (full - changed)).sum(-1).mean()
    return errors, kls, together
