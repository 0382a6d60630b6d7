"""A layer of a policy's cache as transformers sees it: an adapter of the engine's store, and of a shared prefix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from kvpolicy.engine.host import inference_as, on_host, outside_autocast
from kvpolicy.engine.journal import crop_obstacle
from kvpolicy.engine.layer_group import LayerGroup
from kvpolicy.engine.layer_store import LayerStore
from kvpolicy.engine.layout import fix_addresses
from kvpolicy.engine.link import StepBytes
from kvpolicy.engine.prefill import PendingPrompt
from kvpolicy.engine.prompt_tiles import PromptTiles
from kvpolicy.engine.reading import Board
from kvpolicy.engine.shared_prefix import SharedPrefix
from kvpolicy.engine.state import map_numbers
from kvpolicy.hf.seen_text import extend_digest
from kvpolicy.hf.tiles import PromptTile
from kvpolicy.hf.transcript import Transcript
from kvpolicy.kernels.rotary import Rope
from kvpolicy.planning.memory import layer_spec
from kvpolicy.planning.result import SHARED
from kvpolicy.policy import Policy
from kvpolicy.protocols import LayerShape, Layout, Ranks
from kvpolicy.reporting.logging import log_extended
from kvpolicy.selectors.full import KeepAll
from kvpolicy.statistics import Forward
from kvpolicy.statistics.input_scores import score_inputs
from kvpolicy.statistics.statistic import Projection
from kvpolicy.statistics.windows import ScoreTransform


class LayerPrefix(NamedTuple):
    """The prefix of a layer.

    Attributes:
        source: The layer that holds its slots.
        slots: Attends to them.
        rows: Rows that the layer begins with.
        columns: Columns of the prefix, padding included.
        digest: Digest of its mask, in the first layer of a cache; else None.
        rope_deltas: Offset of the positions behind its pictures for each row, in the first layer of a cache, or None.
    """

    source: LayerStore
    slots: SharedPrefix
    rows: int
    columns: int
    digest: int | None
    rope_deltas: list[int] | None

    def begin(self, store: LayerStore) -> Tensor | None:
        """Let an empty layer begin behind the prefix; returns the digest of each row, [B] int64, if there is one."""
        keys = self.source.tensors.keys
        empty = keys.new_empty(self.rows, self.source.shape.heads, 0, keys.shape[-1])
        shape = self.source.shape
        store.initialize(empty, self.source.ranks, shape.group, shape.value_dim)
        store.prefix = self.slots
        if self.digest is None:
            return None
        return torch.full((self.rows,), self.digest, dtype=torch.int64, device=keys.device)

    def __deepcopy__(self, memo: object) -> LayerPrefix:
        """Copies of a cache share its prefix."""
        return self


def make_store(
    policy: Policy,
    layer_idx: int,
    rope: Rope | None = None,
    projection: Projection | None = None,
    shape: LayerShape | None = None,
) -> LayerStore:
    """The empty store of a layer under a policy, with what it needs of the model's layer; see `layer_spec`."""
    return LayerStore(layer_spec(policy, layer_idx, rope, projection, shape))


