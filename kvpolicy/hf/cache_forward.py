"""A forward on a cache: how its layers attend, how they are measured, and when a prompt is compressed."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from kvpolicy.engine.attention import attend
from kvpolicy.engine.decode import SharedStep
from kvpolicy.engine.hidden_stats import massive_tokens, sum_cosines
from kvpolicy.engine.host import on_host, outside_autocast
from kvpolicy.engine.layer_store import LayerStore
from kvpolicy.engine.prefill import PendingPrompt
from kvpolicy.engine.row_limits import RowBudget
from kvpolicy.engine.shown_prompt import ShownPrompt
from kvpolicy.hf.announced import Announced
from kvpolicy.hf.attachment import HOLD, Attachment, detached
from kvpolicy.hf.budgets import counted, exceed, measure_attention, with_prefix
from kvpolicy.hf.journal import Journal, obstacle_of
from kvpolicy.hf.layer import PolicyLayer
from kvpolicy.hf.layer_budgets import LayerBudgets
from kvpolicy.hf.make_layers import make_layers
from kvpolicy.hf.replay import replay
from kvpolicy.hf.rows import Rows
from kvpolicy.hf.running_forward import RunningForward, newest_valid, refuse_gradients
from kvpolicy.hf.shared_keys import ReadingLayer, attend_shared
from kvpolicy.hf.states import IdleRows, States
from kvpolicy.hf.tiles import TiledCache
from kvpolicy.hf.transcript import extended
from kvpolicy.kernels.rotary import rope_offset
from kvpolicy.planning.result import CachePlan
from kvpolicy.policy import Policy
from kvpolicy.protocols import StepMemo
from kvpolicy.statistics import Forward
from kvpolicy.statistics.windows import ScoreTransform
from kvpolicy.text.errors import KVPolicyStateError


class CacheForward(TiledCache):
    """The layers of a cache under a policy, and the forward that runs on them. See `PolicyCache`.

    Attributes:
        attachment: The attachment that connects the cache to its model.
        policy: The cache's policy.
        policy_layers: The layers under the policy.
        announced: The lengths that were announced to it.
        budgets: The budgets of its layers.
        plan: The plan of the last prompt; None before it.
        forward: The forward that runs.
        journal: What the cache can take back.
        holds_next: Whether the next forward is added whole.
        compiles: Whether the steps of the generation that runs on it are compiled.
        counts_columns: Whether a forward was given no positions, which then count columns in most models.
        rows: Its rows if they come and go; else None.
    """

    def __init__(self, attachment: Attachment, policy: Policy) -> None:
        """Make an empty cache."""
        self.attachment = attachment
        self.policy = policy
        super().__init__(layers=make_layers(attachment, policy))
        self.policy_layers = [layer for layer in self.layers if isinstance(layer, PolicyLayer)]
        # Layers that attend to slots under the policy: their own, or those of the layer whose keys they read.
        owners = attachment.model_shape.owners
        managed = (isinstance(self.layers[owners.get(index, index)], PolicyLayer) for index in range(len(self.layers)))
        self._attending = [index for index, is_managed in enumerate(managed) if is_managed]
        self.announced = Announced()
        self.budgets = LayerBudgets(policy, attachment, self.policy_layers)
        self.plan: CachePlan | None = None
        self.forward = RunningForward()
        self.journal = Journal(obstacle_of(policy, attachment.model_shape.states))
        self.holds_next = False
        self.compiles = False
        self.counts_columns = False
        self.rows: Rows | None = None
        self._as_compileable = True

    @property
    def is_initialized(self) -> bool:
        """Whether the cache has seen a token."""
        return any(layer.is_initialized for layer in self.policy_layers)

    @property
    def is_compileable(self) -> bool:
        """Whether a step is one graph, so that `generate` may compile it."""
        shape = self.attachment.model_shape
        return self._as_compileable and self.attachment.compile is not False and not shape.unmanaged

    @contextmanager
    def as_compileable(self, *, shown: bool) -> Generator[None]:
        """Show transformers meanwhile that the cache is compileable, if it is, or hide it."""
        self._as_compileable = shown
        try:
            yield
        finally:
            self._as_compileable = True

    @property
    def has_prompt(self) -> bool:
        """Whether every layer holds a prompt that is compressed, and none waits for the rest of it."""
        return all(layer.holds_prompt for layer in self.policy_layers)

    @property
    def awaits_chunk(self) -> bool:
        """Whether the next tokens are a part of an announced prompt that is compressed as a whole."""
        first = self.policy_layers[0]
        is_held = self.attachment.chunks == HOLD and first.is_initialized
        return is_held and self.announced.follows(first.length, 0, None)

    @property
    def batch_size(self) -> int:
        """Rows, -1 before the first forward unless they come and go."""
        if self.rows is not None:
            return self.rows.count
        first = self.policy_layers[0]
        return first.length.shape[0] if first.is_initialized else -1

    @property
    def prompt(self) -> Tensor | None:
        """Announced tokens of each row's whole prompt, [B] or [] int64; None if unknown."""
        return self.announced.prompt

    @property
    def new(self) -> int | None:
        """Tokens that will be generated; None if unknown."""
        return self.announced.new

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns that a layer has seen, with its earlier tiles: a layer may count positions from it (Llama 4)."""
        seen = super().get_seq_length(layer_idx)
        tile = self.tile if isinstance(self.layers[layer_idx], PolicyLayer) else None
        return seen if tile is None else seen + tile.start

    def counts_padding(self) -> bool:
        """Whether the positions of a row may count padding, since a forward was given none."""
        first = self.policy_layers[0]
        return self.counts_columns and first.is_initialized and bool((first.length != first.get_seq_length()).any())

    # a forward

    @on_host
    def begin(
        self,
        tokens: Tensor,
        mask: Tensor | None,
        position_ids: Tensor | None = None,
        by_layer: Tensor | None = None,
    ) -> None:
        """Prepare for an eager forward of `tokens` [B, P(, hidden)]; nothing is changed if it is refused.

        `by_layer` is what layers are given of each token beside its embedding, [B, P, layers, size] (Gemma 3n, 4).

        Raises:
            KVPolicyError: If the policy was detached.
            KVPolicyStateError: If another forward has not ended, or the history of the cache does not allow one.
        """
        if not self.attachment.active:
            raise detached()
        if self.forward.runs:
            raise KVPolicyStateError(
                "Every forward on a cache must end before the next one, got a cache on which one was interrupted, or "
                "still runs in another thread; try a new cache, or its reset()."
            )
        first = self.policy_layers[0]
        is_step = tokens.shape[1] == 1 and first.holds_prompt and not self.holds_next
        if is_step and self.announced.awaits_chunk and self.attachment.chunks == HOLD and self.journal.mark is None:
            # Asked once after each prompt: the steps of a generation do not wait for the device.
            valid = newest_valid(mask, 1)
            self.announced.awaits_chunk = self.announced.follows(first.length, 1, valid)
            is_step = not self.announced.awaits_chunk
        forward = (
            RunningForward(is_step=True, shared=SharedStep(StepMemo({})))
            if is_step
            else self._begin_prompt(tokens, mask, position_ids, by_layer)
        )
        if is_step and (self.journal.mark is not None or self.journal.is_shared):
            self.journal.note_step(self.layers)
        self.counts_columns = position_ids is None or (self.counts_columns and self.is_initialized)
        if self.attachment.model_shape.states:
            forward.idle = IdleRows.of(self.layers, newest_valid(mask, tokens.shape[1]))
        forward.runs = True
        forward.missing = {*self._attending}
        self.forward = forward
        self.tile = self.tile_size = None  # chosen later, for a prompt
        self.holds_next = False
        if not torch.is_inference_mode_enabled():
            for layer in self.layers:
                if isinstance(layer, PolicyLayer) and layer.is_initialized and layer.store.contents.is_inference:
                    layer.leave_inference_mode()
                if isinstance(layer, States) and any(t.is_inference() for t in layer.named_states().values()):
                    layer.map_states(torch.clone)
            if self.rows is not None:
                self.rows.leave_inference_mode()
        for layer in self.policy_layers:
            if is_step and layer.store.contents.free_steps < 1:
                layer.make_room()

    def _begin_prompt(
        self, tokens: Tensor, mask: Tensor | None, position_ids: Tensor | None, by_layer: Tensor | None
    ) -> RunningForward:
        """The facts of a forward of a prompt or chunk, which is noted in the journal of the cache."""
        self.announced.check_rows(tokens.shape[0])
        policy = self.policy
        first = self.policy_layers[0]
        new = tokens.shape[1]
        valid = newest_valid(mask, new)
        seen = first.length if first.is_initialized else tokens.new_zeros(tokens.shape[0], dtype=torch.int64)
        columns = first.get_seq_length()
        offset = transcript = None
        if policy.undoes_rotation:
            # That of an earlier forward is known, though a selector does not keep it.
            known = (layer.store.rope_offset for layer in self.policy_layers if layer.is_initialized)
            earlier = next((each for each in known if each is not None), None)
            offset = rope_offset(position_ids, valid, columns, seen, new, earlier, policy.undoes_rotation)
        starts = bool((seen == 0).any())
        is_held = self.attachment.chunks == HOLD and (
            first.pending is not None or self.announced.follows(seen, new, valid)
        )
        # Of a held chunk too, since another row may begin in a later one; rows that have begun are not replayed.
        replays = (starts or is_held or first.pending is not None) and policy.replay is not None
        if replays:
            transcript = extended(first.transcript, tokens, valid, position_ids, columns, by_layer)
        unbegun = None
        if policy.layer_metric:
            unbegun = (first.store.tensors.length if first.is_initialized else seen) == 0
        wants_cosines = policy.layer_metric == "cosine" and (starts or bool(self.budgets.measured.sums))
        wants_massive = starts and "massive" in {own.codec.traits.pins for own in policy.distinct}
        awaits_all = policy.layer_metric in ("curve", "attention") and unbegun is not None and bool(unbegun.any())
        # From here on, nothing but the journal refuses the forward.
        self.journal.note_prompt(self.policy_layers, new, seen, valid, self.announced.end, self.plan)
        self.journal.is_whole = self.holds_next
        if transcript is not None:
            first.transcript = transcript
        return RunningForward(
            holds=replays or is_held,
            adds_whole=self.holds_next,
            rope_offset=offset,
            first=seen == 0 if starts else None,
            unbegun=unbegun,
            valid=valid if wants_cosines or wants_massive else None,
            wants_cosines=wants_cosines,
            wants_massive=wants_massive,
            compares_layers=wants_cosines or awaits_all,
        )

    def attend(
        self,
        layer_idx: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        valid: Tensor | None,
        transform: ScoreTransform,
        call: Forward | None = None,
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
            call: The arguments of the attention module, if the selector needs them.
            attention: See `LayerStore.attend_new`; without tiles.

        Returns:
            [B, Hq, P, D].

        Raises:
            KVPolicyStateError: If the layer has already attended in this forward.
        """
        layer: Any = self.layers[layer_idx]
        forward = self.forward
        tile = self.tile
        if self.rows is not None:
            valid = self.rows.valid()
            valid = None if valid is None else valid.to(q.device)  # of several, that of the first layer has it
        # A step that is compiled as a whole changes nothing on the host, and no forward runs.
        if forward.runs and (tile is None or tile.start == 0):
            if layer_idx not in forward.missing and not torch.compiler.is_compiling():
                raise _attends_twice(layer_idx)
            forward.missing.discard(layer_idx)
        if isinstance(layer, ReadingLayer):
            return attend_shared(self.layers, layer, forward, tile, q, transform)
        store: LayerStore = layer.store
        contents = store.contents
        contents.check_compatible(k, v)
        ranks = contents.ranks if contents.is_initialized else self.attachment.resolve_ranks(layer_idx, q, k)
        heads = q.shape[1]
        ended: tuple[PendingPrompt, Callable[..., ShownPrompt]] | None = None  # a prompt, and how later layers see it
        stands_alone = False  # gradients may flow where a prompt attends to itself, before it gets slots
        if ranks.phantom:  # a rank without heads takes part with one that no sum counts
            q, k, v = (t.new_zeros(t.shape[0], 1, *t.shape[2:]) for t in (q, k, v))
        if tile is not None:
            out = layer.attend_tile(tile, q, k, v, transform, call, ranks)
            if tile.is_last:
                tiles = layer.end_tiles()
                valid = tiles.valid
                ended = tiles.prompt(transform), partial(tiles.shown, contents)
        elif forward.is_step if forward.runs else layer.holds_prompt:
            shared = None if torch.compiler.is_compiling() else forward.shared
            out, step = store.attend_step(q, k, v, valid, transform, call, shared)
            if valid is not None:
                out = _without_padding(out, valid)
            if layer.is_read:
                forward.steps[layer_idx] = step
            else:
                store.end_step(step)
        else:
            stands_alone = not layer.holds_tokens
            if not store.is_initialized:
                store.initialize(k, ranks, q.shape[1] // k.shape[1], v.shape[3])
            out, pending = store.attend_new(q, k, v, valid, transform, call, layer.pending, attention)
            ended = pending, partial(store.show_prompt, k, v)
        if ended is not None:
            pending, show = ended
            if layer.is_read:
                forward.shown[layer_idx] = show(pending, layer.pending)
            else:
                self.compress(layer, store.end_prompt(pending, layer.pending))
        # One digest serves all layers, which see the same columns.
        if layer is self.policy_layers[0] and (tile is None or tile.is_last):
            layer.extend_digest(valid, q.shape[2] if tile is None else tile.columns)
        if out.requires_grad and not stands_alone:
            refuse_gradients(out)
        # The output of a phantom head is not part of the model: `heads` is 0 there.
        return out[:, :heads]

    @on_host
    def compress(self, layer: PolicyLayer, pending: PendingPrompt) -> None:
        """Compress a layer's prompt at once if its budget is known, and hold it until it is, or was replayed."""
        forward = self.forward
        if forward.holds:
            layer.hold(pending, forward.massive.pop(layer.layer_idx, None), forward.rope_offset)
            return
        if forward.compares_layers:
            by_attention = self.policy.layer_metric == "attention"
            if by_attention:
                number, pending = measure_attention(self.policy.allocator, layer.store, pending)
                forward.attention[layer.layer_idx] = number
            layer.keep(pending)
            forward.waiting.append(layer)
            if by_attention:
                self.budgets.trim(forward, self.announced)
            return
        if layer is self.policy_layers[0]:
            self._divide(layer, pending.lengths(layer.store.tensors.length))
        self._place(layer, pending)

    def _place(
        self, layer: PolicyLayer, pending: PendingPrompt, massive: Tensor | None = None, offset: Tensor | None = None
    ) -> None:
        """Bring a prompt under the layer's share of the divided budget; with what `release` returned if it was held."""
        forward = self.forward
        tokens = forward.tokens
        assert tokens is not None, "the first layer divides the budget"
        number = self.policy_layers.index(layer)
        expected = tokens.expected_len[:, number]
        found = forward.massive.pop(layer.layer_idx, None)
        layer.store.compress(
            pending,
            RowBudget(tokens.keep[:, number], tokens.extra, expected, tokens.last, forward.added),
            massive=found if massive is None else massive,
            # Selectors undo the rotation of queries without it: rotating them to later positions makes up for it.
            rope_offset=forward.rope_offset if offset is None else offset,
        )

    @on_host
    def finish(self, decoder: nn.Module) -> None:
        """Do the work after an eager forward of `decoder`: replay and compress waiting prompts, or count a step.

        Raises:
            KVPolicyStateError: If a layer was left out: the output is not the policy's.
        """
        forward = self.forward
        if forward.missing:
            raise KVPolicyStateError(
                f"Every layer must attend to the cache's slots, got a forward without layer {min(forward.missing)}, "
                "which checkpoints gradients in training mode, or was replaced after attaching; try model.eval(), or "
                "attach last."
            )
        if forward.idle is not None:
            forward.idle.restore(self.layers)
        if not forward.is_step:
            self._end_prompts(decoder)
        # After all layers are compressed: if one fails, the layers disagree, and the next forward is refused.
        self.forward = RunningForward()
        if forward.shared is not None:
            forward.shared.end()
            for layer in self.policy_layers:
                layer.count_step()

    def _end_prompts(self, decoder: nn.Module) -> None:
        """Compress the prompts that later layers have read, and those that wait, once these are complete."""
        forward = self.forward
        while forward.shown:
            index, shown = forward.shown.popitem()
            layer: Any = self.layers[index]
            with outside_autocast(shown.pending.keys.device):
                self.compress(layer, layer.store.end_prompt(shown.pending, layer.pending))
        first = self.policy_layers[0]
        if forward.holds:
            if self.announced.follows(first.length, 0, None):
                return  # the next chunk is measured as well
            plan = self.policy.replay
            if plan is not None:
                assert first.transcript is not None
                replay(self.layers, first.transcript, decoder, plan)
                first.transcript = None
            forward.waiting = [*self.policy_layers]
        self._compress_waiting()
        if self.plan is not None and exceed(self.policy_layers, forward):
            self.plan = counted(self.plan, self.policy_layers)
        self.budgets.end_prompt(forward.unbegun)

    def numbers(self) -> dict[str, Any]:
        """The numbers of the cache besides those of its layers, as JSON values."""
        measured = {"cosines": self.budgets.measured.known, "columns": self.policy_layers[0].get_seq_length()}
        flags = {"whole": self.journal.is_whole} | ({"counts_columns": True} if self.counts_padding() else {})
        return self.announced.numbers() | measured | flags

    def set_numbers(self, numbers: Mapping[str, Any]) -> None:
        """Restore the result of `numbers`."""
        self.announced = Announced.of_numbers(numbers)
        self.budgets.measured.known = numbers["cosines"]
        self.journal.is_whole = numbers.get("whole", False)
        self.counts_columns = numbers.get("counts_columns", False)

    def return_to(self, end: list[int] | None, plan: CachePlan | None) -> None:
        """Return to the announced end of each row, and to the plan, that were known before a prompt."""
        self.announced.end = end
        self.plan = plan

    def _compress_waiting(self) -> None:
        """Divide the budget, and compress every layer with a pending prompt."""
        forward = self.forward
        waiting = forward.waiting
        forward.waiting = []
        if waiting and forward.compares_layers and not forward.wants_cosines:
            self.budgets.compare(waiting, forward, self.announced)
        for number, layer in enumerate(waiting):
            # Released one by one, so that a layer's prompt is freed as soon as it is compressed.
            pending, massive, offset = layer.release()
            if number == 0:
                self._divide(layer, pending.lengths(layer.store.tensors.length))
            with outside_autocast(pending.keys.device):
                self._place(layer, pending, massive, offset)

    def forget_forward(self) -> None:
        """Forget what is known of the forward that has ended."""
        self.forward = RunningForward()

    # metrics of a prompt

    @on_host
    def observe(self, layer_idx: int, residual: Tensor, update: Tensor) -> None:
        """Measure how little attention changes the residual stream: cosine of before and after, mean over tokens.

        Args:
            layer_idx: Index of the layer.
            residual: Before, [B, P, hidden].
            update: Output of attention that is added, [B, P, hidden].
        """
        valid = self.forward.valid if self.tile is None else self.tile.cut(self.forward.valid)
        self.budgets.measured.add(layer_idx, sum_cosines(residual, update, valid))
        if self.tile is None or self.tile.is_last:
            self.budgets.trim(self.forward, self.announced)

    @on_host
    def note_massive(self, layer_idx: int, hidden: Tensor) -> None:
        """Find the tokens with a layer's largest activations in its hidden states, [B, P, hidden]."""
        traits = self.policy.at(layer_idx).codec.traits
        first = self.forward.first
        if traits.pins == "massive" and first is not None:
            found = massive_tokens(hidden, self.forward.valid, traits.pinned)
            # A row with a prompt that began in an earlier chunk is left out, as in a batch of one.
            self.forward.massive[layer_idx] = found & first.to(found.device)[:, None]

    def cosines(self) -> Tensor:
        """The measured metric of each layer, [B, L]; shares of the budget if it has many numbers of each."""
        return self.budgets.cosines(self.forward.unbegun)

    def _divide(self, first: PolicyLayer, lengths: Tensor) -> None:
        """Divide the budget among layers, from the lengths of rows after a prompt, [B] int64."""
        forward = self.forward
        if forward.adds_whole:
            forward.added = (lengths - first.store.tensors.length).cpu()
        forward.tokens, plan, end = self.budgets.divide(first, lengths, forward, self.announced)
        self.plan = with_prefix(plan, self.policy_layers, len(lengths))
        self.announced.end = None if end is None else end.tolist()


def _without_padding(out: Tensor, valid: Tensor) -> Tensor:
    """The output of a step, [B, Hq, 1, D], with zeros for rows without a token, by `valid` [B, 1] bool.

    A row that is free, or has not begun, attends to nothing, of which the softmax is NaN. The sliding windows of later
    layers would keep it, and a mask hides no NaN.
    """
    return out.masked_fill(~valid.to(out.device)[:, None, :, None], 0)


def _attends_twice(layer_idx: int) -> KVPolicyStateError:
    return KVPolicyStateError(
        f"Every layer must attend once in a forward, got layer {layer_idx} twice, which would store every token twice; "
        "try a model whose layers attend once."
    )
