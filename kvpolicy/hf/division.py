"""How a cache's budget is divided among its layers once a prompt is known."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from kvpolicy.engine.layer_store import LayerStore
from kvpolicy.engine.prefill import PendingPrompt
from kvpolicy.hf.attachment import Attachment
from kvpolicy.hf.build_plan import Prefilling, build_plan
from kvpolicy.planning.notes import leaves_few
from kvpolicy.planning.planner import divide
from kvpolicy.planning.result import CachePlan
from kvpolicy.planning.tokens import Tokens, expect_tokens
from kvpolicy.policy import Policy
from kvpolicy.reporting.logging import warn_of_few_tokens
from kvpolicy.text.errors import KVPolicyStateError
from kvpolicy.text.limits import MAX_SIZE
from kvpolicy.text.validation import at_least

BEYOND_BUDGET = "the last prompt was added whole, beyond the budget"
"""The note of a plan after `PolicyCache.hold_next`."""


class Expected(NamedTuple):
    """Announced lengths of the rows of a cache.

    Attributes:
        prompt: Announced tokens of each row's whole prompt, [B] or []; None if unknown.
        new: Tokens that will be generated; None if unknown.
        end: Tokens of each row once the last is generated, as of the first chunk of an announced prompt, [B].
    """

    prompt: Tensor | None
    new: int | None
    end: Tensor | None


class RowLengths(NamedTuple):
    """Lengths of the rows of a cache, on the host.

    Attributes:
        own: Tokens of each row so far, [B] int64.
        prompt: Tokens of its whole prompt, as far as it was announced, [B] int64.
        end: Tokens once the last is generated, [B] int64; None if unknown.
    """

    own: Tensor
    prompt: Tensor
    end: Tensor | None

    @classmethod
    def of(cls, store: LayerStore, pending: PendingPrompt, told: Expected) -> RowLengths:
        """Lengths after a prompt of the first layer."""
        own = pending.lengths(store.tensors.length).cpu()
        prompt = at_least(own, told.prompt)
        # Once per announcement: a chunk or turn that follows does not move the announced end.
        return cls(own, prompt, prompt + told.new if told.new is not None and told.end is None else told.end)


class Division(NamedTuple):
    """A divided budget.

    Attributes:
        tokens: Tokens of each row and layer.
        plan: The plan of the cache.
        end: Tokens of each row once the last is generated, [B]; None if unknown.
    """

    tokens: Tokens
    plan: CachePlan
    end: Tensor | None


def divide_budget(
    policy: Policy,
    attachment: Attachment,
    store: LayerStore,
    pending: PendingPrompt,
    told: Expected,
    metrics: Tensor | None,
    columns: int,
    keep: Tensor | None = None,
    before: int = 0,
) -> Division:
    """Divide a budget among layers, from the rows' lengths after the pending prompt of the first layer.

    Args:
        policy: The policy of the cache.
        attachment: The attachment of the cache.
        store: The first layer.
        pending: Its prompt.
        told: The announced lengths.
        metrics: The allocator's metric, [B, L]; None if it measures nothing.
        columns: Columns that the cache has seen, those of the pending prompt included.
        keep: Tokens that each layer keeps of each row, [B, L] int64, where they do not follow from the budget.
        before: Those columns that are a shared prefix, and no part of the budget.
    """
    batch, heads = pending.keys.shape[:2]
    model = attachment.model_shape
    indices = model.evictable
    own, length, end = RowLengths.of(store, pending, told)
    dtype = pending.keys.dtype
    every = store.ranks.kv_heads(heads)
    shape = store.shape._replace(dtype=dtype, all_heads=every)
    # All ranks must divide a budget in bytes alike, so it is that of a rank with the most heads; bytes in the plan
    # are those of this rank.
    fullest = shape._replace(heads=store.ranks.most_heads(heads), group=store.ranks.most_group(shape.group))
    columns += int((length - own).max())
    alone = model.unmanaged_bytes(batch, columns + (told.new or 0))
    most = model.unmanaged_bytes(batch, columns + (MAX_SIZE if told.new is None else told.new))  # full windows
    whole = model.whole._replace(dtype=dtype)
    if keep is None:
        tokens = divide(policy, metrics, length, end, [fullest] * len(indices), sum(most.values()), indices, whole)
        if leaves_few(policy, tokens.keep, length) and attachment.first_warning("few tokens"):
            warn_of_few_tokens(policy)
    else:
        tokens = expect_tokens(policy, keep, length, end)
    if metrics is not None and not store.ranks.agree(tokens.keep.to(store.tensors.positions.device)):
        raise KVPolicyStateError(
            "All ranks must measure the same layer budgets, got different ones, so their hidden states differ; try "
            "to give all ranks the same prompts and weights."
        )
    seen = int((length if end is None else torch.maximum(end, length)).sum())
    plan = build_plan(
        policy,
        model,
        shape,
        tokens,
        length,
        Prefilling(columns - before),
        full_tokens=seen,
        unmanaged=alone,
        measured=True,
        held=store.ranks.held,
    )
    if keep is not None:
        plan = replace(plan, note="; ".join(filter(None, (plan.note, BEYOND_BUDGET))))
    return Division(tokens, plan, end)
