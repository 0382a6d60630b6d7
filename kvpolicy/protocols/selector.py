"""The interface of a selector: which tokens are kept, and what of attention it must see to decide."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from kvpolicy.protocols.codec import ModelInfo
from kvpolicy.protocols.shapes import SMALLEST_HEAD, HeadShape
from kvpolicy.statistics.generated_attention import GeneratedAttention
from kvpolicy.statistics.ranks import SINGLE_RANK, Ranks
from kvpolicy.statistics.statistic import Results, Statistic, first_of
from kvpolicy.statistics.vectors import Vectors

State = Any
"""A NamedTuple of per-slot tensors, each [B, H, S], unless `scoped` says otherwise; () for a stateless selector."""

Scope = Literal["head", "row"]
"""Whether a tensor of a state has one entry per KV head, [B, H, ...], or per row, [B, ...], instead of per slot."""

_StateType = TypeVar("_StateType", bound=type)


def scoped(**scopes: Scope) -> Callable[[_StateType], _StateType]:
    """Declare which fields of a state, a NamedTuple, are not per slot.

    Slots are gathered, grown and overwritten; tensors per head and per row stay, and only follow the rows of the batch.

    Args:
        **scopes: `head` or `row` for each such field.

    Examples:
        >>> @scoped(anchor="head")
        ... class Differences(NamedTuple):
        ...     score: Tensor
        ...     anchor: Tensor
        >>> Differences.scopes
        {'anchor': 'head'}
    """

    def declare(kind: _StateType) -> _StateType:
        setattr(kind, "scopes", scopes)  # noqa: B010  # a NamedTuple declares fields only
        return kind

    return declare


DecodeMode = Literal["evict", "grow"]
"""Whether generated tokens compete for the budget (`evict`) or are kept in addition to it (`grow`)."""


class NewToken(NamedTuple):
    """The newest token of a decode step, as attention takes it.

    Attributes:
        key: [B, H, 1, D].
        value: [B, H, 1, D].
        query: Its queries as attention takes them, [B, H, G, D].
        plain_query: Its queries without their rotation, [B, H, G, D] fp32; None unless `Moments` are asked for.
        scores: Its scores by the input of the layer, [B, H or 1, 1] fp32, or [B, pages, 1] where states lie in pages of
            single heads; None unless `InputScores` are asked for.
    """

    key: Tensor
    value: Tensor
    query: Tensor | None = None
    plain_query: Tensor | None = None
    scores: Tensor | None = None


@dataclass(eq=False)
class StepMemo:
    """What the layers of one decode step compute alike: the first that asks makes it, and the others get the same.

    Tensors are known by their identity, so layers that are to share a result are given the same tensors.

    Attributes:
        made: What was made, with its arguments; None to make everything anew.

    Examples:
        >>> memo = StepMemo({})
        >>> numbers = torch.ones(2)
        >>> memo.once(torch.add, numbers, 1) is memo.once(torch.add, numbers, 1)
        True
    """

    made: dict[Hashable, tuple[tuple[Any, ...], Tensor]] | None = None

    def once(self, make: Callable[..., Tensor], *args: Any, **options: Any) -> Tensor:
        """The result of a call, which depends on nothing but its arguments, and which nobody changes."""
        if self.made is None:
            return make(*args, **options)
        key = (make, *((id(arg),) if isinstance(arg, Tensor) else arg for arg in args), *options.items())
        found = self.made.get(key)
        if found is None:  # the arguments are held, so that no other tensor gets their identity
            found = self.made[key] = (args, make(*args, **options))
        return found[1]


ALONE = StepMemo()
"""That of a layer alone, and of a compiled step, which is one graph for all steps."""


class View(NamedTuple):
    """The candidate tokens as a selector sees them.

    Attributes:
        positions: [B, H, N] int32, the original position of each token, -1 for none. Ascending in a prefill (invalid
            tokens first); in any order in decode.
        length: [B] int64, how many tokens each row has seen: the newest token's position + 1.
        budget: [B] int64, how many tokens of each row the layer may hold.
        layer_idx: Index of the layer.
        ranks: The ranks that hold the model's other heads. Whatever looks at all heads, or at all query heads of a
            KV head, asks it.
        alike: Whether all heads of all ranks have the same candidates, as in a first prompt.
        added: [B] int64, how many tokens a prompt or chunk adds to each row, in `Selector.observe`.
        token: The newest token, in `Selector.step`, if the selector asks for `Vectors(generated=True)`.
        memo: What the layers of the step compute alike.
        arriving: Whether the newest token of each row is counted in its length, but is no candidate: a decode step
            makes room for it.
    """

    positions: Tensor
    length: Tensor
    budget: Tensor
    layer_idx: int
    ranks: Ranks = SINGLE_RANK
    alike: bool = False
    added: Tensor | None = None
    token: NewToken | None = None
    memo: StepMemo = ALONE
    arriving: bool = False

    @property
    def valid(self) -> Tensor:
        """Whether there is a token, [B, H, N] bool."""
        return self.positions >= 0

    def newest(self, window: Tensor | int) -> Tensor:
        """Whether a token is among its row's `window` ([B] or int) newest positions, [B, H, N] bool."""
        first = self.memo.once(torch.sub, self.length, window)
        first = self.memo.once(torch.clamp_min, first, 0)  # an empty slot, at -1, is never among them
        return self.positions >= first[:, None, None]

    def keep_newest(self, priority: Tensor) -> Tensor:
        """`priority` [B, H, N], replaced by inf for the newest token of each row."""
        return priority if self.arriving else priority.masked_fill(self.newest(1), torch.inf)


