"""While layers are measured, the prompts that wait are trimmed to what their layers may be given."""

from __future__ import annotations

import torch

from kvpolicy.engine.host import outside_autocast
from kvpolicy.engine.trimming import trimmed_from
from kvpolicy.hf.division import Expected, RowLengths
from kvpolicy.hf.measured import Measured
from kvpolicy.hf.running_forward import RunningForward
from kvpolicy.planning.planner import bound_layers
from kvpolicy.policy import Policy
from kvpolicy.protocols import LayerBounds


def trim_waiting(policy: Policy, forward: RunningForward, measured: Measured, every: int, told: Expected) -> None:
    """Trim the first prompts that wait in the first layers, as far as the division to come does not depend on it.

    Nothing is trimmed where this is not known: see `planner.bound_layers` and `engine.trimming.can_trim`.

    Args:
        policy: The policy.
        forward: The forward, in which every layer that waits was measured.
        measured: Their cosines, if it measures these.
        every: Layers under the policy.
        told: The announced lengths.
    """
    layers = forward.waiting
    if not layers or forward.unbegun is None or trimmed_from(layers[0].store.spec) is None:
        return
    indices = [layer.layer_idx for layer in layers]
    numbers = forward.attention
    found = measured.means(indices) if policy.layer_metric == "cosine" else [numbers[index] for index in indices]
    if found[0].dim() > 1:  # nothing is known of many numbers of a layer
        return
    first = layers[0].store
    pending = layers[0].pending
    assert pending is not None, "a layer waits with its prompt"
    _, prompt, end = RowLengths.of(first, pending, told)
    heads = first.ranks.kv_heads(pending.keys.shape[1])
    queries = heads * first.shape.group * first.ranks.replicas
    bounds = bound_layers(policy, torch.stack(found, -1), prompt, end, every, queries)
    if bounds is None:
        return
    for number, layer in enumerate(layers):
        assert layer.pending is not None, "a layer waits with its prompt"
        own = LayerBounds(bounds.least[:, number], bounds.most[:, number])
        with outside_autocast(layer.pending.keys.device):
            layer.pending = layer.store.trim(layer.pending, own, forward.rope_offset)
