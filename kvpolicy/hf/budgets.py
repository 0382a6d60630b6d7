"""How a cache's budget is divided among its layers: by numbers that are measured while the prompt runs, or by curves.

`Measured` holds the numbers of the layers, `divide_budget` divides once the prompt is known, and `trim_waiting` drops
meanwhile what no division to come keeps. `whole_budgets` are those of a forward that is added beyond the budget.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kvpolicy.engine.hidden_stats import CosineSum
from kvpolicy.engine.host import outside_autocast
from kvpolicy.engine.layer_attention import layer_attention, without_measured
from kvpolicy.engine.layer_store import LayerStore
from kvpolicy.engine.prefill import PendingPrompt
from kvpolicy.engine.trimming import trimmed_from
from kvpolicy.hf.announced import Announced
from kvpolicy.hf.attachment import Attachment
from kvpolicy.hf.layer import PolicyLayer
from kvpolicy.hf.plan import Prefilling, beside, build_plan
from kvpolicy.hf.running_forward import RunningForward
from kvpolicy.planning.notes import leaves_few
from kvpolicy.planning.planner import bound_layers, divide
from kvpolicy.planning.result import SHARED, CachePlan
from kvpolicy.planning.tokens import Tokens, expect_tokens
from kvpolicy.policy import Policy
from kvpolicy.protocols import Allocator, LayerBounds, MeasuresAttention
from kvpolicy.reporting.logging import warn_of_few_tokens
from kvpolicy.text.errors import KVPolicyStateError
from kvpolicy.text.limits import MAX_SIZE


class Measured:
    """The metric of the layers of a cache.

    Attributes:
        known: The metric of each row and layer, or shares of the budget; None before a prompt was measured. Lists, not
            a tensor, so that no tensor outlives a forward uncounted.
        sums: Cosines of the prompt that runs, by layer; empty if layers are measured otherwise, or not at all.
    """

    def __init__(self) -> None:
        """Nothing was measured."""
        self.known: list[list[float]] | None = None
        self.sums: dict[int, CosineSum] = {}

    def add(self, layer_idx: int, new: CosineSum) -> None:
        """Add the cosines of a tile, or of a chunk of a prompt that is held, to those before."""
        self.sums[layer_idx] = self.sums[layer_idx].plus(new) if layer_idx in self.sums else new

    def means(self, layers: Iterable[int]) -> list[Tensor]:
        """The mean cosine of layers in the prompt that runs, [B] each, on the host."""
        return [self.sums[layer_idx].mean.cpu() for layer_idx in layers]

    def of_rows(self, layers: Iterable[int], unbegun: Tensor | None) -> Tensor:
        """The metric of all `layers`, [B, L]: that of its first prompt for every row.

        Args:
            layers: Indices of the layers.
            unbegun: Rows whose first prompt runs, [B] bool; None if all are measured anew.
        """
        held = self._held()
        if not self.sums:
            assert held is not None, "no prompt was measured"
            return held
        return self._replaced(torch.stack(self.means(layers), -1), held, unbegun)

    def note(self, metrics: Tensor, unbegun: Tensor | None) -> None:
        """Note the metric [B, L] of rows in their first prompt: slots are made by it, and stay with their layers."""
        held = self._held()
        self.known = self._replaced(metrics, held, unbegun).tolist()

    def end_prompt(self, layers: Iterable[int], unbegun: Tensor | None) -> None:
        """Keep the metric of the prompt that ran."""
        if self.sums:
            self.known = self.of_rows(layers, unbegun).tolist()
        self.sums = {}

    def map_rows(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Select or repeat rows."""
        held = self._held()
        self.known = None if held is None else fn(held).tolist()
        self.sums = {layer: CosineSum(*map(fn, sums)) for layer, sums in self.sums.items()}  # of held chunks

    def _held(self) -> Tensor | None:
        """The metric of rows whose first prompt ended, [B, L] fp32."""
        return None if self.known is None else torch.tensor(self.known, dtype=torch.float32, device="cpu")

    @staticmethod
    def _replaced(new: Tensor, held: Tensor | None, unbegun: Tensor | None) -> Tensor:
        return new if held is None or unbegun is None else torch.where(unbegun.cpu()[:, None], new, held)


