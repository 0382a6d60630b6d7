"""The operations on the slots of one layer: take in a prompt, take in a token, demote."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from kvpolicy.engine import merging
from kvpolicy.engine.attention import attend
from kvpolicy.engine.decode import NO_ROOM, SharedStep, Step, new_token, update_state
from kvpolicy.engine.due_rows import due_rows, only_rows
from kvpolicy.engine.geometry import Geometry, step_bytes
from kvpolicy.engine.host import on_host
from kvpolicy.engine.journal import UNDO_LOG, Journal
from kvpolicy.engine.layer_contents import LayerContents
from kvpolicy.engine.layer_spec import LayerSpec
from kvpolicy.engine.layer_tensors import LayerTensors
from kvpolicy.engine.link import StepBytes
from kvpolicy.engine.page_geometry import PageGeometry
from kvpolicy.engine.pages import of_pages
from kvpolicy.engine.prefill import PendingPrompt
from kvpolicy.engine.prompt_statistics import PromptStatistics, see_prompt
from kvpolicy.engine.prompt_tiles import PromptTiles
from kvpolicy.engine.reranking import rerank
from kvpolicy.engine.row_limits import RowBudget
from kvpolicy.engine.selection import rank_candidates, worth_of
from kvpolicy.engine.shared_prefix import SharedPrefix
from kvpolicy.engine.shown_prompt import ShownPrompt
from kvpolicy.engine.slot_geometry import SlotGeometry
from kvpolicy.engine.state import map_slots, map_state
from kvpolicy.engine.token_batch import SlotData
from kvpolicy.engine.trimming import can_trim, trim
from kvpolicy.kernels.rotary import KeyRotation
from kvpolicy.protocols import ALONE, SINGLE_RANK, LayerBounds, LayerShape, Layout, Ranks
from kvpolicy.statistics import Forward
from kvpolicy.statistics.input_scores import score_inputs
from kvpolicy.statistics.statistic import first_of
from kvpolicy.statistics.windows import Past, ScoreTransform
from kvpolicy.text.errors import KVPolicyStateError


class LayerStore:
    """The slots of one layer under a policy.

    Everything that a layer holds is here, and nothing else changes it. A prompt goes through `attend_prompt` and
    `compress`, a decode step through `append`; between steps the owner calls `count_step`, which demotes full blocks,
    and `ensure_capacity`.

    Attributes:
        spec: The parts of the policy in this layer.
        layer_idx: Index of the layer in the model.
        contents: The tensors and numbers of the layer.
        geometry: The arrangement of the slots.
        slots: The same if all heads have equally many slots; None if each head has a budget.
        journal: What the layer can take back.
        prefix: Slots of another layer, of one row, that every row attends to before its own; None without.
    """

    def __init__(self, spec: LayerSpec) -> None:
        """Make an empty store from the parts of a layer."""
        self.spec = spec
        self.layer_idx = spec.layer_idx
        self.contents = LayerContents(spec)
        self.slots = SlotGeometry(self.contents) if spec.heads is None else None
        self.geometry: Geometry = self.slots or PageGeometry(self.contents)
        self.journal = Journal(self.contents, self.geometry)
        self.prefix: SharedPrefix | None = None

    def initialize(
        self, keys: Tensor, ranks: Ranks = SINGLE_RANK, group: int = 1, value_dim: int | None = None
    ) -> None:
        """Allocate a layer without slots, like `keys` [B, H, P, D], the first, with `group` query heads for each.

        A value that is held has `value_dim` numbers, D by default.
        """
        batch, heads, _, dim = keys.shape
        shape = LayerShape(heads, dim, keys.dtype, group, 0, None if value_dim == dim else value_dim, self.spec.latent)
        self.contents.begin(self.geometry.alloc(batch, shape, keys.device), shape, ranks)

    @property
    def is_initialized(self) -> bool:
        """Whether the layer has seen its first keys."""
        return self.contents.is_initialized

    @property
    def shape(self) -> LayerShape:
        """The shape of the layer on this rank; only once it is initialized."""
        return self.contents.shape

    @property
    def ranks(self) -> Ranks:
        """The ranks that hold the layer's other heads."""
        return self.contents.ranks

    @property
    def layout(self) -> Layout:
        """Slots of the full-precision buffer and of each stage."""
        return self.contents.layout

    @property
    def tensors(self) -> LayerTensors:
        """Every tensor that the layer holds; only once it is initialized."""
        return self.contents.tensors

    # a prompt

    @on_host
    def attend_prompt(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        valid: Tensor | None,
        transform: ScoreTransform,
        forward: Forward | None = None,
        held: PendingPrompt | None = None,
    ) -> tuple[Tensor, PendingPrompt]:
        """Attend from a prompt or chunk to the slots and to itself; `compress` must follow.

        The arguments are those of `attend_new`.

        Returns:
            The output [B, Hq, P, D], and the prompt, earlier chunks included.
        """
        out, pending = self.attend_new(q, k, v, valid, transform, forward, held)
        return out, self.end_prompt(pending, held)

    @on_host
    def attend_new(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        valid: Tensor | None,
        transform: ScoreTransform,
        forward: Forward | None = None,
        held: PendingPrompt | None = None,
        attention: Callable[..., tuple[Tensor, Tensor | None]] = attend,
    ) -> tuple[Tensor, PendingPrompt]:
        """Attend from a prompt or chunk to the slots and to itself; `end_prompt` must follow.

        Args:
            q: [B, Hq, P, D].
            k: [B, H, P, D].
            v: [B, H, P, D].
            valid: Which of the P tokens are not padding, [B, P] bool; None if all are.
            transform: From products to attention weights.
            forward: The arguments of the attention module, if the selector needs them.
            held: Earlier chunks of the prompt, which are not compressed yet, or None.
            attention: Attends, as `attend` does, which it takes the place of where nothing stands before the prompt.

        Returns:
            The output [B, Hq, P, D], and the prompt without earlier chunks.
        """
        past = self.past() if held is None else held.after(self.past())
        beside = None if self.prefix is None else self.prefix.attend_prompt(q, transform)
        out, attn_sum = attention(q, k, v, transform, past, valid, self.contents.sums_attention, beside)
        return out, see_prompt(self.contents, q, k, v, valid, transform, forward, held, attn_sum)

    @on_host
    def show_prompt(self, k: Tensor, v: Tensor, pending: PendingPrompt, held: PendingPrompt | None) -> ShownPrompt:
        """A prompt as later layers read it that have no keys of their own; `end_prompt` follows behind these.

        Args:
            k: Its keys, [B, H, P, D].
            v: Its values, [B, H, P, D].
            pending: The prompt, from `attend_new`.
            held: Earlier chunks of it, which are not compressed yet, or None.
        """
        past = self.past() if held is None else held.after(self.past())
        keys, values = (k, v) if past is None else (torch.cat([past.keys, k], 2), torch.cat([past.values, v], 2))
        return ShownPrompt(self.contents, keys, values, past, pending, held, self.prefix)

    @on_host
    def begin_tiles(
        self, q: Tensor, k: Tensor, columns: int, valid: Tensor | None, held: PendingPrompt | None = None
    ) -> PromptTiles:
        """Prepare for a prompt in tiles, each attended to by `PromptTiles.attend`; `end_prompt` must follow.

        Args:
            q: The queries of the first tile, [B, Hq, T, D].
            k: Its keys, [B, H, T, D].
            columns: Tokens of the prompt.
            valid: Which of them are not padding, [B, P] bool; None if all are.
            held: Earlier chunks of the prompt, which are not compressed yet, or None.
        """
        past = self.past() if held is None else held.after(self.past())
        statistics = PromptStatistics(self.contents, valid, columns, held)
        sizes = (q.shape[1], self.shape.held_value_dim, columns)
        return PromptTiles(k, *sizes, valid, past, statistics, self.contents.sums_attention, self.prefix)

    @on_host
    def end_prompt(self, pending: PendingPrompt, held: PendingPrompt | None) -> PendingPrompt:
        """Count a prompt's columns, and join it with the chunks before; `compress` must follow."""
        self.contents.add_columns(pending.keys.shape[2])
        self.contents.scale = pending.transform.scale
        return pending if held is None else held.joined(pending)

    @on_host
    def compress(
        self,
        pending: PendingPrompt,
        budget: RowBudget,
        *,
        massive: Tensor | None = None,
        rope_offset: Tensor | None = None,
    ) -> None:
        """Bring a prompt under the budget: select, make slots, and place the selected tokens.

        Args:
            pending: The prompt, from `attend_prompt`.
            budget: Tokens of each row.
            massive: The prompt's tokens with the largest activations, [B, P] bool, if the codec pins them.
            rope_offset: Offset of the rotary positions from the rows' positions, [B], if keys are ever unrotated.
        """
        self.journal.note_sizes(pending.columns)
        self.record(pending, rope_offset)
        if self.spec.undoes_rotation:
            pending = pending._replace(rotation=KeyRotation(self.spec.rope, rope_offset))
        self.geometry.compress(pending, budget, massive=massive)
        # No buffer is full here, since a geometry demotes what it must.
        self.recount()

    @on_host
    def trim(self, pending: PendingPrompt, bounds: LayerBounds, rope_offset: Tensor | None = None) -> PendingPrompt:
        """Drop tokens of a first prompt that no possible budget keeps. Unchanged if the bounds are unknown.

        Args:
            pending: The prompt, from `attend_prompt`.
            bounds: The fewest and the most tokens of each row that the layer may be given, [B] int64 each.
            rope_offset: Offset of the rotary positions from the rows' positions, [B], if keys are ever unrotated.
        """
        # Behind a prefix, attention to it would be gathered again to rank what is left.
        if self.prefix is not None or not can_trim(self.contents, pending, bounds.least):
            return pending
        if self.spec.undoes_rotation and pending.trimmed is None:
            pending = pending._replace(rotation=KeyRotation(self.spec.rope, rope_offset))
        return trim(self.contents, self.geometry.held_slots(), pending, bounds.most)

    @on_host
    def worth(self, pending: PendingPrompt, keep: Tensor) -> Tensor:
        """The worth of each slot and each token of a prompt, in all heads of the model, [B, H, N] fp32.

        Nothing is changed; see `kvpolicy.protocols.LayerAttention`.

        Args:
            pending: The prompt.
            keep: The tokens that the selector is to reckon with, [B] int64.
        """
        seen_before = self.tensors.length
        past = self.past() if pending.reads_past else None
        keep = keep.to(seen_before.device)
        ranking = rank_candidates(self.contents, self.geometry.held_slots(), pending, past, seen_before, keep)
        return self.contents.ranks.all_heads(worth_of(self.spec.selector, ranking))

    def record(self, pending: PendingPrompt, rope_offset: Tensor | None) -> None:
        """Update the limits that a prompt determines; a prompt in several chunks is recorded after each."""
        known = self.rope_offset
        if rope_offset is not None and known is not None:
            known.copy_(rope_offset)
        limits = self.tensors.limits
        if limits is None:
            return
        for each, held in zip(self.spec.codec_statistics, limits.statistics, strict=True):
            found = first_of(type(each), pending.statistics)
            if found is not None:
                held.copy_(found.kept(held, self.contents.ranks))

    # a decode step

    def append(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        valid: Tensor | None,
        transform: ScoreTransform,
        forward: Forward | None = None,
    ) -> Tensor:
        """Write one token per row, evicting where the budget is full, and attend from it. Traceable, no host sync.

        The arguments are those of `attend_step`.

        Returns:
            [B, Hq, 1, D].
        """
        out, step = self.attend_step(q, k, v, valid, transform, forward)
        self.end_step(step)
        return out

    def attend_step(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        valid: Tensor | None,
        transform: ScoreTransform,
        forward: Forward | None = None,
        shared: SharedStep | None = None,
    ) -> tuple[Tensor, Step]:
        """Write one token per row and attend from it; `end_step` must follow, behind the layers that `read`.

        Args:
            q: [B, Hq, 1, D].
            k: [B, H, 1, D].
            v: [B, H, 1, D].
            valid: Which rows have a token that is not padding, [B, 1] bool; None if all have.
            transform: From products to attention weights.
            forward: The arguments of the attention module, if the selector scores inputs.
            shared: What the layers of the step share, which counts the token at its end; None for this layer alone.

        Returns:
            The output [B, Hq, 1, D], and what the selector is to see of the step.
        """
        layer = self.contents
        tensors = layer.tensors
        # A compiled step does not read the host's count, which changes between steps; see `assert_compiled`.
        if not torch.compiler.is_compiling() and layer.can_run_out and layer.free_steps < 1:
            raise KVPolicyStateError(NO_ROOM)
        if layer.undo is not None:
            layer.undo.begin(self.journal.copied())
        position = layer.count_token(valid, shared)
        # The length counts the new token by now: windows include it, but it is no candidate for eviction itself.
        # The view shares `positions`: once the token is written, `update_state` sees it in the same view.
        view = layer.view()
        layer.link.start()
        # What selectors and mergers read to evict goes through no link: only attention and its index are counted.
        slot, merge = self.geometry.free_slot(view._replace(arriving=True), valid)
        # The slot still has the statistics of the token that it held before.
        zeros = partial(layer.memo.once, torch.zeros, slot.shape, device=slot.device)
        state, counts = map_slots(lambda t: zeros(dtype=t.dtype), (tensors.state, tensors.counts))
        data = SlotData(k.detach(), v.detach(), position.expand_as(slot), state, counts)
        if merge is not None:
            slot, data = merging.with_merge(slot, data, merge)
        self.geometry.write(slot, data, None if valid is None else valid[:, None].expand_as(slot))
        if self.prefix is not None and self.slots is not None:
            self.prefix.count_read(layer.link)
        out, weights = self._attend_slots(q, transform)
        layer.link.stop()
        if layer.undo is not None:
            layer.undo.end()
        scores = None
        if self.spec.input_scorer is not None:
            scores = score_inputs(self.spec.input_scorer, layer.gate, forward)
            if tensors.pages is not None:  # states lie in pages, each of one head
                scores = of_pages(scores.expand(-1, k.shape[1], -1), tensors.pages.owner)
        token = None
        if self.spec.step_vectors or scores is not None:
            token = new_token(self.spec, q, k, v, position[:, 0], scores)
        return out, Step(token, valid, view, weights if self.spec.step_attention else None)

    def read(self, q: Tensor, transform: ScoreTransform, step: Step) -> tuple[Tensor, Step]:
        """Attend from one token per row of a later layer, which has no keys of its own. Traceable, no host sync.

        No slot is changed, and the bytes are not counted.

        Args:
            q: [B, Hq, 1, D].
            transform: From products to attention weights.
            step: The step, from `attend_step`.

        Returns:
            The output [B, Hq, 1, D], and the step with the queries of this layer.
        """
        out, weights = self._attend_slots(q, transform)
        return out, step.beside(weights)

    def _attend_slots(self, q: Tensor, transform: ScoreTransform) -> tuple[Tensor, Tensor | None]:
        """Attend from one token per row; with attention weights if the selector looks at them in steps."""
        wanted = self.spec.step_attention
        if self.prefix is None or self.slots is None:
            return self.geometry.attend(q, transform, wanted)
        return self.slots.reads.attend(q, transform, wanted, self.prefix.attend_step(q, transform))

    def end_step(self, step: Step) -> None:
        """Let the selector see a step."""
        if self.spec.sees_steps:
            view = step.view._replace(token=step.token)
            update_state(self.spec.selector, self.tensors.state, step.weights, view, step.valid)

    @property
    def rope_offset(self) -> Tensor | None:
        """Offset of the rotary positions from the rows' positions, [B]; None if no stored key is unrotated."""
        tensors = self.tensors
        if tensors.reads and isinstance(tensors.reads.rope_offset, Tensor):
            return tensors.reads.rope_offset
        return None if tensors.limits is None or self.spec.key_rope is None else tensors.limits.rope_offset

    # between steps

    def count_step(self) -> None:
        """Count one decode step: rank the slots again where it is time, and demote a block if a buffer is full."""
        layer = self.contents
        layer.shared = None
        layer.memo = ALONE
        # A counter on the host: asking the device how full the buffers are would synchronize in every step.
        layer.schedule.steps -= 1
        if layer.schedule.steps < 1:
            with self.journal.block_work():
                rerank(layer, self.geometry)
        layer.free_steps -= 1
        if self.slots is not None and layer.tensors.reads and self.slots.index.count_unsorted_step():
            with self.journal.block_work():
                self.slots.index.renew()
        if layer.free_steps < 1:
            self.demote()
            if not layer.evicts:  # steps may have filled it meanwhile
                layer.note_slots()
        if layer.undo is not None:
            self.journal.note_numbers()

    def demote(self) -> None:
        """Demote blocks until no head's full-precision buffer is full, in the rows where one is, and count free steps.

        No head holds more or fewer tokens than before.
        """
        due = due_rows(self.geometry.full_rows())
        if due:
            with self.journal.block_work():
                while due:
                    for rows in due:
                        with only_rows(self.contents, rows):
                            self.geometry.demote()
                    due = due_rows(self.geometry.full_rows())
        self.contents.free_steps = self.geometry.count_free_steps()

    def ensure_capacity(self) -> int:
        """Add slots if the next step has none: in a growing cache, or one that was announced too few tokens.

        Returns:
            How many tokens were added to the longest row.
        """
        if self.contents.free_steps >= 1:
            return 0
        needed = self.geometry.tokens_needed()
        with self.journal.block_work(ahead=1):
            self.journal.note_sizes()
            added = self.geometry.extend(needed)
            self.demote()
        self.contents.note_slots()
        return added

    def reserve(self, new: int) -> int:
        """Make room for `new` more tokens at once, in a growing cache; returns how many the longest row was given."""
        lacking = self.geometry.tokens_lacking(new)
        if not any(lacking):
            return 0
        self.journal.note_sizes()
        added = self.geometry.extend(lacking)
        self.demote()
        self.contents.note_slots()
        return added

    def recount(self) -> None:
        """Count the free steps and what is full again, after slots were emptied or filled otherwise than by steps."""
        self.contents.free_steps = self.geometry.count_free_steps()
        self.contents.note_slots()

    # what is held

    def past(self) -> Past | None:
        """Every slot, decoded, [B, H, n, D]; None if there are none."""
        return self.geometry.past()

    @property
    def step_bytes(self) -> StepBytes:
        """Bytes that the last decode step moved; those that a step would move if none has been counted."""
        counted = self.contents.link.counted
        if counted.moved or not self.is_initialized:
            return counted
        own = step_bytes(self.geometry, self.spec.host)
        return own if self.prefix is None else own._replace(moved=own.moved + self.prefix.step_nbytes)

    def nbytes_by_kind(self) -> dict[str, int]:
        """Bytes by kind: exact, codes, scales, positions, statistics, index, counters; others if any."""
        kinds = self.contents.nbytes_by_kind()
        return kinds | {UNDO_LOG: self.journal.nbytes} if self.journal.entries else kinds

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors that count as the cache's."""
        return sum(self.nbytes_by_kind().values())

    def map_rows(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Replace every per-row tensor by `fn` of it, which selects or repeats rows."""
        if self.is_initialized:
            self.contents.map_rows(fn)
            self.journal.map_rows(fn)
            self.geometry.fix_addresses()

    def leave_inference_mode(self) -> None:
        """Replace tensors that were made in inference mode, which only inference mode may change, by ordinary ones."""
        self.map_rows(torch.clone)
        # What has no rows is left: the columns, and limits that the codec does not need.
        for name in ("columns", "limits"):
            self.tensors.set_part(name, map_state(torch.clone, self.tensors.parts()[name]))

    def __repr__(self) -> str:
        """The slots, and how they are stored."""
        if not self.is_initialized:
            return f"{type(self).__name__}(layer_idx={self.layer_idx}, empty)"
        rows = self.tensors.length.shape[0]
        return f"{type(self).__name__}(layer_idx={self.layer_idx}, rows={rows}, {self.geometry.describe()})"
