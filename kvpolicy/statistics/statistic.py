"""Statistics of a prompt, which a part of a policy hands over, and finds the results of.

A statistic says how it is gathered tile by tile, joined over chunks, moved with the rows of a batch, and reduced to a
result when tokens are chosen, what it costs and what it is called. It is never changed: all methods return a new one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from kvpolicy.kernels.mixed_values import read_values
from kvpolicy.kernels.rotary import KeyRotation, Rope
from kvpolicy.statistics.ranks import SINGLE_RANK, Ranks
from kvpolicy.statistics.windows import (
    TILE_ELEMENTS,
    Past,
    ScoreTransform,
    newest_columns,
    token_positions,
)
from kvpolicy.text.errors import KVPolicyError

Result = TypeVar("Result")
Self = TypeVar("Self")

Projection = Callable[[], Tensor]
"""Reads the output projection of a layer on this rank when it is needed, since weights may move.

It is [hidden, Hq * D], or [B, hidden, Hq * D] where rows have their own.
"""

SCORE_NBYTES = 14
"""Bytes of each score of a tile, in half precision and in fp32, with the scores and weights of the tile before."""

SHORTEST_TILE = 16
"""Queries of a tile of attention, at least, however many keys they see."""


class Coming(NamedTuple):
    """A prompt of P tokens that comes in one piece or in tiles.

    Attributes:
        valid: Which of the tokens are not padding, [B, P] bool; None if all are.
        columns: P.
        seen: Tokens that each row has seen before, [B] int64.
        rope: The rotary embedding of the layer, if the selector needs queries or keys without it.
    """

    valid: Tensor | None
    columns: int
    seen: Tensor
    rope: Rope | None

    @property
    def shape(self) -> tuple[int, int]:
        """B and P."""
        return self.seen.shape[0], self.columns

    @property
    def positions(self) -> Tensor:
        """Position of each token in its row, [B, P] int32, -1 for padding."""
        return token_positions(self.valid, self.columns, self.seen)

    def newest(self, width: int) -> Tensor:
        """Columns of the newest `width` tokens of each row, [B, W] int64, -1 where a row has fewer."""
        return newest_columns(self.valid, self.shape, width, self.seen.device)


class Tile(NamedTuple):
    """Some tokens of a prompt.

    Attributes:
        queries: [B, Hq, T, D].
        keys: [B, H, T, D].
        start: Column of the first of them.
        valid: Which of them are not padding, [B, T] bool; None if all are.
        is_whole: Whether they are the whole prompt.
        scores: Scores by the input of the layer, [B, H, T] fp32; None unless `InputScores` asks for them.
    """

    queries: Tensor
    keys: Tensor
    start: int
    valid: Tensor | None
    is_whole: bool
    scores: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Context:
    """The tokens that statistics are reduced over: S slots, and the P new tokens of a prompt.

    Attributes:
        keys: Keys of the new tokens, [B, H, P, D].
        values: Their values, [B, H, P, D].
        valid: Which of them are not padding, [B, P] bool; None if all are.
        transform: From products to attention weights.
        past: Every slot, decoded; None if there are none or no statistic reads them.
        positions: Positions of slots and new tokens, [B, H, S + P] int32, -1 for none.
        layer_idx: Index of the layer.
        ranks: The ranks that hold the model's other heads.
        latent: How many numbers of a key are its value, where none is held; else 0.
        rotation: How keys are rotated, if a statistic undoes it.
        projection: Reads the output projection, if a statistic needs it.
        call: The arguments of the attention module, if they were asked for.
        replay: Scores of the replayed context, [B, H, P] fp32; None if there was no replay.
    """

    keys: Tensor
    values: Tensor
    valid: Tensor | None
    transform: ScoreTransform
    past: Past | None
    positions: Tensor
    layer_idx: int = 0
    ranks: Ranks = SINGLE_RANK
    latent: int = 0
    rotation: KeyRotation | None = None
    projection: Projection | None = None
    call: Any = None
    replay: Tensor | None = None

    @property
    def slots(self) -> int:
        """S."""
        return self.positions.shape[-1] - self.keys.shape[2]

    @cached_property
    def all_keys(self) -> Tensor:
        """Keys of slots and new tokens, [B, H, S + P, D]."""
        return self.keys if self.past is None else torch.cat([self.past.keys, self.keys], 2)

    @cached_property
    def all_values(self) -> Tensor:
        """Values of slots and new tokens, [B, H, S + P, D]."""
        values = self.values if self.past is None else torch.cat([self.past.values, self.values], 2)
        return read_values(self.all_keys, values, self.latent)


class Sizes(NamedTuple):
    """Sizes of the last piece of a prompt that a layer takes, for what a statistic costs.

    Attributes:
        batch: Rows.
        columns: New tokens of each row.
        past: Tokens that the layer holds before them.
        tile: New tokens of each row that the layer takes at a time.
        queries: Query heads.
        heads: KV heads.
        head_dim: Size of a key.
        itemsize: Bytes of an element of a key.
        token_nbytes: Bytes of the keys and values of a token.
        hidden: Elements of the hidden states of a token.
        widest: Elements of the queries of a token: query heads times the size of a key.
    """

    batch: int
    columns: int
    past: int
    tile: int
    queries: int
    heads: int
    head_dim: int
    itemsize: int
    token_nbytes: int
    hidden: int
    widest: int

    @property
    def tokens(self) -> int:
        """New tokens of all rows."""
        return self.batch * self.columns

    @property
    def keys(self) -> int:
        """Keys that the last token of each row sees, in all rows together."""
        return self.batch * (self.past + self.columns)

    @property
    def scores(self) -> int:
        """Scores of one query of each row and head."""
        return self.queries * self.keys

    @property
    def candidates(self) -> int:
        """Slots and new tokens of all KV heads."""
        return self.heads * self.keys

    @property
    def vectors(self) -> int:
        """Bytes of the keys and values of all candidates."""
        return self.keys * self.token_nbytes

    @property
    def joined(self) -> int:
        """Bytes of the slots, decoded, and of a copy of them behind which the new tokens stand."""
        return 2 * self.vectors if self.past else 0

    @property
    def tile_rows(self) -> int:
        """Queries of a tile of attention rows."""
        return min(max(TILE_ELEMENTS // max(self.scores, 1), SHORTEST_TILE), self.columns)


class Working(NamedTuple):
    """The most bytes that a statistic holds while tokens are chosen, besides what is there without it.

    Attributes:
        held: While the prompt comes, and until it is reduced.
        reduced: While it is reduced, with what it has held.
        chosen: While tokens are ranked by it.
    """

    held: int = 0
    reduced: int = 0
    chosen: int = 0


class Statistic(Protocol[Result]):
    """A statistic of a prompt, or of the tokens of decode steps; a frozen dataclass.

    A part hands over the ones that it needs, in `statistics`, and finds their results by their classes. A class that
    inherits from it gathers nothing, and needs `reduced`; one that gathers something overrides the rest.

    Examples:
        >>> from kvpolicy.statistics import AttentionSum, RecentQueries, union
        >>> union((RecentQueries(8), AttentionSum()), (RecentQueries(32),))
        (RecentQueries(width=32, window=None), AttentionSum(total=None))
    """

    reads_past: ClassVar[bool] = False
    """Whether `reduced` needs the slots before the prompt."""

    reads_vectors: ClassVar[bool] = False
    """Whether `reduced` joins the keys and values of all candidates."""

    along: ClassVar[Literal["none", "heads", "vectors"]] = "none"
    """Which of the result's dimensions is that of the candidates: none, the last one, or the last but one."""

    undoes_rotation: ClassVar[bool] = False
    """Whether it must be known how keys are rotated, as `Context.rotation`."""

    of_readers: ClassVar[bool] = False
    """Whether it is of what queries attend to, so that those of layers that read the same keys count too."""

    words: ClassVar[str] = ""
    """A noun phrase for what a selector looks at; empty for nothing to say."""

    of_newest: ClassVar[bool] = False
    """Whether it is of the newest queries, which are those of a question."""

    of_attention: ClassVar[bool] = False
    """Whether it says how much each query head attends to every candidate."""

    @property
    def tensors(self) -> Iterable[Tensor]:
        """Its tensors, to count their bytes."""
        return ()

    def described(self) -> str:
        """A noun phrase for what a selector looks at, for `kvpolicy explain`; empty for nothing to say."""
        return self.words

    def serving(self: Self, other: Any) -> Self:
        """One statistic that serves two parts; by default this one."""
        return self

    def begun(self: Self, coming: Coming) -> Self:
        """The statistic before the first tile of a prompt."""
        return self

    def added(self: Self, tile: Tile) -> Self:
        """The statistic with the next tile."""
        return self

    def joined(self: Self, later: Any, columns: int) -> Self:
        """This statistic and that of the next chunk of the prompt, which begins after `columns` columns."""
        return later

    def beside(self: Self, other: Any, heads: int) -> Self:
        """This statistic with the query heads of another layer that reads the same keys, of `heads` KV heads.

        Those of each KV head stand together, those of the other layer last. Queries themselves are not joined, as a
        selector may hold some of each query head of its layer; what they attend to is.
        """
        return self

    def map_rows(self: Self, fn: Callable[[Tensor], Tensor]) -> Self:
        """The same with `fn` of every per-row tensor, which selects or repeats rows."""
        return self

    def reduced(self, context: Context) -> Result:
        """The result over slots and new tokens; 0 where a token is not valid."""
        ...

    def reordered(self, result: Result, order: Tensor) -> Result:
        """The result with the candidates in another order, [B, H, N]; by default by `along`."""
        moved: Any = result
        if isinstance(result, Tensor) and self.along != "none":
            moved = by_vector(result, order) if self.along == "vectors" else by_head(result, order)
        return moved

    def working(self, sizes: Sizes) -> Working:
        """The most bytes that it needs; by default none that count."""
        return Working()


