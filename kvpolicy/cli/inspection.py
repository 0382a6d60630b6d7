"""Run a prompt under a policy, and gather what can be seen of it: layers, budgets, and which tokens are kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvpolicy.reporting.token_spans import Span
from kvpolicy.spec.errors import KVPolicyError

if TYPE_CHECKING:
    from kvpolicy.hf.attach import Handle
    from kvpolicy.hf.cache import PolicyCache

OWN, SECOND = "while the prompt ran", "in a second run of the prompt"
"""When the layers were measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """One layer under the policy.

    Attributes:
        index: Which layer of the model.
        cosine: Of the hidden state before and after attention, the mean over the prompt; None where not measured.
        budget: The most tokens.
        kept: Tokens that each KV head keeps.
        nbytes: Held by the layer.
    """

    index: int
    cosine: float | None
    budget: int
    kept: tuple[int, ...]
    nbytes: int

    @property
    def mean(self) -> float:
        """Tokens kept, the mean of the heads."""
        return sum(self.kept) / len(self.kept)


@dataclass(frozen=True, kw_only=True, slots=True)
class Inspection:
    """What a policy made of a prompt.

    Attributes:
        model: Its name.
        policy: The policy's words.
        prompt: Tokens of the prompt.
        seen: Tokens that the cache has seen.
        nbytes: Bytes held.
        full_nbytes: Bytes of the full cache.
        note: What was decided otherwise than the policy may lead to expect, or nothing.
        measured: When the layers' importance was measured, or nothing where it was not.
        layers: Those under the policy.
        left_alone: The others, with their windows.
        spans: The text.
        cache: The cache itself, for pictures.
    """

    model: str
    policy: str
    prompt: int
    seen: int
    nbytes: int
    full_nbytes: int
    note: str
    measured: str
    layers: tuple[Layer, ...]
    left_alone: dict[int, int]
    spans: tuple[Span, ...]
    cache: PolicyCache

    @property
    def kept(self) -> float:
        """Tokens kept, the mean of all layers and heads."""
        return sum(layer.mean for layer in self.layers) / len(self.layers)

    def place(self, index: int) -> int:
        """Where a layer of the model stands among those under the policy.

        Raises:
            KVPolicyError: Where it does not.
        """
        known = [layer.index for layer in self.layers]
        if index not in known:
            raise KVPolicyError(f"There is no layer {index} under the policy: give one of {_ranges(known)}.")
        return known.index(index)

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers and strings, ready for JSON."""
        whole = ("model", "policy", "prompt", "seen", "nbytes", "full_nbytes", "note", "measured")
        layers = [
            {name: getattr(layer, name) for name in ("index", "cosine", "budget", "kept", "nbytes")}
            for layer in self.layers
        ]
        tokens = [
            {name: getattr(span, name) for name in ("position", "text", "seen", "kept", "layers")}
            for span in self.spans
        ]
        return {name: getattr(self, name) for name in whole} | {
            "left_alone": self.left_alone,
            "layers": layers,
            "tokens": tokens,
        }


def look(
    model: Any, tokenizer: Any, ids: Any, policy: str, *, name: str = "", new: int = 1, importance: bool = True
) -> Inspection:
    """Run a prompt under a policy and look at the cache.

    Args:
        model: That no policy is attached to.
        tokenizer: Its tokenizer.
        ids: The prompt, [1, P].
        policy: The policy's words.
        name: The model's.
        new: Tokens to generate; the last of them is never in the cache.
        importance: Whether to measure layers by a second run where the allocator does not measure them.
    """
    from kvpolicy.reporting.token_spans import pieces, spans

    handle, tokens = _generate(model, tokenizer, ids, policy, new)
    assert handle.cache is not None
    cache, cosines, measured = handle.cache, list[float](), ""
    if importance:
        own = bool(handle.policy.allocator.layer_metric)
        measured = OWN if own else SECOND
        cosines = cosines_of(cache) if own else _second(model, tokenizer, ids)
    seen = int(cache.policy_layers[0].length[0])
    text = spans(cache, pieces(tokenizer, tokens[: max(seen, ids.shape[1])]))
    return Inspection(
        model=name,
        policy=str(handle.policy),
        prompt=ids.shape[1],
        seen=seen,
        nbytes=cache.nbytes,
        full_nbytes=cache.full_nbytes,
        note="" if cache.plan is None else cache.plan.note,
        measured=measured,
        layers=_layers(cache, cosines),
        left_alone=dict(cache.attachment.model_shape.left_alone),
        spans=tuple(text),
        cache=cache,
    )


def cosines_of(cache: PolicyCache) -> list[float]:
    """The measured cosine of each layer under the policy, of the first row."""
    return [float(cosine) for cosine in cache.cosines()[0]]


def _second(model: Any, tokenizer: Any, ids: Any) -> list[float]:
    """Measure the layers as `kvpolicy.profile` does."""
    handle, _ = _generate(model, tokenizer, ids, "squeeze+window@1.0", 1)
    assert handle.cache is not None
    return cosines_of(handle.cache)


def _generate(model: Any, tokenizer: Any, ids: Any, policy: str, new: int) -> tuple[Handle, list[int]]:
    import torch

    from kvpolicy.cli.writing import Options
    from kvpolicy.hf.attach import attach

    ids = ids.to(model.device)
    with torch.inference_mode(), attach(model, policy) as handle:
        made = model.generate(ids, attention_mask=torch.ones_like(ids), **Options(new=new).words(tokenizer))
    return handle, made[0].tolist()


def _layers(cache: PolicyCache, cosines: list[float]) -> tuple[Layer, ...]:
    found: list[Layer] = []
    for at, layer in enumerate(cache.policy_layers):
        kept = (layer.positions[0] >= 0).sum(-1).tolist()
        found.append(
            Layer(
                index=layer.layer_idx,
                cosine=cosines[at] if cosines else None,
                budget=int(layer.budget[0]),
                kept=tuple(kept),
                nbytes=sum(layer.held().values()),
            )
        )
    return tuple(found)


def _ranges(numbers: list[int]) -> str:
    """Numbers as 0-7 where they follow each other.

    >>> _ranges([0, 1, 2, 5])
    '0-2, 5'
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
