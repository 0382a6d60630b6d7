"""The cache: the slots of every layer, and the budget that they share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicSlidingWindowLayer

from kvpolicy.engine.attention import ScoreTransform
from kvpolicy.engine.hidden_stats import massive_tokens, mean_cosine
from kvpolicy.engine.host import on_host
from kvpolicy.engine.prefill import PendingPrompt
from kvpolicy.engine.reading import Board
from kvpolicy.engine.rotary import rope_offset
from kvpolicy.engine.store import LayerStore, RowBudget
from kvpolicy.hf.attachment import attachment_of
from kvpolicy.hf.forward_guard import ForwardGuard, refuse_gradients
from kvpolicy.hf.layer import PolicyLayer, make_store
from kvpolicy.hf.replay import replay
from kvpolicy.hf.transcript import extended
from kvpolicy.planning.memory import planned_resident, prefill_peak, resident_bytes
from kvpolicy.planning.notes import plan_notes
from kvpolicy.planning.planner import Tokens, divide, plan_layers
from kvpolicy.planning.result import CachePlan
from kvpolicy.policy import Policy
from kvpolicy.protocols import Forward, LayerShape
from kvpolicy.reporting import rich_repr
from kvpolicy.reporting.logging import log_extended
from kvpolicy.reporting.report import Report, make_report
from kvpolicy.spec.errors import KVPolicyError, KVPolicyStateError
from kvpolicy.spec.validation import MAX_SIZE, at_least, expected, longest


class PolicyCache(Cache):
    """A KV cache under a policy, to be passed as `past_key_values`.

    A model that a policy is attached to makes one by itself. Make your own to keep two conversations on one model
    apart, or to announce how long they will be.

    Args:
        model: A model that a policy is attached to.
        policy: The cache's policy or its spec string; the attached one by default.
        prompt: Tokens of each row's whole prompt, if it comes in chunks: [B], one number, or None.
        new: Tokens that will be generated, if known: a growing cache then allocates exactly that.

    Raises:
        KVPolicyError: If no policy is attached to the model, the attachment lacks a metric that this policy needs, or a
            number of tokens is out of range.

    Examples:
        >>> import torch, kvpolicy
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(num_hidden_layers=1, hidden_size=32, num_attention_heads=2, vocab_size=9)
        >>> model = LlamaForCausalLM(config).eval()
        >>> with torch.no_grad(), kvpolicy.attach(model, "window@0.5"):
        ...     cache = kvpolicy.PolicyCache(model)
        ...     _ = model(torch.tensor([[1, 2, 3, 4]]), past_key_values=cache)
        >>> cache.layers[0].positions.tolist()
        [[[2, 3], [2, 3]]]
    """

    def __init__(
        self,
        model: nn.Module,
        policy: Policy | str | None = None,
        *,
        prompt: Tensor | Sequence[int] | int | None = None,
        new: int | None = None,
    ) -> None:
        """Make an empty cache."""
        self.attachment = attachment_of(model)
        self.policy: Policy = self.attachment.policy if policy is None else Policy.of(policy)
        self.attachment.check(self.policy)
        self._boards: dict[int, Board] = {}
        super().__init__(layers=[self._make_layer(index) for index in range(self.attachment.layers)])
        self.prompt, self.new = expected(prompt, new)
        self.plan: CachePlan | None = None
        self.guard = ForwardGuard()
        # Lists, not tensors, so that `nbytes` counts every tensor that outlives a forward.
        self._end: list[int] | None = None  # tokens of each row once the last is generated
        self._cosines: list[list[float]] | None = None  # the metric of each row and layer
        self._metrics: dict[int, Tensor] = {}  # the running forward's, [B] by layer
        self._tokens: Tokens | None = None  # the running forward's budgets
        self._waiting: list[PolicyLayer] = []
        self._valid: Tensor | None = None
        self._one_token = False
        self._first: Tensor | None = (
            None  # rows without a token before the running forward, [B]; None if there are none
        )
        self._rope_offset: Tensor | None = None  # what the rotary embedding adds in the running forward, [B]
        self._holds = False  # whether the running forward's tokens are held until they were replayed

    __repr__, _repr_html_ = rich_repr.cache_words, rich_repr.cache_html  # pyright: ignore[reportAssignmentType]

    def _make_layer(self, index: int) -> Any:
        shape = self.attachment.model_shape
        if index in shape.unmanaged:
            return DynamicSlidingWindowLayer(sliding_window=shape.unmanaged[index])
        policy = self.policy
        rope = self.attachment.ropes.get(index) if policy.undoes_rotation else None
        chooser = policy.reader.traits.source(index)
        board = None if chooser is None else self._boards.setdefault(chooser, Board())
        return PolicyLayer(lambda: make_store(policy, index, rope), board)

    @property
    def policy_layers(self) -> list[PolicyLayer]:
        """The layers under the policy."""
        return [layer for layer in self.layers if isinstance(layer, PolicyLayer)]

    @property
    def prompt(self) -> Tensor | None:
        """Announced tokens of each row's whole prompt, [B] or [] int64; None if unknown."""
        return None if self._prompt is None else torch.tensor(self._prompt)

    @prompt.setter
    def prompt(self, prompt: Tensor | None) -> None:
        """Announce a prompt."""
        self._prompt: list[int] | int | None = None if prompt is None else prompt.tolist()

    @property
    def is_initialized(self) -> bool:
        """Whether the cache has seen a token."""
        return any(layer.is_initialized for layer in self.policy_layers)

    @property
    def mask_digest(self) -> Tensor | None:
        """Digest of the columns that each row has seen, [B] int64; None before the first forward."""
        return self.policy_layers[0].mask_digest

    @property
    def nbytes(self) -> int:
        """Every byte held, on this rank."""
        return sum(sum(layer.held().values()) for layer in self.policy_layers) + sum(self.unmanaged_bytes().values())

    @property
    def full_nbytes(self) -> int:
        """Bytes that a stock cache would hold of the tokens seen, padding excluded."""
        own = 0
        for layer in self.policy_layers:
            if layer.is_initialized:
                dim = layer.keys.shape[-1]
                own += int(layer.length.sum()) * 2 * layer.store.heads * dim * layer.keys.element_size()
        return own + sum(self.unmanaged_bytes().values())

    @property
    def resident_nbytes(self) -> int:
        """Bytes of calibrated tensors, which belong to the model and not to the cache."""
        filled = [layer.store for layer in self.policy_layers if layer.is_initialized]
        return resident_bytes(calibration for store in filled for calibration in store.calibrations)

    def report(self) -> Report:
        """Per layer: budget, tokens kept and bytes by kind, compared with the full cache."""
        return make_report(self)

    def unmanaged_bytes(self) -> dict[int, int]:
        """Bytes of the layers that the policy does not manage, by layer."""
        stock: list[tuple[int, Any]] = [(i, x) for i, x in enumerate(self.layers) if not isinstance(x, PolicyLayer)]
        return {i: sum(t.untyped_storage().nbytes() for t in (x.keys, x.values)) for i, x in stock if x.is_initialized}

    @on_host
    def tick(self) -> None:
        """Do the work between decode steps: demote a full block, extend a growing cache.

        `generate` and an uncompiled loop do this by themselves; a loop over `torch.compile(model)` calls it after
        each step. A block that had to be demoted and was not is an error in the next step, never a lost token.
        """
        for layer in self.policy_layers:
            layer.store.count_step()
            self._ensure_capacity(layer)

    def expect(self, prompt: Tensor | Sequence[int] | int | None, new: int) -> None:
        """Announce a prompt and `new` more tokens: a growing cache makes room for them at once."""
        prompt, self.new = expected(prompt, new)
        self.prompt = longest(self.prompt, prompt)
        self._end = None
        for layer in self.policy_layers:
            if layer.is_initialized and layer.store.grows:
                added = layer.store.reserve(new)
                log_extended(layer.layer_idx, added, layer.store.capacity)

    def _ensure_capacity(self, layer: PolicyLayer) -> None:
        added = layer.store.ensure_capacity()
        log_extended(layer.layer_idx, added, layer.store.capacity)

    # a forward

    @on_host
    def begin(self, tokens: Tensor, mask: Tensor | None, position_ids: Tensor | None = None) -> None:
        """Prepare for an eager forward of `tokens` [B, P(, hidden)]; nothing is changed if it is refused."""
        first = self.policy_layers[0]
        new = tokens.shape[1]
        one_token = new == 1 and first.is_initialized and first.pending is None
        fits = not one_token and mask is not None and mask.dim() == 2 and mask.shape[1] >= new  # others are refused
        valid = mask[:, -new:].bool() if mask is not None and fits else None
        seen = first.length if first.is_initialized else tokens.new_zeros(tokens.shape[0], dtype=torch.int64)
        offset = transcript = None
        # Before the guard begins, after which an error would leave the cache unusable. If a forward is running already,
        # the guard is about to refuse this one, and an error about positions would mislead.
        if self.policy.codec.traits.key_space == "unrotated" and not (one_token or self.guard.running):
            known = None if first.store.limits is None else first.store.limits.rope_offset
            offset = rope_offset(position_ids, valid, first.get_seq_length(), seen, new, known)
        elif self.policy.undoes_rotation and not (one_token or self.guard.running):
            # Only to refuse positions that do not go on by one. Queries may be unrotated without the offset, since
            # rotating them to later positions makes up for it.
            rope_offset(position_ids, valid, first.get_seq_length(), seen, new, None)
        starts = not one_token and bool((seen == 0).any())
        holds = self.policy.selector.needs.replay is not None and (starts or first.pending is not None)
        if holds and not self.guard.running:
            transcript = extended(first.transcript, tokens, valid, position_ids, first.get_seq_length())
        self.guard.begin((layer.layer_idx for layer in self.policy_layers), new)
        self._one_token = one_token
        self._holds = holds
        self._rope_offset = offset
        for layer in self.policy_layers:
            if layer.is_initialized and layer.store.length.is_inference() and not torch.is_inference_mode_enabled():
                layer.leave_inference_mode()
            if one_token:
                self._ensure_capacity(layer)
        if transcript is not None:
            first.transcript = transcript
        self._first = seen == 0 if starts else None
        self._valid = valid if self.wants_metrics or self.wants_massive else None

    def attend(
        self,
        layer_idx: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        valid: Tensor | None,
        transform: ScoreTransform,
        forward: Forward | None = None,
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

        Returns:
            [B, Hq, P, D].
        """
        layer: Any = self.layers[layer_idx]
        store: LayerStore = layer.store
        self.guard.note_attention(layer_idx)
        store.check_compatible(k, v)
        ranks = store.ranks if store.is_initialized else self.attachment.resolve_ranks(layer_idx, q, k)
        heads, new = q.shape[1:3]
        # Before this prompt gets slots: a first prompt attends to itself alone, and gradients may flow.
        has_slots = store.layout.slots > 0 or layer.pending is not None
        if ranks.phantom:  # a rank without heads takes part with one that no sum counts
            q, k, v = (t.new_zeros(t.shape[0], 1, *t.shape[2:]) for t in (q, k, v))
        if store.is_initialized and q.shape[2] == 1 and layer.pending is None:
            out = store.append(q, k, v, valid, transform)
        else:
            if not store.is_initialized:
                store.initialize(k, ranks, q.shape[1] // k.shape[1])
            out, pending = store.attend_prompt(q, k, v, valid, transform, forward, layer.pending)
            self.compress(layer, pending)
        # One digest serves all layers, which see the same columns.
        if layer is self.policy_layers[0]:
            layer.extend_digest(valid, new)
        if has_slots:
            refuse_gradients(out)
        # The output of a phantom head is not part of the model: `heads` is 0 there.
        return out[:, :heads]

    @on_host
    def compress(self, layer: PolicyLayer, pending: PendingPrompt) -> None:
        """Compress a layer's prompt at once if its budget is known, and hold it until it is, or was replayed."""
        if self._holds:
            facts = self._prompt_facts(layer)
            layer.hold(pending, facts["massive"], facts["rope_offset"])
            return
        if self.wants_metrics:
            layer.pending = pending.owned()
            self._waiting.append(layer)
            return
        if layer is self.policy_layers[0]:
            self._divide(layer, pending)
        layer.store.compress(pending, self._row_budget(layer), **self._prompt_facts(layer))

    @on_host
    def finish(self, decoder: nn.Module) -> None:
        """Do the work after an eager forward of `decoder`: replay and compress waiting prompts, or count a step."""
        self.guard.end()
        if self._holds and self._is_complete:
            self._replay(decoder)
        self.compress_waiting()
        if self._metrics:
            self._cosines = self.cosines().tolist()
        self._metrics = {}
        self._tokens = self._valid = self._first = self._rope_offset = None
        # After all layers are compressed: if one fails, the layers disagree, and the guard refuses the next forward.
        self.guard.running = False
        for layer in self.policy_layers if self._one_token else ():
            layer.store.count_step()

    def compress_waiting(self) -> None:
        """Divide the budget, and compress every layer whose prompt waits for it."""
        waiting, self._waiting = self._waiting, []
        for number, layer in enumerate(waiting):
            # Released one by one, so that a layer's prompt is freed as soon as it is compressed.
            pending, massive = layer.release()
            if number == 0:
                self._divide(layer, pending)
            facts = self._prompt_facts(layer)
            if massive is not None:
                facts["massive"] = massive
            layer.store.compress(pending, self._row_budget(layer), **facts)

    @property
    def _is_complete(self) -> bool:
        """Whether the layers hold all of the announced prompt."""
        length = self.policy_layers[0].length.cpu()
        if self.prompt is None:
            return True
        # One number is the longest row's.
        return bool((length >= self.prompt).all()) if self.prompt.dim() else int(length.max()) >= int(self.prompt)

    def _replay(self, decoder: nn.Module) -> None:
        """Score the prompts that the layers hold by a replay; they are compressed next."""
        first = self.policy_layers[0]
        plan = self.policy.selector.needs.replay
        assert plan is not None and first.transcript is not None
        replay(self.layers, first.transcript, decoder, plan)
        first.transcript = None
        self._waiting = self.policy_layers

    def _row_budget(self, layer: PolicyLayer) -> RowBudget:
        """A layer's share of the divided budget."""
        number = self.policy_layers.index(layer)
        assert self._tokens is not None, "the first layer divides the budget"
        tokens = self._tokens
        return RowBudget(tokens.keep[:, number], tokens.extra, tokens.expected_len[:, number], tokens.last)

    def _prompt_facts(self, layer: PolicyLayer) -> dict[str, Tensor | None]:
        """What the running forward knows of a layer's prompt besides its keys: keyword arguments of `compress`."""
        return {"massive": self.guard.massive.pop(layer.layer_idx, None), "rope_offset": self._rope_offset}

    # metrics of a prompt

    @property
    def wants_metrics(self) -> bool:
        """Whether layers are still to be measured."""
        return self.policy.allocator.layer_metric != "" and self._first is not None

    @property
    def wants_massive(self) -> bool:
        """Whether the largest activations of a prompt are still to be found."""
        return self.policy.codec.traits.pins == "massive" and self._first is not None

    @on_host
    def observe(self, layer_idx: int, residual: Tensor, update: Tensor) -> None:
        """Measure how little attention changes the residual stream: cosine of before and after, mean over tokens.

        Args:
            layer_idx: Index of the layer.
            residual: Before, [B, P, hidden].
            update: What attention adds, [B, P, hidden].
        """
        new = mean_cosine(residual, update, self._valid)
        if self._cosines is not None and self._first is not None:  # a row is measured on its first tokens
            place = [layer.layer_idx for layer in self.policy_layers].index(layer_idx)
            held = new.new_tensor([row[place] for row in self._cosines])
            new = torch.where(self._first.to(new.device), new, held)
        self._metrics[layer_idx] = new

    @on_host
    def note_massive(self, layer_idx: int, hidden: Tensor) -> None:
        """Find the tokens with a layer's largest activations in its hidden states, [B, P, hidden]."""
        self.guard.massive[layer_idx] = massive_tokens(hidden, self._valid, self.policy.codec.traits.pinned)

    def cosines(self) -> Tensor:
        """The measured cosines, [B, L]."""
        if self._metrics:
            return torch.stack([self._metrics[layer.layer_idx].cpu() for layer in self.policy_layers], -1)
        assert self._cosines is not None, "no prompt was measured"
        return torch.tensor(self._cosines)

    # budgets

    def _divide(self, first: PolicyLayer, pending: PendingPrompt) -> None:
        """Divide the budget among layers, from the rows' lengths after the pending prompt of the first layer."""
        batch, heads, _, dim = pending.keys.shape
        store = first.store
        own = pending.lengths(store.length).cpu()
        length = at_least(own, self.prompt)
        dtype = pending.keys.dtype
        count = len(self.policy_layers)
        every = store.ranks.kv_heads(heads)
        shape = LayerShape(heads, dim, dtype, store.group, every)
        # All ranks must divide a budget in bytes alike, so it is that of a rank with the most heads; bytes in the plan
        # are those of this rank.
        fullest = LayerShape(store.ranks.most_heads(heads), dim, dtype, store.ranks.most_group(store.group), every)
        metrics = self.cosines() if self.policy.allocator.layer_metric else None
        # Once per announcement: a chunk or turn that follows does not move the announced end.
        if self.new is not None and self._end is None:
            self._end = (length + self.new).tolist()
        end = None if self._end is None else torch.tensor(self._end)
        columns = first.get_seq_length() + int((length - own).max())
        bytes_at = self.attachment.model_shape.unmanaged_bytes
        alone = bytes_at(batch, columns + (self.new or 0))
        most = bytes_at(batch, columns + (MAX_SIZE if self.new is None else self.new))  # full windows, eventually
        self._tokens = divide(
            self.policy, metrics, length, end, [fullest] * count, sum(most.values()), self._managed_indices()
        )
        if metrics is not None and not store.ranks.agree(self._tokens.keep.to(store.positions.device)):
            raise KVPolicyStateError(
                "All ranks must measure the same layer budgets, got different ones, so their hidden states differ; try "
                "to give all ranks the same prompts and weights."
            )
        seen = int((length if end is None else torch.maximum(end, length)).sum())
        indices = self._managed_indices()
        layers = plan_layers(self.policy, self._tokens, [shape] * count, indices, batch)
        self.plan = CachePlan(
            policy=self.policy,
            batch=batch,
            layers=layers,
            measured=True,
            unmanaged=alone,
            full_nbytes=seen * shape.token_nbytes * count + sum(alone.values()),
            note=plan_notes(self.policy, layers, self._tokens.keep, length),
            resident_nbytes=planned_resident(self.policy, tuple(indices), store.ranks.held),
            peak_nbytes=prefill_peak(
                self.policy, batch, shape, [sum(x.nbytes.values()) for x in layers], columns, sum(alone.values())
            ),
        )

    def _managed_indices(self) -> list[int]:
        return [layer.layer_idx for layer in self.policy_layers]

    # the interface of transformers

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Pass keys and values to the layer."""
        if not self.attachment.active:
            raise KVPolicyError(
                "The cache's policy must be attached to its model, got a detached one; try to attach a policy, and to "
                "make a new cache."
            )
        self.guard.check_update()
        states = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        layer: Any = self.layers[layer_idx]
        if not isinstance(layer, PolicyLayer):  # a sliding layer keeps a view of the whole prompt: release it
            layer.keys, layer.values = layer.keys.clone(), layer.values.clone()
        return states

    def batch_select_indices(self, indices: Tensor) -> None:
        """Take rows `indices` [B']."""
        super().batch_select_indices(indices)
        self._map_rows(lambda t: t[indices.to(t.device)])

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Take rows `beam_idx` [B']."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row."""
        super().batch_repeat_interleave(repeats)
        self._map_rows(lambda t: t.repeat_interleave(repeats, 0))

    def _map_rows(self, fn: Callable[[Tensor], Tensor]) -> None:
        prompt = self.prompt
        if prompt is not None and prompt.dim():
            self.prompt = fn(prompt)
        self._end = None if self._end is None else fn(torch.tensor(self._end)).tolist()
        self._cosines = None if self._cosines is None else fn(torch.tensor(self._cosines)).tolist()

    def reset(self) -> None:
        """Forget everything, so that the cache can be used for another prompt."""
        super().reset()
        self.plan = None
        self.prompt = None
        self.guard = ForwardGuard()
        self._end = None
        self._cosines = None
        self._metrics = {}
        self._waiting = []
        self._tokens = self._valid = self._first = self._rope_offset = None
        self._holds = False

    @property
    def batch_size(self) -> int:
        """Rows, -1 before the first forward."""
        first = self.policy_layers[0]
        return first.length.shape[0] if first.is_initialized else -1