@runtime_checkable
class ComparesHeads(Protocol):
    """An optional ability of a selector: it may say that the priorities of different heads can be compared.

    Those of attention can, since it has equal mass in each head.
    """

    @property
    def compares_heads(self) -> bool:
        """Whether priorities of different heads can be compared."""
        ...


@runtime_checkable
class Reranks(Protocol):
    """An optional ability of a selector: it ranks all slots again now and then."""

    @property
    def rerank_every(self) -> int:
        """After how many generated tokens; after half the budget if that is less. 0 for never."""
        ...

    def rerank(self, state: State, seen: Results, view: View) -> State:
        """The state after all slots were ranked; `seen` has their `Vectors` and the `Rotation`."""
        ...


@runtime_checkable
class RanksWholeHeads(Protocol):
    """An optional ability of a selector: it may rank a token by all that its head holds, such as by a share of it.

    It is then asked with all tokens of a head at once, and refused where only a part of them is ranked: by a head
    allocator, which has pages, and by a codec that demotes by priority.
    """

    @property
    def whole_heads(self) -> bool:
        """Whether the priority of a token depends on the others of its head."""
        ...


@runtime_checkable
class KeepsNested(Protocol):
    """An optional ability of a selector: of a first prompt, a small budget keeps tokens that a larger one keeps too.

    `observe` then gives a token the same state under both budgets, and `priority` looks at each token by itself, so
    that the tokens of the larger budget can be ranked again for the smaller one. An allocator that measures layers lets
    them drop tokens while the prompt runs, before it knows their budgets.
    """

    @property
    def nested_from(self) -> int | None:
        """The smallest budget, in tokens, from which on this holds; None if it never does."""
        ...


@runtime_checkable
class RanksPositions(Protocol):
    """An optional ability of a selector: it may look at positions alone.

    Given the same budget, every layer and head of a row then keeps the same tokens, as codecs that group layers need.
    """

    @property
    def positions_only(self) -> bool:
        """Whether the priority of a token depends on its position, and the length and budget of its row, alone."""
        ...


@runtime_checkable
class HoldsAttention(Protocol):
    """An optional ability of a selector: its state says how much attention each token has received."""

    def attention(self, state: State) -> Tensor:
        """Attention of each token, [B, H, N] fp32, at least 0; 0 for a token that none was measured of."""
        ...


@runtime_checkable
class ChecksModel(Protocol):
    """An optional ability of a selector or an allocator: it may refuse a model, such as one its file was not made for.

    It is asked before a policy is attached or planned, and by a part that wraps it.
    """

    def check(self, model: ModelInfo) -> None:
        """Raise KVPolicyError if the part cannot be used with a model."""
        ...


def compares_heads(selector: object) -> bool:
    """Whether the priorities of different heads can be compared; without `ComparesHeads` they cannot."""
    return isinstance(selector, ComparesHeads) and bool(selector.compares_heads)


def whole_heads(selector: object) -> bool:
    """Whether the priority of a token depends on the others of its head; without `RanksWholeHeads` it does not."""
    return isinstance(selector, RanksWholeHeads) and bool(selector.whole_heads)


def nested_from(selector: object) -> int | None:
    """The budget from which on what is kept is nested; None without `KeepsNested`."""
    return selector.nested_from if isinstance(selector, KeepsNested) else None


def rerank_every(selector: object) -> int:
    """After how many generated tokens all slots are ranked again; 0 without `Reranks`."""
    return selector.rerank_every if isinstance(selector, Reranks) else 0


def joint_decode(selector: Selector) -> bool:
    """Whether a decode step ranks a slot by the attention of all heads of the layer."""
    attention = first_of(GeneratedAttention, selector.statistics)
    return attention is not None and attention.of_all_heads