class KeptStatistic(Statistic[None], Protocol):
    """A statistic of prompts that a codec needs whenever it encodes: each row keeps one tensor of it.

    A codec hands it over in `statistics`, and its stages find the tensor by its class in `StageStore.statistics`.
    """

    file_name: ClassVar[str] = ""
    """The name of the tensor in saved caches; empty for a number."""

    def empty(self, batch: int, heads: int, head_dim: int, device: torch.device | str) -> Tensor:
        """The tensor before a prompt, [B, ...]; by default [B, H, D] fp32 of zeros."""
        return torch.zeros(batch, heads, head_dim, device=device, dtype=torch.float32)

    def kept(self, held: Tensor, ranks: Ranks) -> Tensor:
        """The tensor after a prompt, or another chunk of it.

        Args:
            held: The tensor before it. A row without a token in this prompt keeps what it has.
            ranks: The ranks that hold the layer's other heads.
        """
        ...

    def reduced(self, context: Context) -> None:
        """Nothing that a selector sees."""


class Results:
    """The results of statistics, by their classes.

    Examples:
        >>> from kvpolicy.statistics import AttentionSum, Results
        >>> Results({AttentionSum: torch.ones(1, 1, 2, device="cpu")})[AttentionSum]
        tensor([[[1., 1.]]])
    """

    def __init__(self, found: Mapping[type[Statistic[Any]], Any] | None = None) -> None:
        """Take results by the classes of their statistics."""
        self._found = dict(found or {})

    def __getitem__(self, kind: type[Statistic[Result]]) -> Result:
        """The result of a statistic.

        Raises:
            KVPolicyError: If the part did not hand it over.
        """
        if kind not in self._found:
            raise KVPolicyError(
                f"A part must hand over {kind.__name__} in statistics to be shown its result, got a part without it; "
                f"try ({kind.__name__}(),), or seen.get."
            )
        return self._found[kind]

    def get(self, kind: type[Statistic[Result]]) -> Result | None:
        """The result of a statistic; None if there is none."""
        return self._found.get(kind)

    def __contains__(self, kind: type[Statistic[Any]]) -> bool:
        """Whether there is a result of a statistic."""
        return kind in self._found


def union(*groups: Iterable[Statistic[Any]]) -> tuple[Statistic[Any], ...]:
    """The statistics that serve several parts: one of each class."""
    found: dict[type, Any] = {}
    for each in (one for group in groups for one in group):
        kind = type(each)
        found[kind] = found[kind].serving(each) if kind in found else each
    return tuple(found.values())


def first_of(kind: type[Self], statistics: Iterable[object]) -> Self | None:
    """The statistic of a class among some; None if there is none."""
    return next((each for each in statistics if isinstance(each, kind)), None)


def by_head(numbers: Tensor, order: Tensor) -> Tensor:
    """Numbers [B, Hq, N] or [B, Hq, W, N] of candidates in another order, [B, H, N]; Hq may be H."""
    wide = order.repeat_interleave(numbers.shape[1] // order.shape[1], 1)
    if numbers.dim() == 4:
        wide = wide[:, :, None].expand(-1, -1, numbers.shape[2], -1)
    return numbers.gather(-1, wide)


def by_vector(vectors: Tensor, order: Tensor) -> Tensor:
    """Vectors [B, H, N, D] of candidates in another order, [B, H, N]."""
    return vectors.gather(2, order[..., None].expand(-1, -1, -1, vectors.shape[-1]))
