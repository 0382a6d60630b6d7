"""The memory of a prefill besides weights and cache: what a forward of a prompt, or of a chunk of it, holds at once.

A forward holds most in one of three moments. In the MLP of a layer, the intermediate tensors of all tokens are alive.
In its attention, queries and the output are, and the statistics that choose the tokens. In the head, logits are, of one
token per row, as `generate` computes them. With tiles, layers take a part of the tokens at a time, and only hidden
states and the keys of one layer are those of all tokens. The largest of the three is the peak; the tests compare it
with the tensors that are alive in real forwards.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from kvpolicy.engine.attention import MASK_ELEMENTS, MASK_ROWS
from kvpolicy.policy import Policy
from kvpolicy.protocols import LayerShape, attention_of
from kvpolicy.statistics import AttentionSum, RecentQueries, ReplayedRows, Sizes, Statistic, union
from kvpolicy.statistics.statistic import SCORE_NBYTES, SHORTEST_TILE, first_of
from kvpolicy.statistics.windows import TILE_ELEMENTS

FP32 = 4
"""Bytes of an element of fp32."""

LONGEST_TILE = 256
"""Queries of a tile of attention, at most."""


class Widths(NamedTuple):
    """Elements per token of the tensors of a model's forward, on one rank.

    Attributes:
        hidden: Elements of the hidden states.
        mlp: Elements of all tensors that an MLP holds at once besides hidden states, its experts included.
        queries: Elements of the queries of a layer: query heads times head dimension.
        vocab: Elements of the logits.
        tiled: Whether attention is always computed in tiles: with a cap of the scores, or sinks.
        eager: Whether layers that no policy manages compute a whole matrix of attention weights.
        expanded: Elements of the queries, keys and values that latent vectors are expanded to; 0 without such.
    """

    hidden: int
    mlp: int
    queries: int
    vocab: int
    tiled: bool = False
    eager: bool = False
    expanded: int = 0


class Piece(NamedTuple):
    """The tokens of one forward.

    Attributes:
        batch: Rows.
        columns: New tokens of each row: of the whole prompt, or of a chunk.
        past: Tokens that a layer holds before them, which they attend to.
    """

    batch: int
    columns: int
    past: int

    @property
    def tokens(self) -> int:
        """New tokens of all rows."""
        return self.batch * self.columns

    @property
    def keys(self) -> int:
        """Keys that the last token of each row sees, in all rows together."""
        return self.batch * (self.past + self.columns)


class Prefill(NamedTuple):
    """A prefill of prompts of equal length, from which the activations of any number of rows follow.

    Attributes:
        policy: The policy.
        shape: Shape of the keys of a layer under it.
        widths: Widths of the model.
        windows: Sliding windows of the layers that no policy manages, and the shapes of their keys.
        columns: Tokens of the longest prompt.
        chunk: Tokens that are prefilled at a time.
        slots: The most slots of a layer.
        coded: The most tokens that a layer encodes; 0 without a codec that encodes.
        tile: The most tokens that a layer takes at a time; None for all.
        holds: Whether chunks are held until the last one.
    """

    policy: Policy
    shape: LayerShape
    widths: Widths
    windows: tuple[tuple[int, LayerShape], ...]
    columns: int
    chunk: int
    slots: int
    coded: int
    tile: int | None = None
    holds: bool = False

    def activation_bytes(self, batch: int) -> int:
        """The most bytes that a forward of the prefill holds besides weights and what the cache holds.

        Args:
            batch: Rows.
        """
        # All slots are allocated with the first chunk. Prompts that are replayed are held as they are.
        waits = self.holds or self.policy.replay is not None
        piece = self._piece(batch, self.columns - self.chunk if waits else self.slots)
        tile = self._tile(piece)
        statistics = max((_statistics(self, own, piece, tile) for own in self.policy.distinct), default=0)
        prefill = max(_forward(self, tile, statistics), self._pinning_bytes(piece)) + self._whole_bytes(piece, tile)
        if self.policy.replay is None:
            return prefill
        return max(prefill, self._replay_bytes(batch))

    def stock_activation_bytes(self, batch: int) -> int:
        """The same with the stock cache, which keeps every token in each layer.

        Args:
            batch: Rows.
        """
        piece = self._piece(batch, self.columns - self.chunk)
        past = 0
        if piece.past:
            # A causal mask of the chunk, in the dtype of the model too; the layer with the chunk behind it, and the
            # same with repeated KV heads, which a mask requires.
            size = self.shape.dtype.itemsize
            repeated = self.shape.token_nbytes + 2 * self.widths.queries * size
            past = piece.tokens * (piece.past + piece.columns) * (1 + size) + piece.keys * repeated
        return _forward(self, piece, past)

    def step_bytes(self, batch: int) -> int:
        """The most bytes that a decode step holds besides: those of one token per row, and its logits.

        Args:
            batch: Rows.
        """
        return _forward(self, Piece(batch, 1, 0), 0)

    def _piece(self, batch: int, held: int) -> Piece:
        """The last chunk, before which a layer has `held` slots; there are none before a whole prompt."""
        return Piece(batch, self.chunk, held if self.chunk < self.columns else 0)

    def _tile(self, piece: Piece) -> Piece:
        """The last tokens of a piece that a layer takes at a time."""
        columns = min(self.tile or piece.columns, piece.columns)
        return Piece(piece.batch, columns, piece.past + piece.columns - columns)

    def _whole_bytes(self, piece: Piece, tile: Piece) -> int:
        """Bytes of a piece besides those of the tile that a layer takes: hidden states and rotary embeddings."""
        if tile.columns == piece.columns:
            return 0
        size = self.shape.dtype.itemsize
        # The embedded tokens, the input of the layer, and its output.
        return piece.tokens * (3 * self.widths.hidden * size + _common(self))

    def _pinning_bytes(self, piece: Piece) -> int:
        """Bytes with which the largest activations of a piece are found before a layer takes it."""
        if all(own.codec.traits.pins != "massive" for own in self.policy.distinct):
            return 0
        # Their absolute values, without padding, and a comparison of all.
        return piece.tokens * self.widths.hidden * (2 * self.shape.dtype.itemsize + 1)

    def _replay_bytes(self, batch: int) -> int:
        """A replayed chunk with its instruction, which attends to a copy of a layer's prompt behind which it stands."""
        replay = self.policy.replay
        assert replay is not None
        text = max(len(replay.first), len(replay.later) + replay.overlap) + len(replay.reply)
        piece = Piece(batch, min(replay.chunk, self.columns) + text, self.columns)
        size = self.shape.dtype.itemsize
        # Tiles of scores are of few heads, and of one if need be.
        scores = batch * _heads(self) * (replay.sinks + 2 * piece.columns)
        one_head = scores // max(self.shape.heads, 1)
        scored = SCORE_NBYTES * min(max(TILE_ELEMENTS, SHORTEST_TILE * one_head), scores * piece.columns)
        # A boolean mask of some queries, which becomes one of numbers.
        rows = min(max(MASK_ELEMENTS // piece.keys, SHORTEST_TILE), MASK_ROWS, piece.columns)
        masks = (1 + size) * rows * piece.keys
        tile = self._tile(piece)
        if self.widths.tiled:  # attention has tiles, too, of all heads and over the whole context
            scored = max(scored, _tile_bytes(_heads(self) * piece.keys, tile.columns))
        # Without a copy of the keys, attention is computed in parts: two outputs, and queries by KV head.
        parts = 2 * tile.tokens * self.widths.queries * size
        held = max(piece.keys * self.shape.token_nbytes + masks, parts) + scored
        return _forward(self, tile, held) + self._whole_bytes(piece, tile)


def _heads(prefill: Prefill) -> int:
    """Query heads of this rank."""
    return max(prefill.widths.queries // prefill.shape.head_dim, 1)


def _tile_bytes(scores: int, columns: int) -> int:
    """Bytes of the tiles in which the attention of `columns` queries is computed.

    Args:
        scores: Scores of one query of each row and head.
        columns: Queries of each row.
    """
    rows = min(max(TILE_ELEMENTS // max(scores, 1), SHORTEST_TILE), LONGEST_TILE, columns)
    return scores * rows * (SCORE_NBYTES if rows < columns else SCORE_NBYTES - 2)


def _forward(prefill: Prefill, piece: Piece, statistics: int) -> int:
    """The most bytes that a forward holds, with `statistics` bytes beside the output of an attention."""
    widths = prefill.widths
    size = prefill.shape.dtype.itemsize
    masks, sliding = _sliding(prefill, piece)
    common = masks + piece.tokens * _common(prefill)
    # The embedded tokens, the input of the layer, its residual and their norm. A norm computes in fp32.
    hidden = piece.tokens * widths.hidden
    mlp = 4 * hidden * size + max(piece.tokens * widths.mlp * size, 8 * hidden)
    # Four tensors of the size of the queries are alive while they are rotated; their norm, if any, is in fp32.
    rotated = piece.tokens * widths.queries * max(4 * size, size + 8)
    attended = piece.tokens * widths.queries * 3 * size
    measured = 0
    if prefill.policy.layer_metric == "cosine":  # cosines of hidden states before and after attention
        measured = 24 * hidden
    # Expanded vectors are alive beside folded queries, and beside what is chosen among latent vectors.
    expanded = piece.tokens * widths.expanded * size
    attention = 3 * hidden * size + max(rotated, attended + expanded + max(statistics, sliding), measured)
    head = 3 * hidden * size + piece.batch * widths.vocab * (size + 8)
    return common + max(mlp, attention, head)


def _common(prefill: Prefill) -> int:
    """Bytes of a token that every layer is given: its id, its position and its rotary embedding."""
    # A cosine and a sine for each kind of layer.
    kinds = 1 + bool(prefill.windows)
    return 24 + 4 * kinds * prefill.shape.head_dim * prefill.shape.dtype.itemsize


def _statistics(prefill: Prefill, policy: Policy, piece: Piece, tile: Piece) -> int:
    """The most bytes with which a layer scores, chooses and encodes the tokens of a piece and of its slots.

    Args:
        prefill: The prefill.
        policy: The policy of the layer.
        piece: The piece.
        tile: Tokens that the layer takes at a time.
    """
    shape = prefill.shape
    size = shape.dtype.itemsize
    asked = union(policy.selector.statistics, policy.merger.statistics, policy.codec.statistics)
    sizes = _sizes(prefill, piece, tile)
    scores = sizes.scores
    vectors = sizes.vectors
    joined = sizes.joined
    attended = 0
    sums = first_of(AttentionSum, asked) is not None
    if sums or piece.past or prefill.widths.tiled:
        attended = joined + _tile_bytes(scores, tile.columns) + FP32 * scores * sums
    elif tile.columns < piece.columns:  # a mask of some queries of the tile, which becomes one of numbers
        rows = min(max(MASK_ELEMENTS // max(piece.columns, 1), SHORTEST_TILE), MASK_ROWS, tile.columns)
        attended = (1 + size) * rows * piece.columns
    # Attention rows of a window are held together, whichever part asks for them.
    window = min(sum(each.width for each in asked if isinstance(each, RecentQueries | ReplayedRows)), piece.columns)
    scored = joined + scores * (9 * window + 16) if window else 0
    # Priorities, positions and sorted orders of all candidates of each head; with slots, in another order besides.
    candidates = sizes.candidates
    chosen = joined + candidates * 64 + scores * 4 * window * (1 + bool(piece.past))
    if any(each.reads_vectors for each in asked):
        chosen += vectors * (1 + bool(piece.past)) + candidates * shape.head_dim * 12
    for each in asked:
        needed = each.working(sizes)
        attended += needed.held
        scored = max(scored, needed.reduced)
        chosen += needed.chosen
    if policy.layer_metric == "attention":
        rows, observed = _measured_bytes(prefill, attention_of(policy.allocator), piece, tile)
        attended += rows
        scored = max(scored, rows + observed)
    if policy.merger.traits.when != "never":
        # Tiles of cosines between evicted and kept tokens, and keys and values in fp32.
        cosines = max(TILE_ELEMENTS, SHORTEST_TILE * piece.batch * shape.heads * prefill.slots)
        chosen += 24 * cosines + vectors * 8 // size
        # A regression copies the attention of a window in fp64.
        observed = sum(
            each.width for each in policy.merger.statistics if isinstance(each, RecentQueries | ReplayedRows)
        )
        chosen += 32 * scores * min(observed, piece.columns)
    encoded = piece.batch * _encoded(prefill, policy, piece)
    traits = policy.codec.traits
    # Tokens that are encoded in another order than that of their positions are put in it, and then in their slots.
    ordered = encoded * shape.token_nbytes * 2 * (traits.demotion is not None)
    # They pass through fp32 a few times.
    at_once = min(encoded, piece.batch * traits.at_once) if traits.at_once else encoded
    converted = at_once * shape.heads * shape.head_dim * 40
    placed = joined + vectors + candidates * 64 + ordered + converted
    return max(attended, scored, chosen, placed)


def _measured_bytes(prefill: Prefill, asked: tuple[Statistic[Any], ...], piece: Piece, tile: Piece) -> tuple[int, int]:
    """Bytes of the statistics by which an allocator measures a layer.

    Returns:
        Those that are held while the piece comes, and those with which they are reduced, one KV head at a time.
    """
    shape = prefill.shape
    new = piece.batch * piece.columns
    held = 0
    if first_of(AttentionSum, asked) is not None:  # as in `_statistics`: attention is computed in tiles
        held = FP32 * _heads(prefill) * new + _tile_bytes(_heads(prefill) * piece.keys, tile.columns)
    recent = first_of(RecentQueries, asked)
    window = 0 if recent is None else min(recent.width, piece.columns)
    # Sorted numbers of each token and head with their order, and the values of a head.
    reduced = _heads(prefill) * new * 9 * FP32 + new * shape.head_dim * 2 * FP32
    return held, reduced + _heads(prefill) // max(shape.heads, 1) * new * window * (SCORE_NBYTES + FP32)


def _sizes(prefill: Prefill, piece: Piece, tile: Piece) -> Sizes:
    """The sizes by which statistics count what they need."""
    shape = prefill.shape
    return Sizes(
        batch=piece.batch,
        columns=piece.columns,
        past=piece.past,
        tile=tile.columns,
        queries=_heads(prefill),
        heads=shape.heads,
        head_dim=shape.head_dim,
        itemsize=shape.dtype.itemsize,
        token_nbytes=shape.token_nbytes,
        hidden=prefill.widths.hidden,
        widest=prefill.widths.queries,
    )


def _encoded(prefill: Prefill, policy: Policy, piece: Piece) -> int:
    """The most tokens of a row that are encoded: of a later chunk, those that make room for its tokens."""
    demotion = policy.codec.traits.demotion
    if not piece.past or prefill.holds or (demotion is not None and demotion.recodes):
        return prefill.coded
    return min(prefill.coded, prefill.slots - prefill.coded + piece.columns)


def _sliding(prefill: Prefill, piece: Piece) -> tuple[int, int]:
    """Bytes of layers with a sliding window: of their masks, which live through the forward, and of an attention.

    transformers computes them with a mask of every pair of a query and a key, for which it repeats the KV heads.
    """
    if not prefill.windows:
        return 0, 0
    size = prefill.shape.dtype.itemsize
    window, shape = max(prefill.windows, key=lambda one: one[0])
    seen = min(prefill.columns - piece.columns, window - 1) + piece.columns
    pairs = piece.tokens * seen
    repeated = piece.batch * seen * (shape.token_nbytes + 2 * prefill.widths.queries * size)
    if prefill.widths.eager:
        return pairs * (1 + size), repeated + pairs * _heads(prefill) * 3 * size
    return pairs, repeated + pairs * size
