"""A run of a prompt under a policy, and what it shows: the measured layers, their budgets and the kept tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvpolicy.cli.formatting import ranges
from kvpolicy.reporting.token_spans import Span
from kvpolicy.text.errors import KVPolicyError

if TYPE_CHECKING:
    from kvpolicy.hf.attach import Handle
    from kvpolicy.hf.cache import PolicyCache
    from kvpolicy.hf.tile_size import TileSize

DURING_PREFILL = "during prefill"
SECOND_PASS = "in a second forward pass over the prompt"
"""When the importance of the layers was measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """A layer under the policy.

    Attributes:
        index: The index of the layer in the model.
        cosine: The cosine similarity of the hidden states before and after attention, as a mean over the prompt;
            None if it was not measured.
        budget: The maximum number of tokens.
        kept: Tokens that each KV head keeps.
        nbytes: Bytes that the layer holds.
    """

    index: int
    cosine: float | None
    budget: int
    kept: tuple[int, ...]
    nbytes: int

    @property
    def mean(self) -> float:
        """Kept tokens, as a mean over the KV heads."""
        return sum(self.kept) / len(self.kept)


@dataclass(frozen=True, kw_only=True, slots=True)
class Inspection:
    """Effect of a policy on a prompt.

    Attributes:
        model: The name of the model.
        policy: The spec of the policy.
        prompt: Tokens of the prompt.
        seen: Tokens that the cache has seen.
        nbytes: Bytes held.
        full_nbytes: Bytes of the full cache.
        moved: Bytes that a decode step reads.
        all_moved: Bytes that it would read if it read everything that is kept.
        note: Notes of the plan: where the policy differs from what its spec suggests.
        measured: When the importance of the layers was measured; an empty string if it was not.
        layers: The layers under the policy.
        unmanaged: The window of each unmanaged layer, by its index.
        states: Unmanaged layers with a state alone.
        depth: All layers of the model.
        spans: The text, by tokens.
        cache: The cache, for plots.
    """

    model: str
    policy: str
    prompt: int
    seen: int
    nbytes: int
    full_nbytes: int
    moved: int
    all_moved: int
    note: str
    measured: str
    layers: tuple[Layer, ...]
    unmanaged: dict[int, int]
    states: tuple[int, ...]
    depth: int
    spans: tuple[Span, ...]
    cache: PolicyCache

    @property
    def kept(self) -> float:
        """Kept tokens, as a mean over all layers and KV heads."""
        return sum(layer.mean for layer in self.layers) / len(self.layers)

    def position_of(self, index: int) -> int:
        """Return the position of a layer of the model among the layers under the policy.

        Raises:
            KVPolicyError: If the layer is not under the policy.
        """
        managed = [layer.index for layer in self.layers]
        if index not in managed:
            raise KVPolicyError(
                f"--layer must be a layer under the policy ({ranges(managed, most=None)}), got {index}; try "
                f"{managed[0]}."
            )
        return managed.index(index)

    def as_dict(self) -> dict[str, Any]:
        """Return numbers and strings that can be serialized as JSON."""
        whole = ("model", "policy", "prompt", "seen", "nbytes", "full_nbytes", "moved", "all_moved", "note", "measured")
        layers = [
            {name: getattr(layer, name) for name in ("index", "cosine", "budget", "kept", "nbytes")}
            for layer in self.layers
        ]
        tokens = [
            {name: getattr(span, name) for name in ("position", "text", "seen", "kept", "layers")}
            for span in self.spans
        ]
        return {name: getattr(self, name) for name in whole} | {
            "unmanaged": self.unmanaged,
            "states": list(self.states),
            "layers": layers,
            "tokens": tokens,
        }


def inspect_prompt(
    model: Any,
    tokenizer: Any,
    ids: Any,
    policy: str,
    *,
    name: str = "",
    new: int = 1,
    importance: bool = True,
    tile: TileSize = None,
) -> Inspection:
    """Run a prompt under a policy and inspect the cache.

    Args:
        model: A model without a policy.
        tokenizer: Its tokenizer.
        ids: The prompt, [1, P].
        policy: The spec of the policy.
        name: The name of the model.
        new: Number of tokens to generate; the last one is not in the cache.
        importance: Whether to report how important each layer is. If the allocator does not measure it, a second
            forward pass does.
        tile: The most tokens of the prompt that a layer takes at a time, `auto`, or None.
    """
    from kvpolicy.reporting.token_spans import pieces, spans

    handle, tokens = _generate(model, tokenizer, ids, policy, new, tile)
    assert handle.cache is not None
    cache = handle.cache
    cosines: list[float] = []
    measured = ""
    if importance and handle.policy.layer_metric == "cosine":
        cosines = cosines_of(cache)
        measured = DURING_PREFILL
    elif importance:
        cosines = _measure_layers(model, tokenizer, ids, tile)
        measured = SECOND_PASS
    seen = int(cache.policy_layers[0].length[0])
    report = cache.report()
    text = spans(cache, pieces(tokenizer, tokens[: max(seen, ids.shape[1])]))
    shape = cache.attachment.model_shape
    return Inspection(
        model=name,
        policy=str(handle.policy),
        prompt=ids.shape[1],
        seen=seen,
        nbytes=cache.nbytes,
        full_nbytes=cache.full_nbytes,
        moved=report.moved,
        all_moved=report.all_moved,
        note="" if cache.plan is None else cache.plan.note,
        measured=measured,
        layers=_layers(cache, cosines),
        unmanaged=dict(shape.unmanaged),
        states=tuple(sorted(shape.states.keys() - {*shape.evictable, *shape.unmanaged})),
        depth=shape.depth,
        spans=tuple(text),
        cache=cache,
    )


def cosines_of(cache: PolicyCache) -> list[float]:
    """Return the measured cosine of each layer under the policy, for the first row."""
    return [float(cosine) for cosine in cache.cosines()[0]]


def _measure_layers(model: Any, tokenizer: Any, ids: Any, tile: TileSize) -> list[float]:
    """Measure the cosines with an allocator that needs them, as `kvpolicy.profile` does."""
    handle, _ = _generate(model, tokenizer, ids, "squeeze+window@1.0", 1, tile)
    assert handle.cache is not None
    return cosines_of(handle.cache)


def _generate(model: Any, tokenizer: Any, ids: Any, policy: str, new: int, tile: TileSize) -> tuple[Handle, list[int]]:
    import torch

    from kvpolicy.cli.generation import GenerationOptions
    from kvpolicy.hf.attach import attach
    from kvpolicy.reporting.logging import without_warning_of_few_tokens

    ids = ids.to(model.device)
    arguments = GenerationOptions(new=new).arguments(tokenizer)
    # What is shown are the tokens that are kept.
    with torch.inference_mode(), attach(model, policy, tile=tile) as handle, without_warning_of_few_tokens():
        output = model.generate(ids, attention_mask=torch.ones_like(ids), **arguments)
    return handle, output[0].tolist()


def _layers(cache: PolicyCache, cosines: list[float]) -> tuple[Layer, ...]:
    return tuple(
        Layer(
            index=layer.layer_idx,
            cosine=cosines[position] if cosines else None,
            budget=int(layer.budget[0]),
            kept=tuple((layer.head_positions[0] >= 0).sum(-1).tolist()),
            nbytes=sum(layer.held().values()),
        )
        for position, layer in enumerate(cache.policy_layers)
    )