def measure_attention(allocator: Allocator, store: LayerStore, pending: PendingPrompt) -> tuple[Tensor, PendingPrompt]:
    """The numbers of a layer by its prompt, [B, ...] fp32 on the host, and the prompt without what they took.

    Args:
        allocator: An allocator that measures attention.
        store: The layer.
        pending: Its whole prompt, or the first chunk of one.
    """
    assert isinstance(allocator, MeasuresAttention)  # see `policy.combination.check_together`
    contents = store.contents
    with outside_autocast(pending.keys.device):
        seen = layer_attention(pending.decoded(), allocator.attention, contents.ranks, contents.spec.latent)
        numbers = allocator.measure(seen).float().cpu()
    return numbers, without_measured(pending, store.spec.prompt_statistics)


def measured_metrics(
    allocator: Allocator, layers: Iterable[PolicyLayer], measured: Mapping[int, Tensor]
) -> Tensor | None:
    """The numbers of every layer, [B, L] or [B, L, ...] fp32; None for an allocator that does not measure them alone.

    Args:
        allocator: The allocator.
        layers: The layers. One that was not measured held its prompt until now, and is measured.
        measured: The numbers of the others, by index.
    """
    if allocator.layer_metric != "attention":
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


BEYOND_BUDGET = "the last prompt was added whole, beyond the budget"
"""The note of a plan after `PolicyCache.hold_next`."""


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
    lengths: Tensor,
    announced: Announced,
    metrics: Tensor | None,
    columns: int,
    keep: Tensor | None = None,
    before: int = 0,
) -> Division:
    """Divide a budget among layers, from the lengths of rows after a prompt.

    Args:
        policy: The policy of the cache.
        attachment: The attachment of the cache.
        store: The first layer.
        lengths: Tokens of each row, those of the prompt included, [B] int64.
        announced: The announced lengths.
        metrics: The allocator's metric, [B, L]; None if it measures nothing.
        columns: Columns that the cache has seen, those of the prompt included.
        keep: Tokens that each layer keeps of each row, [B, L] int64, where they do not follow from the budget.
        before: Those columns that are a shared prefix, and no part of the budget.
    """
    batch = len(lengths)
    heads = store.shape.heads
    model = attachment.model_shape
    indices = model.evictable
    own, length, end = announced.lengths(lengths)
    dtype = store.tensors.keys.dtype
    every = store.ranks.kv_heads(heads)
    shape = store.shape._replace(dtype=dtype, all_heads=every)
    # All ranks must divide a budget in bytes alike, so it is that of a rank with the most heads; bytes in the plan
    # are those of this rank.
    fullest = shape._replace(heads=store.ranks.most_heads(heads), group=store.ranks.most_group(shape.group))
    columns += int((length - own).max())
    alone = model.unmanaged_bytes(batch, columns + (announced.new or 0))
    # Without an end, windows count as full.
    most = model.unmanaged_bytes(batch, columns + (MAX_SIZE if announced.new is None else announced.new))
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


