"""The plan of a cache from a divided budget: of a config alone, or of a cache whose prompt is known."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from kvpolicy.hf.model_spec import ModelShape
from kvpolicy.planning.layer_plans import plan_layers, waiting_bytes
from kvpolicy.planning.memory import held_codes_bytes, planned_resident, prefill_peak
from kvpolicy.planning.notes import plan_notes
from kvpolicy.planning.result import CachePlan
from kvpolicy.planning.tokens import Tokens
from kvpolicy.planning.waiting import trimmed_bytes
from kvpolicy.policy import Policy
from kvpolicy.protocols import LayerShape


class Prefilling(NamedTuple):
    """How a prompt is prefilled.

    Attributes:
        columns: Tokens of the longest prompt, padding of other rows included.
        chunk: Tokens that are prefilled at a time; None for all.
        tile: Tokens that a layer takes at a time; None for all.
        holds: Whether chunks are held until the last one.
        coded: Whether a prompt that waits is held in codes.
    """

    columns: int
    chunk: int | None = None
    tile: int | None = None
    holds: bool = False
    coded: bool = False


def build_plan(
    policy: Policy,
    model: ModelShape,
    shape: LayerShape,
    tokens: Tokens,
    prompt: Tensor,
    prefilling: Prefilling,
    *,
    full_tokens: int,
    unmanaged: dict[int, int],
    measured: bool,
    held: slice,
) -> CachePlan:
    """The plan of a cache.

    Args:
        policy: The policy.
        model: The model's cache.
        shape: The shape of a layer on this rank.
        tokens: The divided budget.
        prompt: Tokens of each row's prompt, [B].
        prefilling: How the prompt is prefilled.
        full_tokens: Tokens that all rows together would hold without a policy.
        unmanaged: Bytes of each layer that is not under the policy.
        measured: Whether the allocator has measured its layer metric, or has none.
        held: KV heads of this rank.
    """
    batch = len(prompt)
    indices = model.evictable
    layers = plan_layers(policy, tokens, [shape] * len(indices), indices, batch)
    sizes = [layer.device_nbytes for layer in layers]
    columns, chunk, tile, holds, coded = prefilling
    alone = sum(unmanaged.values())
    prefilled = model.unmanaged_prefill_bytes(batch, columns, min(chunk or columns, tile or columns))

    def held_codes(count: int) -> int:
        return sum(held_codes_bytes(policy.at(index), batch, shape, count) for index in indices)

    def waiting(count: int) -> list[int]:
        return waiting_bytes(policy, layers, batch * shape.token_nbytes, count)

    in_codes = held_codes if coded else None
    first = min(chunk or columns, columns)
    measures = bool(policy.layer_metric) and not coded
    trimmed = trimmed_bytes(policy, shape, tokens, prompt, first, len(indices)) if measures else None
    return CachePlan(
        policy=policy,
        batch=batch,
        layers=layers,
        unmanaged=unmanaged,
        full_nbytes=full_tokens * shape.token_nbytes * len(indices) + alone,
        measured=measured,
        note=plan_notes(policy, layers, tokens.keep, prompt, measured=measured, coded=coded),
        resident_nbytes=planned_resident(policy, tuple(indices), held),
        peak_nbytes=prefill_peak(
            policy,
            batch,
            shape,
            sizes,
            columns,
            prefilled,
            chunk,
            holds,
            held=in_codes,
            trimmed=trimmed,
            waiting=waiting,
        ),
        prefill=model.prefill(policy, layers, columns, chunk, tile, holds=holds),
        full_peak_nbytes=batch * columns * shape.token_nbytes * len(indices) + prefilled,
    )
