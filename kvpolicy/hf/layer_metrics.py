"""The metric of layers that an allocator measures by their attention; see `kvpolicy.protocols.MeasuresAttention`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from kvpolicy.engine.host import outside_autocast
from kvpolicy.engine.layer_attention import layer_attention, without_measured
from kvpolicy.engine.layer_store import LayerStore
from kvpolicy.engine.prefill import PendingPrompt
from kvpolicy.hf.layer import PolicyLayer
from kvpolicy.protocols import Allocator, MeasuresAttention


def measure_attention(allocator: Allocator, store: LayerStore, pending: PendingPrompt) -> tuple[Tensor, PendingPrompt]:
    """The numbers of a layer by its prompt, [B, ...] fp32 on the host, and the prompt without what they took.

    Args:
        allocator: An allocator that measures attention.
        store: The layer.
        pending: Its whole prompt, or the first chunk of one.
    """
    assert isinstance(allocator, MeasuresAttention)  # see `policy.combination.check_attention`
    contents = store.contents
    with outside_autocast(pending.keys.device):
        seen = layer_attention(pending.decoded(), allocator.attention, contents.ranks, contents.spec.latent)
        numbers = allocator.measure(seen).float().cpu()
    return numbers, without_measured(pending, store.spec.prompt_statistics)


def measured_metrics(
    allocator: Allocator, layers: Iterable[PolicyLayer], measured: Mapping[int, Tensor]
) -> Tensor | None:
    """The numbers of every layer, [B, L] or [B, L, ...] fp32; None for an allocator that measures no attention.

    Args:
        allocator: The allocator.
        layers: The layers. One that was not measured held its prompt until now, and is measured.
        measured: The numbers of the others, by index.
    """
    if not isinstance(allocator, MeasuresAttention):
        return None
    found: list[Tensor] = []
    for layer in layers:
        numbers = measured.get(layer.layer_idx)
        if numbers is None:
            assert layer.pending is not None, "a layer waits with its prompt"
            numbers, layer.pending = measure_attention(allocator, layer.store, layer.pending)
        found.append(numbers)
    return stack_layers(found)


def stack_layers(numbers: list[Tensor]) -> Tensor:
    """Numbers [B, ...] of each layer as one tensor [B, L, ...], whose last dimension is filled with -inf."""
    if numbers[0].dim() == 1:
        return torch.stack(numbers, 1)
    longest = max(each.shape[-1] for each in numbers)
    return torch.stack([F.pad(each, (0, longest - each.shape[-1]), value=-torch.inf) for each in numbers], 1)