def trim_waiting(policy: Policy, forward: RunningForward, measured: Measured, every: int, announced: Announced) -> None:
    """Trim the first prompts that wait in the first layers, as far as the division to come does not depend on it.

    Nothing is trimmed where this is not known: see `planner.bound_layers` and `engine.trimming.can_trim`.

    Args:
        policy: The policy.
        forward: The forward, in which every layer that waits was measured.
        measured: Their cosines, if it measures these.
        every: Layers under the policy.
        announced: The announced lengths.
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
    _, prompt, end = announced.lengths(pending.lengths(first.tensors.length))
    heads = first.ranks.kv_heads(first.shape.heads)
    queries = heads * first.shape.group * first.ranks.replicas
    bounds = bound_layers(policy, torch.stack(found, -1), prompt, end, every, queries)
    if bounds is None:
        return
    for number, layer in enumerate(layers):
        assert layer.pending is not None, "a layer waits with its prompt"
        own = LayerBounds(bounds.least[:, number], bounds.most[:, number])
        with outside_autocast(layer.pending.keys.device):
            layer.pending = layer.store.trim(layer.pending, own, forward.rope_offset)


def curves_of(policy: Policy, layers: list[PolicyLayer], even: Tokens) -> Tensor:
    """The curve of each layer, [B, L, N] fp32.

    Args:
        policy: A policy with an allocator that draws them.
        layers: The layers, whose prompts wait for their budgets.
        even: The division of the budget into equal parts, with which selectors reckon meanwhile.
    """
    allocator = policy.allocator
    assert isinstance(allocator, MeasuresAttention)  # see `policy.combination.check_together`
    curves: list[Tensor] = []
    for number, layer in enumerate(layers):
        assert layer.pending is not None
        pending = layer.pending.decoded()
        with outside_autocast(pending.keys.device):
            worth = layer.store.worth(pending, even.keep[:, number])
            seen = layer_attention(pending, allocator.attention, layer.store.ranks)
            curves.append(allocator.measure(seen._replace(worth=worth, layer_idx=layer.layer_idx)).float().cpu())
    return stack_layers(curves)


def shares_of(policy: Policy, metrics: Tensor, even: Tokens) -> Tensor:
    """The share of the budget that each layer gets by many numbers of each, [B, L] fp32; rows sum to 1.

    Args:
        policy: The policy.
        metrics: The numbers, [B, L, ...].
        even: The division of the budget into equal parts.
    """
    total = even.keep.sum(-1)
    budgets = policy.allocator.budgets(metrics, total, policy.min_tokens, even.last, metrics.shape[1])
    return (budgets.double() / total[:, None]).float()


def whole_budgets(layers: list[PolicyLayer], new: Tensor) -> Tensor:
    """Tokens of each row and layer if all that is held is kept, and `new` [B] tokens, [B, L] int64."""
    budgets: list[Tensor] = []
    for layer in layers:
        # A cache that grows has a budget for tokens to come, which these take first.
        grows = layer.store.spec.grows
        held = layer.store.geometry.tokens_counted() if grows else layer.store.tensors.budget
        budgets.append(held.cpu() + new)
    return torch.stack(budgets, 1)


def exceed(layers: list[PolicyLayer], forward: RunningForward) -> bool:
    """Whether a layer may have slots for more than its share of the budget that a forward has divided.

    Slots never become fewer: a prompt that was added whole leaves them to the prompts after it. Pages are placed anew,
    and as many as each head needed to keep all of such a prompt.
    """
    if forward.tokens is None:
        return False
    return any(
        forward.adds_whole if layer.store.spec.heads is not None else layer.store.contents.capacity > most
        for layer, most in zip(layers, forward.tokens.most, strict=True)
    )


def counted(plan: CachePlan, layers: list[PolicyLayer]) -> CachePlan:
    """A plan with the slots and pages that layers have, where these follow from no budget."""
    return replace(
        plan,
        layers=tuple(
            replace(
                own,
                tokens=int(layer.budget.max()),
                nbytes=layer.held(),
                layout=layer.store.layout,
                **layer.store.step_bytes._asdict(),
            )
            for own, layer in zip(plan.layers, layers, strict=True)
        ),
    )


def with_prefix(plan: CachePlan, layers: list[PolicyLayer], rows: int) -> CachePlan:
    """A plan of what rows add, and of the prefix that they share; unchanged without one.

    Args:
        plan: The plan.
        layers: The layers under the policy.
        rows: Rows of the cache.
    """
    prefixes = [layer.prefix for layer in layers]
    if prefixes[0] is None or SHARED in plan.layers[0].nbytes:
        return plan
    slots = [prefix.slots for prefix in prefixes if prefix is not None]
    full = sum(layer.prefix_full_nbytes for layer in layers) * rows
    return beside(plan, [each.nbytes for each in slots], [each.step_nbytes for each in slots], full, slots[0].length)