class PolicyLayer(CacheLayerMixin):
    """The slots of one layer under a policy.

    Attributes:
        store: The layer's slots.
        is_read: Whether later layers read its keys, since they have none.
        prefix: What its rows share before their own tokens, or None.
        pending: The prompt that awaits its budget or its replay, or None.
        tiles: The prompt that the layer takes in tiles at the moment, or None.
        massive: Its tokens with the largest activations, [B, P] bool, if it awaits a replay and the codec pins them.
        rope_offset: Offset of the rotary positions from the rows' positions, [B], if it awaits a later chunk or a
            replay, and the selector needs keys without their rotation.
        transcript: Its transcript, in the first layer of a cache, if it awaits a replay; else None.
        rope_deltas: Offset of the positions behind each row's pictures, in the first layer of a cache; None without
            any, see `kvpolicy.hf.rope_deltas`. On the host, as other numbers of rows.
    """

    is_sliding = False
    is_compileable = True
    supports_early_init = False
    # Properties of the store take the place of the base class's attributes.
    keys: Tensor = property(lambda self: self.store.tensors.keys if self.is_initialized else None)  # pyright: ignore
    values: Tensor = property(lambda self: self.store.tensors.values if self.is_initialized else None)  # pyright: ignore
    is_initialized: bool = property(lambda self: self.store.is_initialized)  # pyright: ignore

    @property
    def is_croppable(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether `crop` can take back every token, as assisted decoding needs: nothing is ever evicted or encoded."""
        spec = self.store.spec
        return isinstance(spec.selector, KeepAll) and not crop_obstacle(spec)

    def __init__(
        self,
        make_store: Callable[[], LayerStore],
        board: Board | None = None,
        group: tuple[LayerGroup, int] | None = None,
        *,
        is_read: bool = False,
        holds_codes: bool = False,
    ) -> None:
        """Make an empty layer; `make_store` is called again for every reset.

        `board` is where a layer shows what it chose to read, to the layers behind it that read the same. `group` are
        the layers that store a part of what they hold together with this one, and its number there. Other layers
        read its keys if `is_read`. A prompt that waits is held in codes if `holds_codes`, for which the codec must
        encode every token by itself.
        """
        self._make_store = make_store
        self._board = board
        self._group = group
        self._holds_codes = holds_codes
        self.is_read = is_read
        self.prefix: LayerPrefix | None = None
        self.reset()

    def share(self, prefix: LayerPrefix) -> None:
        """Begin behind a prefix that the rows share, now and after every reset."""
        self.prefix = prefix
        self.reset()

    def reset(self) -> None:
        """Forget everything but a shared prefix."""
        self.store = self._make_store()
        if self._board is not None:
            self._board.clear()
        # Not by `make_store`: a copy of a cache has a copy of this, and the same function.
        if self.store.slots is not None:
            self.store.slots.index.board = self._board
        if self._group is not None:
            self.store.contents.join(*self._group)
        self.pending: PendingPrompt | None = None
        self.tiles: PromptTiles | None = None
        self.massive: Tensor | None = None
        self.rope_offset: Tensor | None = None
        self.transcript: Transcript | None = None
        self.rope_deltas: list[int] | None = None if self.prefix is None else self.prefix.rope_deltas
        digest = None if self.prefix is None else self.prefix.begin(self.store)
        if digest is not None:
            self.hold_digest(digest)

    @property
    def mask_digest(self) -> Tensor | None:
        """Digest of the columns seen by each row, [B] int64, in the first layer of a cache; else None."""
        return self.store.journal.digest

    @property
    def layer_idx(self) -> int:
        """Index of the layer in the model."""
        return self.store.layer_idx

    @property
    def positions(self) -> Tensor:
        """Original position of the token in each slot, [B, H, S] int32, -1 for an empty slot; [B, NB, P] in pages.

        Behind a shared prefix, positions and lengths are those of what each row has added, counted from 0.
        """
        return self.store.tensors.positions

    @property
    def counts(self) -> Tensor | None:
        """Logarithm of the number of tokens of each slot, fp32, shaped as `positions`; None if it is always one."""
        return self.store.tensors.log_counts

    @property
    def owner(self) -> Tensor | None:
        """KV head of each page, [B, NB] int64, H for a page that a row does not use; None if heads are equal."""
        pages = self.store.tensors.pages
        return None if pages is None else pages.owner

    @property
    def head_positions(self) -> Tensor:
        """Positions of the tokens of each head, [B, H, n] int32, -1 for none."""
        return self.store.geometry.head_positions()

    @property
    def budget(self) -> Tensor:
        """The most tokens that each row may hold, [B] int64."""
        return self.store.tensors.budget

    @property
    def length(self) -> Tensor:
        """Tokens that each row has seen, [B] int64."""
        length = self.store.tensors.length
        return length if self.pending is None else self.pending.lengths(length)

    @property
    def layout(self) -> Layout:
        """Slots of the full-precision buffer and of each stage."""
        return self.store.layout

    @property
    def step_bytes(self) -> StepBytes:
        """Bytes that the last decode step moved, or would move if none was counted."""
        return self.store.step_bytes

    @property
    def moved(self) -> int:
        """Bytes that the last decode step read, or would read if none was counted."""
        return self.store.step_bytes.moved

    def held(self) -> dict[str, int]:
        """Bytes by kind, of a prompt that awaits its budget too."""
        kinds = self.store.nbytes_by_kind()
        if self.mask_digest is not None:
            kinds["counters"] += self.mask_digest.nbytes
        parts = (self.pending, self.massive, self.rope_offset, self.transcript)
        waiting = [part for part in parts if part is not None]
        if self.prefix is not None:
            kinds[SHARED] = self.prefix.slots.nbytes
        block = self.store.contents.waiting_nbytes
        return kinds | ({"waiting prompt": sum(part.nbytes for part in waiting) + block} if waiting or block else {})

    def make_room(self, new: int | None = None) -> None:
        """Add slots if they are needed: for the next step, or for `new` tokens."""
        contents = self.store.contents
        with outside_autocast(contents.tensors.length.device), inference_as(contents.is_inference):
            added = self.store.ensure_capacity() if new is None else self.store.reserve(new)
        log_extended(self.layer_idx, added, self.store.contents.capacity)

    def count_step(self) -> None:
        """Count one decode step; see `LayerStore.count_step`."""
        with outside_autocast(self.store.tensors.length.device):
            self.store.count_step()

    @property
    def holds_tokens(self) -> bool:
        """Whether new tokens attend to others: in slots, of a prompt that waits, or of a shared prefix."""
        return self.store.contents.layout.slots > 0 or self.pending is not None or self.prefix is not None

    @property
    def holds_prompt(self) -> bool:
        """Whether the layer holds a prompt that is compressed, so that a single token is a step."""
        return self.is_initialized and self.pending is None and not self.awaits_prompt

    @property
    def awaits_prompt(self) -> bool:
        """Whether the rows have nothing behind their prefix yet, so that a single token is a prompt as well."""
        return self.prefix is not None and not self.store.contents.layout.slots

    @property
    def prefix_columns(self) -> int:
        """Columns of the prefix that the rows share; 0 without one."""
        return 0 if self.prefix is None else self.prefix.columns

    @property
    def prefix_kept(self) -> float:
        """Tokens of the shared prefix that a head holds, as a mean; 0 without one."""
        return 0.0 if self.prefix is None else float(self.prefix.source.geometry.tokens_by_head().float().mean())

    @property
    def prefix_full_nbytes(self) -> int:
        """Bytes of the prefix's tokens in a stock cache, of one row; 0 without a prefix."""
        return 0 if self.prefix is None else self.prefix.slots.length * self.store.shape.token_nbytes

    def hold(self, pending: PendingPrompt, massive: Tensor | None, rope_offset: Tensor | None) -> None:
        """Keep a prompt until it was replayed.

        Args:
            pending: The prompt, earlier chunks included.
            massive: Which tokens of the newest chunk have the largest activations, [B, P] bool, or None.
            rope_offset: Offset of the rotary positions from the rows' positions, [B], or None.
        """
        self.store.record(pending, rope_offset)
        if massive is not None or self.massive is not None:
            # Flags of earlier chunks go to the front of the joined prompt, those of the newest chunk to its end.
            flags = pending.flags.new_zeros(pending.flags.shape)
            for part, start in ((self.massive, 0), (massive, -1)):
                if part is not None:
                    first = start * part.shape[1]
                    flags[:, first : first + part.shape[1] or None] |= part
            self.massive = flags
        if rope_offset is not None and self.store.spec.undoes_rotation:
            offset = rope_offset.to(pending.flags.device, copy=True)  # each layer counts its own
            if self.pending is not None and self.rope_offset is not None:
                # A row without a token in the newest chunk has no position there, and keeps the offset that it has.
                none = torch.zeros_like(offset)
                came = pending.lengths(none) > self.pending.lengths(none)
                offset = torch.where(came, offset, self.rope_offset)
            self.rope_offset = offset
        self.keep(pending)

    def keep(self, pending: PendingPrompt) -> None:
        """Keep a prompt until its budget is known."""
        if self._holds_codes:
            pending = pending.encoded(self.store.spec.codec, self.store.contents.calibrations[0])
        self.pending = pending.owned()

    def release(self) -> tuple[PendingPrompt, Tensor | None, Tensor | None]:
        """The prompt that waits, and `massive` and `rope_offset` of it, all of which the layer lets go of."""
        pending = self.pending
        massive = self.massive
        rope_offset = self.rope_offset
        assert pending is not None
        self.pending = self.massive = self.rope_offset = None
        return pending.decoded(), massive, rope_offset

    @on_host
    def attend_tile(
        self,
        tile: PromptTile,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        transform: ScoreTransform,
        call: Forward | None,
        ranks: Ranks,
    ) -> Tensor:
        """Attend from one tile of a prompt, and keep it; `end_tiles` must follow behind the last one.

        Args:
            tile: The tile.
            q: [B, Hq, T, D].
            k: [B, H, T, D].
            v: [B, H, T, D].
            transform: From products to attention weights.
            call: The arguments of the attention module, if the selector needs them.
            ranks: The ranks that hold the layer's other heads.

        Returns:
            [B, Hq, T, D].
        """
        store = self.store
        if tile.start == 0:
            if not store.is_initialized:
                store.initialize(k, ranks, q.shape[1] // k.shape[1], v.shape[3])
            valid = None if tile.valid is None else tile.valid.to(k.device)
            self.tiles = store.begin_tiles(q, k, tile.columns, valid, self.pending)
        assert self.tiles is not None
        scorer = store.spec.input_scorer
        scores = None if scorer is None else score_inputs(scorer, store.contents.gate, call)
        out = self.tiles.attend(q, k, v, transform, scores)
        if call is not None and store.spec.needs_call:
            self.tiles.note_forward(call, q, tile.whole)
        return out

    def end_tiles(self) -> PromptTiles:
        """The prompt that the layer has taken in tiles, which it lets go of."""
        tiles = self.tiles
        self.tiles = None
        assert tiles is not None
        return tiles

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Make a layer without slots, on the device of its first keys."""
        self.store.initialize(key_states, value_dim=value_states.shape[3])

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Return keys and values as they are: the attention function reads and writes the slots."""
        return key_states, value_states

    def get_seq_length(self) -> int:
        """Columns seen, padding included: transformers counts positions from it."""
        if not self.is_initialized:
            return 0
        before = 0 if self.prefix is None else self.prefix.columns
        if torch.compiler.is_compiling():
            columns = self.store.tensors.columns
            return columns + before if before else columns  # pyright: ignore[reportReturnType]  # a tensor, as in static layers
        return self.store.contents.columns + before

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of a stock mask over everything seen."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        """No limit: tokens beyond the budget are evicted."""
        return -1

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Take rows `beam_idx` [B']."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Take rows `indices` [B']."""
        self.map_rows(lambda t: t[indices.to(t.device)])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row."""
        self.map_rows(lambda t: t.repeat_interleave(repeats, 0))

    def map_rows(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Replace every per-row tensor by `fn` of it, which selects or repeats rows."""
        self.store.map_rows(fn)
        self.pending = None if self.pending is None else self.pending.map_rows(fn)
        self.massive = None if self.massive is None else fn(self.massive)
        self.rope_offset = None if self.rope_offset is None else fn(self.rope_offset)
        self.transcript = None if self.transcript is None else self.transcript.map_rows(fn)
        if self.mask_digest is not None:
            self.hold_digest(fn(self.mask_digest))
        self.rope_deltas = None if self.rope_deltas is None else map_numbers(fn, self.rope_deltas)

    def leave_inference_mode(self) -> None:
        """Replace tensors that were made in inference mode, which only inference mode may change, by ordinary ones."""
        self.store.leave_inference_mode()
        self.pending = None if self.pending is None else self.pending.map_rows(torch.clone)
        if self.mask_digest is not None:
            self.hold_digest(self.mask_digest.clone())

    def extend_digest(self, valid: Tensor | None, columns: int) -> None:
        """Add columns to the digest of the mask; see `kvpolicy.hf.seen_text`."""
        journal = self.store.journal
        if journal.digest is None:
            self.hold_digest(torch.zeros_like(self.store.tensors.length))
        assert journal.digest is not None
        extend_digest(journal.digest, valid, columns)

    @on_host
    def hold_digest(self, digest: Tensor) -> None:
        """Hold a digest of the columns seen, [B] int64."""
        self.store.journal.digest = digest
        fix_addresses([digest])  # a compiled step writes to it, as to the slots

    def __repr__(self) -> str:
        """The slots, and how they are stored."""
        return repr(self.store).replace(type(self.store).__name__, type(self).__name__, 1)
