"""Selectors made of scorers that were written for other libraries."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from kvpolicy.engine.attention import ScoreTransform
from kvpolicy.protocols import DecodeMode, Forward, Needs, Seen, State, View
from kvpolicy.selectors._common import Scores, check_decode, empty_scores, keep_always
from kvpolicy.spec.errors import KVPolicyError, KVPolicyStateError, KVPolicyTypeError
from kvpolicy.spec.validation import check_fields, check_instance


@runtime_checkable
class Scorer(Protocol):
    """What a scorer for kvpress answers; its `ScorerPress` and all that extend it do."""

    def score(
        self,
        module: nn.Module,
        hidden_states: Tensor,
        keys: Tensor,
        values: Tensor,
        attentions: Tensor | None,
        kwargs: dict[str, Any],
    ) -> Tensor:
        """What each token is worth, [B, H, N], from keys and values [B, H, N, D]; the highest are kept."""
        ...


@dataclass(frozen=True, eq=False, repr=False, slots=True)
class KVPressScorer:
    """Keep the tokens that a scorer written for kvpress rates highest.

    kvpress calls `score(module, hidden_states, keys, values, attentions, kwargs)` after a prompt's attention; so does
    this, in our engine: with padding, chunks, layer budgets, codecs and exact bytes. kvpress itself is not needed.

    Args:
        press: An object with that method, such as `kvpress.KnormPress()`. Its `compression_ratio`, where it has one, is
            set for the time of each call to what the layer's budget leaves, since some scores depend on it.
        decode: `grow`: generated tokens get room of their own, as in kvpress; `evict`: they take the place of the
            prompt's lowest scores, until they fill the window.
        window: In `evict`, how many of the newest generated tokens stay; never more than half the budget.
        attentions: Whether to compute the whole attention matrix [B, Hq, P, N] for the scorer, which
            `ObservedAttentionPress` needs; others get None and compute what they need.

    Raises:
        KVPolicyTypeError: Where `press` is a class, or has no method `score`.
        KVPolicyError: If `window` is below 1 or `decode` unknown.

    Examples:
        >>> class LargestValue:
        ...     def score(self, module, hidden_states, keys, values, attentions, kwargs):
        ...         return values.norm(dim=-1)
        >>> from kvpolicy import Policy
        >>> policy = Policy(selector=KVPressScorer(LargestValue()), budget=0.3)
        >>> policy.selector.press.score.__name__, policy.decode
        ('score', 'grow')

    Source:
        kvpress 0.5.5 (github.com/NVIDIA/kvpress), ScorerPress. Differences: ties go to the earlier token, where kvpress
        leaves them open; a row with padding is scored alone and without it, where kvpress scores padding too; a later
        chunk or turn is scored with all keys on offer, where kvpress leaves it uncompressed; a row that keeps
        everything is not scored in `grow`; a share of 0.1 of 100 tokens is 10, where kvpress' ratio of 0.9 leaves 9;
        `kwargs` hold no cache and no mask. What a press does beside scoring (a `compress` of its own, as PyramidKV's
        layer budgets) is not done.

    Words cannot say which object is meant: `str()` of such a policy is its `repr`, and `Policy.parse` does not read
    it. Two are equal if they hold the same object and options.
    """

    press: Scorer
    _: KW_ONLY
    decode: DecodeMode = "grow"
    window: int = 32
    attentions: bool = False

    def __post_init__(self) -> None:
        """Check the scorer and the options."""
        check_fields(self)
        check_instance("scorer", self.press)
        if not callable(getattr(self.press, "score", None)):
            raise KVPolicyTypeError(
                f"{type(self.press).__name__} has no method score(module, hidden_states, keys, values, attentions, "
                "kwargs): give a scorer, such as kvpress.SnapKVPress()."
            )
        check_decode(self.decode)
        if self.window < 1:
            raise KVPolicyError(f"window={self.window} would drop the current token: use 1 or more.")

    def __eq__(self, other: object) -> bool:
        """Whether the other holds the same object, and the same options."""
        return isinstance(other, KVPressScorer) and self._identity == other._identity

    def __hash__(self) -> int:
        """By the identity of the scorer, which may change its own fields."""
        return hash(self._identity)

    def __repr__(self) -> str:
        """The scorer's own words, or its class where these are long."""
        own = repr(self.press)
        own = own if len(own) <= 120 and "\n" not in own else f"<{type(self.press).__qualname__}>"
        return f"KVPressScorer({own}, decode={self.decode!r}, window={self.window}, attentions={self.attentions})"

    @property
    def _identity(self) -> tuple[int, str, int, bool]:
        return id(self.press), self.decode, self.window, self.attentions

    @property
    def needs(self) -> Needs:
        """What the attention module was called with."""
        return Needs(forward=True)

    @property
    def min_tokens(self) -> int:
        """One token, the current one."""
        return 1

    def alloc(self, batch: int, heads: int, slots: int, device: torch.device | str) -> State:
        """Ranks of zero: not scored."""
        return empty_scores(batch, heads, slots, device)

    def observe(self, state: Scores, seen: Seen, view: View) -> State:
        """Let the scorer rate every token on offer; kept is its rank, from 1, which is exact in any dtype."""
        if view.ranks.size > 1:
            raise KVPolicyError(
                f"{self._name} cannot be asked on {view.ranks.size} ranks, since it may look at all heads and each "
                "rank holds some: use a selector of kvpolicy, or one rank."
            )
        rank = torch.zeros_like(state.score)
        for rows, count, keep in self._calls(seen, view):
            score = self._ask(seen, view, rows, count, keep)
            order = score.argsort(dim=-1, descending=True, stable=True)
            high = torch.arange(count, 0, -1, dtype=rank.dtype, device=rank.device).expand_as(score)
            rank[rows, :, -count:] = torch.zeros_like(rank[rows, :, -count:]).scatter_(-1, order, high)
        return Scores(rank)

    def step(self, state: Scores, row: Tensor, view: View) -> None:
        """Generated tokens stay unscored."""

    def priority(self, state: Scores, view: View) -> Tensor:
        """The scorer's order; of generated tokens, the window always and the others last: [B, H, N]."""
        window = (view.budget // 2).clamp(1, self.window)
        return keep_always(state.score, view.newest(window) & (state.score == 0))

    def statistic(self, seen: Seen, view: View) -> Tensor | None:
        """None: the scores are a KV head's, not each query head's."""
        return None

    @property
    def _name(self) -> str:
        return type(self.press).__name__

    def _calls(self, seen: Seen, view: View) -> Iterator[tuple[slice, int, int]]:
        """Rows that are scored together, how many tokens each of their heads is offered, and how many it may keep."""
        assert seen.forward is not None
        counts, keep = view.valid.sum(-1).tolist(), view.budget.tolist()
        alike = seen.forward.valid is None and len({*map(tuple, counts), tuple(counts[0])}) == 1 and len({*keep}) == 1
        each = [slice(0, len(keep))] if alike else [slice(row, row + 1) for row in range(len(keep))]
        for rows in each:
            own, kept = counts[rows.start], keep[rows.start]
            if len(set(own)) > 1:
                raise KVPolicyError(
                    f"{self._name} cannot score heads that hold different numbers of tokens: give the prompt in one "
                    "piece, or leave out what chooses whole pages."
                )
            idle = seen.forward.valid is not None and not bool(seen.forward.valid[rows].any())
            if own and own[0] and not idle and (self.decode == "evict" or kept < own[0]):
                yield rows, own[0], kept

    def _ask(self, seen: Seen, view: View, rows: slice, count: int, keep: int) -> Tensor:
        assert seen.forward is not None and seen.keys is not None and seen.values is not None
        call = _of_rows(seen.forward, rows)
        keys, values = seen.keys[rows, :, -count:], seen.values[rows, :, -count:]  # what is not valid comes first
        try:
            with torch.no_grad(), _lent(call.module, call.rotary), _budgeted(self.press, keep, count):
                matrix = _matrix(call, keys) if self.attentions else None
                score: Any = self.press.score(call.module, call.hidden_states, keys, values, matrix, call.kwargs)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise KVPolicyStateError(
                f"{self._name} could not score the {count} tokens of layer {view.layer_idx}: {reason}"
            ) from error
        return self._checked(score, keys)

    def _checked(self, score: Any, keys: Tensor) -> Tensor:
        wanted = tuple(keys.shape[:3])
        got = tuple(score.shape) if isinstance(score, Tensor) else type(score).__name__
        if got != wanted:
            raise KVPolicyError(f"{self._name}.score gave {got}, and a score of each token was expected: {wanted}.")
        if bool(score.isnan().any()):
            raise KVPolicyError(f"{self._name}.score gave NaN, which has no rank: look at the scorer and at its keys.")
        return score


def _of_rows(call: Forward, rows: slice) -> Forward:
    """The call as these rows alone would have made it; a row with padding comes alone."""
    columns: Any = slice(None) if call.valid is None else call.valid[rows.start].nonzero().flatten()
    batch = call.hidden_states.shape[0]

    def pick(t: Tensor, dim: int) -> Tensor:
        t = t[rows] if t.shape[0] == batch else t
        return t if call.valid is None else t.index_select(dim, columns)

    kwargs = dict(call.kwargs)
    if isinstance(kwargs.get("position_embeddings"), tuple):
        kwargs["position_embeddings"] = tuple(pick(t, 1) for t in kwargs["position_embeddings"])
    if isinstance(kwargs.get("position_ids"), Tensor):
        kwargs["position_ids"] = pick(kwargs["position_ids"], 1)
    assert call.queries is not None
    queries, hidden = pick(call.queries, 2), pick(call.hidden_states, 1)
    return call._replace(hidden_states=hidden, queries=queries, kwargs=kwargs)


def _matrix(call: Forward, keys: Tensor) -> Tensor:
    """The attention of every query, [B, Hq, P, N], in the model's dtype."""
    assert call.queries is not None
    transform = ScoreTransform(call.scale, call.softcap, call.sinks)
    score = transform.scores(call.queries.unflatten(1, (keys.shape[1], -1)), keys[:, :, None])
    new, count = score.shape[3:]
    ahead = torch.ones(new, count, dtype=torch.bool, device=score.device).triu(count - new + 1)
    return transform.weights(score.masked_fill_(ahead, -torch.inf)).flatten(1, 2).to(keys.dtype)


@contextmanager
def _lent(module: nn.Module, rotary: nn.Module | None) -> Generator[None]:
    """Let a module have `rotary_emb`, as kvpress gives it, without becoming part of its tree."""
    if rotary is None or hasattr(module, "rotary_emb"):
        yield
        return
    module.__dict__["rotary_emb"] = rotary
    try:
        yield
    finally:
        module.__dict__.pop("rotary_emb", None)


@contextmanager
def _budgeted(press: Any, keep: int, count: int) -> Generator[None]:
    """Let a press have the `compression_ratio` that keeps `keep` of `count` tokens."""
    before = getattr(press, "compression_ratio", None)
    if not isinstance(before, float | int):
        yield
        return
    press.compression_ratio = max(0.0, 1 - (keep + 0.5) / count) if keep < count else 0.0  # int() of the rest is keep
    try:
        yield
    finally:
        press.compression_ratio = before
