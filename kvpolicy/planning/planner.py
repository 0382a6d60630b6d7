"""Dividing a policy's budget among layers, and the bytes that follow from it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvpolicy.engine.capacity import growth
from kvpolicy.engine.coded_pages import paged_layout
from kvpolicy.engine.pages import Pages, row_pages
from kvpolicy.engine.row_limits import buffer_slots
from kvpolicy.planning.memory import DIGEST_NBYTES, layer_bytes, paged_bytes, step_bytes
from kvpolicy.planning.result import READ_KINDS, LayerPlan
from kvpolicy.policy import Policy
from kvpolicy.protocols import LayerShape
from kvpolicy.spec.budget import bytes_of
from kvpolicy.spec.errors import KVPolicyError
from kvpolicy.spec.validation import MAX_SIZE

INITIAL_SLOTS = 4096
"""Slots allocated beyond the prompt if the number of new tokens is unknown; a larger budget is reached by extension."""

_EPSILON = 1e-9  # so that a fraction such as 0.29 of 100 tokens is 29, and not 28.999... rounded down


class Tokens(NamedTuple):
    """A division of a budget among layers.

    Attributes:
        keep: The most tokens that each layer keeps of each row's prompt, [B, L] int64.
        extra: Tokens that each row may add later without evicting, [B] int64.
        expected_len: The most tokens that each row of a layer ever holds, [B, L] int64.
        last: The most tokens that each row will ever have without `extra`, kept or not, as far as is known, [B] int64.
    """

    keep: Tensor
    extra: Tensor
    expected_len: Tensor
    last: Tensor

    @property
    def most(self) -> tuple[int, ...]:
        """The most tokens that any row of a layer ever holds, one number per layer."""
        return tuple(self.expected_len.amax(0).tolist())


def divide(
    policy: Policy,
    metrics: Tensor | None,
    prompt: Tensor,
    end: Tensor | None,
    shapes: list[LayerShape],
    unmanaged_nbytes: int = 0,
    indices: Sequence[int] | None = None,
) -> Tokens:
    """Divide a policy's budget among layers.

    Args:
        policy: The policy.
        metrics: The layer metric of the allocator, [B, L], or None.
        prompt: Prompt length of each row, [B] int64.
        end: Length of each row after the last new token, [B] int64; None if unknown.
        shapes: The layers under the policy.
        unmanaged_nbytes: Bytes of the layers that are not under the policy; they count in a budget of bytes.
        indices: Indices of the layers in the model; None if they are the first ones.

    Raises:
        KVPolicyError: If the budget is too small; the message names the smallest one that works.
    """
    if isinstance(policy.budget, str):
        indices = range(len(shapes)) if indices is None else indices
        return _divide_bytes(policy, metrics, prompt, end, shapes, unmanaged_nbytes, indices)
    floor = policy.min_tokens
    if isinstance(policy.budget, int):
        base = torch.full_like(prompt, min(policy.budget, MAX_SIZE))
    else:
        base = (prompt.double() * policy.budget + _EPSILON).long().clamp_min(1)
    # A prompt that the selector's minimum covers is kept whole, so a smaller fraction of it is no error.
    base = torch.where(prompt <= floor, base.clamp_min(floor), base)
    _check_floor(policy, base, prompt)
    return _divide_tokens(policy, metrics, base, prompt, end, len(shapes), INITIAL_SLOTS)


def _check_floor(policy: Policy, base: Tensor, prompt: Tensor) -> None:
    floor = policy.min_tokens
    short = base < floor
    if not bool(short.any()):
        return
    # The shortest of these prompts needs the largest fraction, so what works for it works for all rows.
    row = int(prompt.masked_fill(~short, torch.iinfo(torch.int64).max).argmin())
    tokens = int(base[row])
    length = int(prompt[row])
    fraction = -(-(10**6) * floor // length) / 10**6  # rounded up to six decimals
    raise KVPolicyError(
        f"The budget must be at least {floor} tokens for {policy.selector}, got {policy.budget}, which is {tokens} of "
        f"{length} prompt tokens; try {floor} or {fraction}."
    )


def _divide_tokens(
    policy: Policy,
    metrics: Tensor | None,
    base: Tensor,
    prompt: Tensor,
    end: Tensor | None,
    layers: int,
    initial_slots: int,
) -> Tokens:
    """Divide `base` [B] tokens per layer, with `initial_slots` beyond the prompt if the end is unknown."""
    grows = policy.decode == "grow"
    # A growing cache budgets the prompt alone. Otherwise generated tokens count too, if their number is known.
    ceiling = prompt if grows or end is None else torch.maximum(end, prompt)
    keep = policy.allocator.budgets(metrics, base * layers, policy.min_tokens, ceiling, layers)
    extra = torch.zeros_like(prompt)
    if grows:
        extra = growth(prompt) if end is None else (end - prompt).clamp_min(0)
    # Slots are allocated for what a layer can hold: no more than all tokens, however large the budget.
    last = prompt + initial_slots if end is None else torch.maximum(end, prompt)
    expected_len = torch.minimum(keep + extra[:, None], last[:, None])
    return Tokens(keep, extra, expected_len, prompt if grows else last)


def pages_of(policy: Policy, tokens: Tokens, layer: int, shape: LayerShape) -> Pages | None:
    """The pages of a layer if its heads have budgets of their own; None if they have not.

    With several ranks these are the most that a rank may hold: all but one page for each head of the other ranks.

    Args:
        policy: The policy.
        tokens: The division of its budget.
        layer: Number of the layer under the policy.
        shape: Its shape.
    """
    if policy.heads is None:
        return None
    heads = shape.all_heads or shape.heads
    rows = row_pages(tokens.keep[:, layer], tokens.extra, tokens.last, heads)
    if heads > shape.heads:
        most = torch.maximum(-(-tokens.last // rows.size), rows.body // heads + 1) * shape.heads
        rows = rows._replace(body=torch.minimum(rows.body - (heads - shape.heads), most))
    return rows.allocated(shape.heads)


def _divide_bytes(
    policy: Policy,
    metrics: Tensor | None,
    prompt: Tensor,
    end: Tensor | None,
    shapes: list[LayerShape],
    unmanaged_nbytes: int,
    indices: Sequence[int],
) -> Tokens:
    """Find the most tokens per layer whose bytes fit into the budget, by bisection."""
    limit = bytes_of(str(policy.budget))
    batch = len(prompt)

    def attempt(base: int, initial_slots: int = MAX_SIZE) -> tuple[Tokens, int]:
        # By default with all slots that the cache may ever have, so that it stays within the budget as it grows.
        each = torch.full_like(prompt, base)
        tokens = _divide_tokens(policy, metrics, each, prompt, end, len(shapes), initial_slots)
        layers = plan_layers(policy, tokens, shapes, [*indices], batch)
        return tokens, unmanaged_nbytes + sum(sum(layer.nbytes.values()) for layer in layers)

    low = policy.min_tokens
    _, smallest = attempt(low)
    if smallest > limit:
        raise KVPolicyError(
            f"The budget must be at least {smallest}B for {batch} row(s) of this model under {policy.selector}, which "
            f"is {low} token(s) per layer, got {policy.budget}."
        )
    # A token takes at least one byte per layer, so the limit bounds the search if the end is unknown.
    high = min(limit, MAX_SIZE) if end is None else int(end.max())
    while low < high:
        middle = (low + high + 1) // 2
        if attempt(middle)[1] <= limit:
            low = middle
        else:
            high = middle - 1
    # The bytes were counted with all slots that may be needed; only some of them are allocated at first.
    return attempt(low, INITIAL_SLOTS)[0]


def plan_layers(
    policy: Policy, tokens: Tokens, shapes: list[LayerShape], indices: list[int], batch: int
) -> tuple[LayerPlan, ...]:
    """The plan of each layer.

    Args:
        policy: The policy.
        tokens: The division of its budget.
        shapes: The layers under the policy.
        indices: Their indices in the model.
        batch: Number of rows.
    """
    plans: list[LayerPlan] = []
    layouts = {index: policy.codec.layout(most) for index, most in zip(indices, tokens.most, strict=True)}
    for number, (index, most, shape) in enumerate(zip(indices, tokens.most, shapes, strict=True)):
        layout = layouts[index]
        pages = pages_of(policy, tokens, number, shape)
        if pages is not None:
            buffer = buffer_slots(policy.codec, most) if policy.codec.stages else 0
            if buffer:
                layout = paged_layout(buffer, *pages, shape.heads)
            sizes = dict(paged_bytes(policy, batch, shape, pages, buffer))
            moved = sum(sizes[kind] for kind in READ_KINDS)
        else:
            sizes = dict(layer_bytes(policy, batch, shape, layout, index))
            chooser = policy.reader.traits.source(index)
            source = None if chooser in (None, index) else layouts.get(chooser)
            moved = step_bytes(policy, batch, shape, layout, index, source)
        if not plans:
            # The first layer holds the mask digest of the whole cache.
            sizes["counters"] += DIGEST_NBYTES * batch
        plans.append(LayerPlan(layer_idx=index, tokens=most, layout=layout, nbytes=sizes, moved=moved, pages=pages))
    return tuple(plans)