def positions_only(selector: object) -> bool:
    """Whether all layers and heads keep the same tokens, by position; without `RanksPositions` they may not."""
    return isinstance(selector, RanksPositions) and bool(selector.positions_only)


def same_in_heads(selector: Selector) -> bool:
    """Whether all heads of a layer keep the same tokens: by position, or since they decide together."""
    return positions_only(selector) or joint_decode(selector)


@runtime_checkable
class Selector(Protocol):
    """Which tokens are kept?

    One ranking decides both phases: a prefill keeps the `budget` tokens of highest priority, a decode step evicts the
    token of lowest priority. Ties go to the earlier position.

    A class that inherits from it needs one method, `priority`; the other members have defaults for a selector without
    state and without statistics. An object that has all members is accepted whatever its class. Optional abilities are
    `ComparesHeads`, `Reranks`, `RanksWholeHeads`, `RanksPositions`, `KeepsNested`, `HoldsAttention`
    and `ChecksModel`.

    Attributes:
        decode: Whether generated tokens compete for the budget (`evict`) or are kept in addition to it (`grow`).
    """

    __slots__ = ()

    decode: DecodeMode = "evict"

    @property
    def statistics(self) -> tuple[Statistic[Any], ...]:
        """The statistics of prompts and of generated tokens that this selector needs; by default none."""
        return ()

    @property
    def min_tokens(self) -> int:
        """The smallest budget, in tokens, that this selector can work with; by default the current token."""
        return 1

    def alloc(
        self, batch: int, heads: int, slots: int, device: torch.device | str, head: HeadShape = SMALLEST_HEAD
    ) -> State:
        """A state of zeros for `slots` slots of heads of a shape; by default there is none."""
        return ()

    def observe(self, state: State, seen: Results, view: View) -> State:
        """The state after a prefill or chunk, aligned with `view`; `state` is zero for the new tokens.

        `seen` has the results of `statistics`, by their classes: `seen[RecentQueries]`.
        """
        return state

    def step(self, state: State, row: Tensor, view: View) -> None:
        """Update the state in place after a decoded token, if `statistics` ask for something of these.

        `row` is its attention, [B, H, G, S] fp32; without elements unless `GeneratedAttention` is asked for. Its
        vectors and scores are `view.token`.
        """

    def priority(self, state: State, view: View) -> Tensor:
        """The priority of each token, [B, H, N] fp32: inf is always kept, -inf never; invalid tokens are ignored."""
        ...

    def statistic(self, seen: Results, view: View) -> Tensor | None:
        """Each query head's own score of each token, [B, Hq, N] fp32, for wrapping selectors; None if there is none."""
        return None


class Scores(NamedTuple):
    """One score per slot, [B, H, S] fp32."""

    score: Tensor


class Scored(Selector, Protocol):
    """A selector with one score per slot: the newest token is kept until the next one comes, others by their score."""

    __slots__ = ()

    def alloc(
        self, batch: int, heads: int, slots: int, device: torch.device | str, head: HeadShape = SMALLEST_HEAD
    ) -> State:
        """Scores of zero."""
        return Scores(torch.zeros(batch, heads, slots, dtype=torch.float32, device=device))

    def priority(self, state: State, view: View) -> Tensor:
        """The newest token is always kept, other tokens by their score: [B, H, N]."""
        return view.keep_newest(state.score)


class ScoredByKeys(Scored, Protocol):
    """A selector that scores every token by its own key and value, and by nothing else: one method, `score`.

    Examples:
        >>> class KeyNorm(ScoredByKeys):
        ...     def score(self, keys, values):
        ...         return -keys.norm(dim=-1)
        >>> KeyNorm().statistics
        (Vectors(generated=True),)
    """

    __slots__ = ()

    def score(self, keys: Tensor, values: Tensor) -> Tensor:
        """The score of each token, [B, H, N], from keys and values [B, H, N, D]; the highest are kept."""
        ...

    @property
    def statistics(self) -> tuple[Statistic[Any], ...]:
        """The keys and values of a prompt and of each generated token."""
        return (Vectors(generated=True),)

    def observe(self, state: State, seen: Results, view: View) -> State:
        """Score every candidate."""
        tokens = seen[Vectors]
        return Scores(self.score(tokens.keys.float(), tokens.values.float()))

    def step(self, state: State, row: Tensor, view: View) -> None:
        """Score a generated token."""
        assert view.token is not None
        score = self.score(view.token.key.float(), view.token.value.float())
        state.score.copy_(torch.where(view.newest(1), score, state.score))
