"""A forward on a cache: how its layers attend, how they are measured, and when a prompt is compressed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from kvpolicy.engine.attention import attend
from kvpolicy.engine.hidden_stats import massive_tokens, sum_cosines
from kvpolicy.engine.host import on_host, outside_autocast
from kvpolicy.engine.layer_store import LayerStore
from kvpolicy.engine.prefill import PendingPrompt
from kvpolicy.engine.row_limits import RowBudget
from kvpolicy.engine.shown_prompt import ShownPrompt
from kvpolicy.hf.attachment import HOLD, Attachment
from kvpolicy.hf.budgets import (
    Expected,
    Measured,
    counted,
    curves_of,
    divide_budget,
    exceed,
    measure_attention,
    measured_metrics,
    shares_of,
    trim_waiting,
    whole_budgets,
)
from kvpolicy.hf.journal import Journal, obstacle_of
from kvpolicy.hf.layer import PolicyLayer, attend_tile
from kvpolicy.hf.make_layers import make_layers
from kvpolicy.hf.replay import replay
from kvpolicy.hf.running_forward import ForwardGuard, RunningForward, refuse_gradients
from kvpolicy.hf.shared_fork import with_prefix
from kvpolicy.hf.shared_keys import ReadingLayer, attend_shared
from kvpolicy.hf.tiles import PromptTile
from kvpolicy.hf.transcript import extended
from kvpolicy.kernels.rotary import rope_offset
from kvpolicy.planning.result import CachePlan
from kvpolicy.policy import Policy
from kvpolicy.protocols import LayerMetric
from kvpolicy.reporting.logging import log_extended
from kvpolicy.statistics import Forward
from kvpolicy.statistics.windows import ScoreTransform
from kvpolicy.text.errors import KVPolicyError, KVPolicyStateError
from kvpolicy.text.validation import at_least


class CacheForward(Cache):
    """The layers of a cache under a policy, and the forward that runs on them. See `PolicyCache`.

    Attributes:
        attachment: The attachment that connects the cache to its model.
        policy: The cache's policy.
        new: Tokens that will be generated; None if unknown.
        plan: The plan of the last prompt; None before it.
        guard: Refuses forwards that do not go through every layer, one at a time.
        journal: What the cache can take back.
    """

    def __init__(self, attachment: Attachment, policy: Policy) -> None:
        """Make an empty cache."""
        self.attachment = attachment
        self.policy = policy
        super().__init__(layers=make_layers(attachment, policy))
        self.prompt = None
        self.new: int | None = None
        self.plan: CachePlan | None = None
        self.guard = ForwardGuard()
        self.journal = Journal(obstacle_of(policy, attachment.model_shape.states))
        # Lists, not tensors, so that `nbytes` counts every tensor that outlives a forward.
        self._end: list[int] | None = None  # tokens of each row once the last is generated
        self._measured = Measured()
        self.tile_size: int | None = None  # the most tokens that a layer takes at a time in the running forward
        self.tile: PromptTile | None = None  # the one that a layer takes at the moment
        self._forward = RunningForward()
        self.holds_next = False  # whether the next forward is added whole

    @property
    def policy_layers(self) -> list[PolicyLayer]:
        """The layers under the policy."""
        return [layer for layer in self.layers if isinstance(layer, PolicyLayer)]

    @property
    def _policy_indices(self) -> list[int]:
        return [layer.layer_idx for layer in self.policy_layers]

    @property
    def has_prompt(self) -> bool:
        """Whether every layer holds a prompt that is compressed, and none waits for the rest of it."""
        return all(layer.holds_prompt for layer in self.policy_layers)

    @property
    def prompt(self) -> Tensor | None:
        """Announced tokens of each row's whole prompt, [B] or [] int64; None if unknown."""
        return None if self._prompt is None else torch.tensor(self._prompt, device="cpu")

    @prompt.setter
    def prompt(self, prompt: Tensor | None) -> None:
        """Announce a prompt."""
        self._awaits = prompt is not None
        self._prompt: list[int] | int | None = None if prompt is None else prompt.tolist()

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns that a layer has seen, with its earlier tiles: a layer may count positions from it (Llama 4)."""
        seen = super().get_seq_length(layer_idx)
        tile = self.tile if isinstance(self.layers[layer_idx], PolicyLayer) else None
        return seen if tile is None else seen + tile.start

    def _make_room(self, layer: PolicyLayer, new: int | None = None) -> None:
        """Add slots to a layer, if it needs them: for the next step, or for `new` tokens."""
        with outside_autocast(layer.store.tensors.length.device):
            added = layer.store.ensure_capacity() if new is None else layer.store.reserve(new)
        log_extended(layer.layer_idx, added, layer.store.contents.capacity)

    # a forward

    @on_host
    def begin(self, tokens: Tensor, mask: Tensor | None, position_ids: Tensor | None = None) -> None:
        """Prepare for an eager forward of `tokens` [B, P(, hidden)]; nothing is changed if it is refused."""
        self._check_attached()
        first = self.policy_layers[0]
        new = tokens.shape[1]
        one_token = new == 1 and first.holds_prompt and not self.holds_next and not self._begins_held(mask)
        fits = not one_token and mask is not None and mask.dim() == 2 and mask.shape[1] >= new  # others are refused
        valid = mask[:, -new:].bool() if mask is not None and fits else None
        seen = first.length if first.is_initialized else tokens.new_zeros(tokens.shape[0], dtype=torch.int64)
        offset = transcript = None
        # Before the guard begins, after which an error would leave the cache unusable. If a forward is running already,
        # the guard is about to refuse this one, and an error about positions would mislead.
        if not one_token and not self.guard.running and self.policy.undoes_rotation:
            known = self._known_offset()
            offset = rope_offset(
                position_ids, valid, first.get_seq_length(), seen, new, known, self.policy.undoes_rotation
            )
        starts = not one_token and bool((seen == 0).any())
        holds = self._holds_chunk(first, seen, new, valid, one_token=one_token)
        # Of a held chunk too, since another row may begin in a later one; rows that have begun are not replayed.
        replays = (starts or holds or first.pending is not None) and self.policy.replay is not None
        if replays and not self.guard.running:
            transcript = extended(first.transcript, tokens, valid, position_ids, first.get_seq_length())
        if not self.guard.running and not one_token:
            self.journal.note_prompt(self.policy_layers, new, seen, valid, self._end, self.plan)
            self.journal.is_whole = self.holds_next
        elif not self.guard.running and (self.journal.mark is not None or self.journal.is_shared):
            self.journal.note_step(self.layers)
        self.guard.begin(filter(self.attachment.model_shape.attends_by_policy, range(len(self.layers))))
        self._forward = RunningForward(
            one_token=one_token, holds=replays or holds, adds_whole=self.holds_next, rope_offset=offset
        )
        self.holds_next = False
        for layer in self.policy_layers:
            if layer.is_initialized and layer.store.contents.is_inference and not torch.is_inference_mode_enabled():
                layer.leave_inference_mode()
            if one_token:
                self._make_room(layer)
        if transcript is not None:
            first.transcript = transcript
        self._forward.first = seen == 0 if starts else None
        if not one_token and self.policy.layer_metric:
            self._forward.unbegun = (first.store.tensors.length if first.is_initialized else seen) == 0
        self._forward.valid = valid if self.wants_cosines or self.wants_massive else None

    def _holds_chunk(
        self, first: PolicyLayer, seen: Tensor, new: int, valid: Tensor | None, *, one_token: bool
    ) -> bool:
        """Whether a forward is a chunk of an announced prompt that is held until its last one."""
        if self.attachment.chunks != HOLD or one_token:
            return False
        return first.pending is not None or self.is_chunk(seen, new, valid)

    def _begins_held(self, mask: Tensor | None) -> bool:
        """Whether a single token is the first chunk of an announced prompt that is held, and no generated token."""
        if self.attachment.chunks != HOLD or self.journal.mark is not None or not self._awaits:
            return False
        valid = mask[:, -1:].bool() if mask is not None and mask.dim() == 2 else None
        # Asked once after each prompt: the steps of a generation do not wait for the device.
        self._awaits = self.is_chunk(self.policy_layers[0].length, 1, valid)
        return self._awaits

    @property
    def _keeps_prompt(self) -> bool:
        """Whether a single token of the running forward is one of a prompt."""
        return self._forward.holds or self._forward.adds_whole

    @property
    def is_step(self) -> bool:
        """Whether the running forward is a decode step."""
        return self._forward.one_token

    def is_chunk(self, seen: Tensor, new: int, valid: Tensor | None) -> bool:
        """Whether more of the announced prompt follows the new tokens of a forward.

        Args:
            seen: Tokens that each row has seen before, [B] int64.
            new: Columns of the forward.
            valid: Which of them are not padding, [B, P] bool; None if all are.
        """
        return self.prompt is not None and not self._covers(seen + (new if valid is None else valid.sum(-1)))

    def _check_attached(self) -> None:
        if not self.attachment.active:
            raise KVPolicyError(
                "The cache's policy must be attached to its model, got a detached one; try to attach a policy, and to "
                "make a new cache."
            )

    def attend(
        self,
        layer_idx: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        valid: Tensor | None,
        transform: ScoreTransform,
        forward: Forward | None = None,
        attention: Callable[..., tuple[Tensor, Tensor | None]] = attend,
    ) -> Tensor:
        """Attend from new tokens through a layer's slots, and store them.

        Args:
            layer_idx: Index of the layer.
            q: [B, Hq, P, D].
            k: [B, H, P, D].
            v: [B, H, P, D].
            valid: Which of the P tokens are not padding, [B, P] bool; None if all are.
            transform: From products to attention weights.
            forward: The arguments of the attention module, if the selector needs them.
            attention: See `LayerStore.attend_new`; without tiles.

        Returns:
            [B, Hq, P, D].
        """
        layer: Any = self.layers[layer_idx]
        tile = self.tile
        if tile is None or tile.start == 0:
            self.guard.note_attention(layer_idx)
        if isinstance(layer, ReadingLayer):
            return attend_shared(self.layers, layer, self._forward, tile, q, transform)
        store: LayerStore = layer.store
        held = store.contents
        held.check_compatible(k, v)
        ranks = held.ranks if held.is_initialized else self.attachment.resolve_ranks(layer_idx, q, k)
        heads, new = q.shape[1:3]
        alone = tile is None and not layer.holds_tokens  # before this prompt gets slots
        if ranks.phantom:  # a rank without heads takes part with one that no sum counts
            q, k, v = (t.new_zeros(t.shape[0], 1, *t.shape[2:]) for t in (q, k, v))
        if tile is not None:
            out = attend_tile(self, layer, tile, (q, k, v), transform, forward, ranks)
        elif q.shape[2] == 1 and layer.holds_prompt and not self._keeps_prompt:
            out, step = store.attend_step(q, k, v, valid, transform, forward)
            if self.attachment.model_shape.is_read(layer_idx):
                self._forward.steps[layer_idx] = step
            else:
                store.end_step(step)
        else:
            if not store.is_initialized:
                store.initialize(k, ranks, q.shape[1] // k.shape[1], v.shape[3])
            out, pending = store.attend_new(q, k, v, valid, transform, forward, layer.pending, attention)
            self.end_prompt(layer, pending, partial(store.show_prompt, k, v))
        # One digest serves all layers, which see the same columns.
        if layer is self.policy_layers[0] and tile is None:
            layer.extend_digest(valid, new)
        if not alone:  # gradients may flow where a prompt attends to itself
            refuse_gradients(out)
        # The output of a phantom head is not part of the model: `heads` is 0 there.
        return out[:, :heads]

    def end_prompt(self, layer: PolicyLayer, pending: PendingPrompt, show: Callable[..., ShownPrompt]) -> None:
        """Compress a prompt that a layer has attended to, or `show` it first to those that read the layer's keys."""
        if self.attachment.model_shape.is_read(layer.layer_idx):
            self._forward.shown[layer.layer_idx] = show(pending, layer.pending)
        else:
            self.compress(layer, layer.store.end_prompt(pending, layer.pending))

    def _end_shown(self) -> None:
        """Compress the prompts that later layers have read."""
        while self._forward.shown:
            index, shown = self._forward.shown.popitem()
            layer: Any = self.layers[index]
            with outside_autocast(shown.pending.keys.device):
                self.compress(layer, layer.store.end_prompt(shown.pending, layer.pending))

    @on_host
    def compress(self, layer: PolicyLayer, pending: PendingPrompt) -> None:
        """Compress a layer's prompt at once if its budget is known, and hold it until it is, or was replayed."""
        if self._forward.holds:
            facts = self._prompt_facts(layer)
            layer.hold(pending, facts["massive"], facts["rope_offset"])
            return
        if self._wants("attention"):
            number, pending = measure_attention(self.policy.allocator, layer.store, pending)
            self._forward.attention[layer.layer_idx] = number
        if self.wants_cosines or self._wants("curve", "attention"):
            layer.keep(pending)
            self._forward.waiting.append(layer)
            self._trim_waiting("attention")
            return
        if layer is self.policy_layers[0]:
            self._divide(layer, pending)
        layer.store.compress(pending, self._row_budget(layer), **self._prompt_facts(layer))

    @on_host
    def finish(self, decoder: nn.Module) -> None:
        """Do the work after an eager forward of `decoder`: replay and compress waiting prompts, or count a step."""
        self.guard.end()
        self._end_shown()
        forward = self._forward
        waits = forward.holds and not self._is_complete
        if forward.holds and not waits:
            self._replay(decoder)
            forward.waiting = self.policy_layers
        self.compress_waiting()
        if self.plan is not None and exceed(self.policy_layers, forward):
            self.plan = counted(self.plan, self.policy_layers)
        if not waits:  # else the next chunk is measured as well
            self._measured.end_prompt(self._policy_indices, self._forward.unbegun)
        self.forget_forward()
        # After all layers are compressed: if one fails, the layers disagree, and the guard refuses the next forward.
        self.guard.running = False
        if forward.one_token:
            self._count_step()

    def forget_forward(self) -> None:
        """Forget what is known of the forward that has ended."""
        self._forward = RunningForward()

    def return_to(self, end: list[int] | None, plan: CachePlan | None) -> None:
        """Return to the announced end of each row, and to the plan, that were known before a prompt."""
        self._end = end
        self.plan = plan

    def _count_step(self) -> None:
        for layer in self.policy_layers:
            with outside_autocast(layer.store.tensors.length.device):
                layer.store.count_step()

    def compress_waiting(self) -> None:
        """Divide the budget, and compress every layer with a pending prompt."""
        waiting = self._forward.waiting
        self._forward.waiting = []
        if waiting and self._wants("curve", "attention"):
            self._measure_layers(waiting)
        for number, layer in enumerate(waiting):
            # Released one by one, so that a layer's prompt is freed as soon as it is compressed.
            pending, known = layer.release()
            if number == 0:
                self._divide(layer, pending)
            facts = self._prompt_facts(layer) | {name: fact for name, fact in known.items() if fact is not None}
            with outside_autocast(pending.keys.device):
                layer.store.compress(pending, self._row_budget(layer), **facts)

    @property
    def _is_complete(self) -> bool:
        """Whether the layers hold all of the announced prompt."""
        return self._covers(self.policy_layers[0].length)

    def _covers(self, length: Tensor) -> bool:
        """Whether rows of so many tokens [B] have all of the announced prompt."""
        length = length.cpu()
        if self.prompt is None:
            return True
        # One number is the longest row's.
        if not self.prompt.dim():
            return int(length.max()) >= int(self.prompt)
        return bool((at_least(length, self.prompt) == length).all())

    def _replay(self, decoder: nn.Module) -> None:
        """Score the prompts that the layers hold by a replay, if the policy needs one."""
        first = self.policy_layers[0]
        plan = self.policy.replay
        if plan is not None:
            assert first.transcript is not None
            replay(self.layers, first.transcript, decoder, plan)
            first.transcript = None

    def _row_budget(self, layer: PolicyLayer) -> RowBudget:
        """A layer's share of the divided budget."""
        number = self.policy_layers.index(layer)
        assert self._forward.tokens is not None, "the first layer divides the budget"
        tokens = self._forward.tokens
        expected = tokens.expected_len[:, number]
        return RowBudget(tokens.keep[:, number], tokens.extra, expected, tokens.last, self._forward.added)

    def _prompt_facts(self, layer: PolicyLayer) -> dict[str, Tensor | None]:
        """Keyword arguments of `compress`: facts of a layer's prompt besides its keys, from the running forward."""
        # Selectors undo the rotation of queries without the offset: rotating them to later positions makes up for it.
        return {"massive": self.guard.massive.pop(layer.layer_idx, None), "rope_offset": self._forward.rope_offset}

    def _known_offset(self) -> Tensor | None:
        """Offset of the rotary positions from the rows' positions, [B], from an earlier forward, or None."""
        # A selector does not keep it.
        known = (layer.store.rope_offset for layer in self.policy_layers if layer.is_initialized)
        return next((offset for offset in known if offset is not None), None)

    # metrics of a prompt

    @property
    def wants_cosines(self) -> bool:
        """Whether the residual stream of layers is still to be measured."""
        return (self._forward.first is not None or bool(self._measured.sums)) and self.policy.layer_metric == "cosine"

    def _wants(self, *metrics: LayerMetric) -> bool:
        """Whether all layers are to be compared by one of these metrics before the budget is divided."""
        unbegun = self._forward.unbegun
        return self.policy.layer_metric in metrics and unbegun is not None and bool(unbegun.any())

    @property
    def wants_massive(self) -> bool:
        """Whether a codec needs the largest activations of a prompt that are not known yet."""
        return self._forward.first is not None and "massive" in {own.codec.traits.pins for own in self.policy.distinct}

    @on_host
    def observe(self, layer_idx: int, residual: Tensor, update: Tensor) -> None:
        """Measure how little attention changes the residual stream: cosine of before and after, mean over tokens.

        Args:
            layer_idx: Index of the layer.
            residual: Before, [B, P, hidden].
            update: Output of attention that is added, [B, P, hidden].
        """
        new = sum_cosines(
            residual, update, self._forward.valid if self.tile is None else self.tile.cut(self._forward.valid)
        )
        self._measured.add(layer_idx, new)
        if self.tile is None or self.tile.is_last:
            self._trim_waiting("cosine")

    def take_residual(self, layer_idx: int) -> Tensor | None:
        """The input of a layer that is being measured, [B, P, hidden], or that of its tile; None if none is."""
        # Popped, so that the inputs of measured layers do not pile up during a forward.
        if self.tile is None or self.tile.is_last:
            residual = self.guard.residuals.pop(layer_idx, None)
        else:
            residual = self.guard.residuals.get(layer_idx)
        if self.tile is None or residual is None or residual.shape[1] != self.tile.columns:
            return residual  # a norm inside the layer has seen one tile
        return self.tile.cut(residual)

    @on_host
    def note_massive(self, layer_idx: int, hidden: Tensor) -> None:
        """Find the tokens with a layer's largest activations in its hidden states, [B, P, hidden]."""
        traits = self.policy.at(layer_idx).codec.traits
        first = self._forward.first
        if traits.pins == "massive" and first is not None:
            found = massive_tokens(hidden, self._forward.valid, traits.pinned)
            # A row with a prompt that began in an earlier chunk is left out, as in a batch of one.
            self.guard.massive[layer_idx] = found & first.to(found.device)[:, None]

    def cosines(self) -> Tensor:
        """The measured metric of each layer, [B, L]; shares of the budget if it has many numbers of each."""
        if self._measured.known is None and not self._measured.sums:
            raise KVPolicyStateError(
                "Cosines must be measured during a prompt, got none; try the allocator squeeze, and run a prompt."
            )
        return self._measured.of_rows(self._policy_indices, self._forward.unbegun)

    # budgets

    def _trim_waiting(self, metric: LayerMetric) -> None:
        """Drop what no division to come can keep of the prompts that wait, once their metric is known."""
        if self.policy.layer_metric == metric:
            trim_waiting(self.policy, self._forward, self._measured, len(self.policy_layers), self._told())

    def _told(self) -> Expected:
        """The announced lengths of the rows."""
        return Expected(self.prompt, self.new, None if self._end is None else torch.tensor(self._end, device="cpu"))

    def _measure_layers(self, layers: list[PolicyLayer]) -> None:
        """Compare layers by what their tokens are worth, or by their attention, and note the metric of each layer.

        A row keeps that of its first prompt: slots that were made for a layer are not given to another.
        """
        pending = layers[0].pending
        unbegun = self._forward.unbegun
        assert pending is not None and unbegun is not None
        metrics = measured_metrics(self.policy.allocator, layers, self._forward.attention)
        if metrics is None or metrics.dim() > 2:
            # The budgets are not known yet: selectors reckon with equal ones.
            self._divide(
                layers[0], pending.decoded(), torch.ones(len(unbegun), len(layers), device="cpu", dtype=torch.float32)
            )
            tokens = self._forward.tokens
            assert tokens is not None
            drawn = curves_of(self.policy, layers, tokens) if metrics is None else metrics
            metrics = shares_of(self.policy, drawn, tokens)
        self._measured.note(metrics, unbegun)

    def _divide(self, first: PolicyLayer, pending: PendingPrompt, metrics: Tensor | None = None) -> None:
        """Divide the budget among layers, from the rows' lengths after the pending prompt of the first layer.

        Args:
            first: The first layer.
            pending: Its prompt.
            metrics: The metric of each layer, [B, L], in place of what was measured.
        """
        keep = None
        if self._forward.adds_whole:
            new = pending.lengths(torch.zeros_like(first.store.tensors.length)).cpu()
            self._forward.added = new
            keep = whole_budgets(self.policy_layers, new)
        elif metrics is None and self.policy.layer_metric:
            metrics = self.cosines()
        columns = first.get_seq_length()
        before = first.prefix_columns
        self._forward.tokens, plan, end = divide_budget(
            self.policy, self.attachment, first.store, pending, self._told(), metrics, columns, keep, before
        )
        self.plan = with_prefix(plan, self.policy_layers, len(pending.keys))
        self._end = None if end is None else end.tolist()
