"""Selectors that wrap the scorers of other libraries."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from kvpolicy.protocols import DecodeMode, Scored, Scores, State, View
from kvpolicy.selectors.common import keep_always
from kvpolicy.statistics import Forward, ModuleCall, Results, Statistic, Vectors
from kvpolicy.statistics.windows import ScoreTransform
from kvpolicy.text.errors import KVPolicyError, KVPolicyStateError, KVPolicyTypeError
from kvpolicy.text.validation import check_fields, check_instance


@runtime_checkable
class Scorer(Protocol):
    """The interface of a kvpress scorer: `ScorerPress` and its subclasses."""

    def score(
        self,
        module: nn.Module,
        hidden_states: Tensor,
        keys: Tensor,
        values: Tensor,
        attentions: Tensor | None,
        kwargs: dict[str, Any],
    ) -> Tensor:
        """The score of each token, [B, H, N], from keys and values [B, H, N, D]; the highest are kept."""
        ...


@dataclass(frozen=True, eq=False, repr=False, slots=True)
class KVPressScorer(Scored):
    """Keep the tokens to which a kvpress scorer gives the highest scores.

    Like kvpress, this calls `score(module, hidden_states, keys, values, attentions, kwargs)` after the attention of a
    prompt, and it supports padding, chunks, layer budgets, codecs and exact byte counts. kvpress is not a dependency.

    Args:
        press: An object with that method, such as `kvpress.KnormPress()`. If it has a `compression_ratio`, this is set
            to the one of the layer's budget during each call, since some scores depend on it.
        decode: `grow`: generated tokens are kept in addition to the budget, as in kvpress; `evict`: they replace the
            tokens of lowest score, until they fill the window.
        window: In `evict`, how many of the newest generated tokens stay; at most half the budget.
        attentions: Whether to compute the full attention matrix [B, Hq, P, N] for the scorer, as
            `ObservedAttentionPress` requires; other scorers get None.

    Raises:
        KVPolicyTypeError: If `press` is a class, or has no method `score`.
        KVPolicyError: If `window` is below 1, or `decode` is unknown.

    Examples:
        >>> class LargestValue:
        ...     def score(self, module, hidden_states, keys, values, attentions, kwargs):
        ...         return values.norm(dim=-1)
        >>> from kvpolicy import Policy
        >>> policy = Policy(selector=KVPressScorer(LargestValue()), budget=0.3)
        >>> policy.selector.press.score.__name__, policy.decode
        ('score', 'grow')

    Source:
        kvpress 0.5.5 (github.com/NVIDIA/kvpress), ScorerPress. Differences: ties go to the earlier token, whereas
        kvpress does not define their order; a row with padding is scored alone and without it, whereas kvpress scores
        padding too; a later chunk or turn is scored together with all kept keys, whereas kvpress leaves it
        uncompressed; a row that keeps everything is not scored in `grow`; a fraction of 0.1 of 100 tokens is 10,
        whereas a ratio of 0.9 in kvpress leaves 9; `kwargs` contain no cache and no mask. Other methods of a press,
        such as a `compress` with the layer budgets of PyramidKV, are not called.

    A spec cannot express an object: `str()` of such a policy is its `repr`, and `Policy.parse` does not read it. Two
    selectors are equal if they hold the same object and options.
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
                "The scorer must have a method score(module, hidden_states, keys, values, attentions, kwargs), got a "
                f"{type(self.press).__name__}; try kvpress.SnapKVPress()."
            )
        if self.window < 1:
            raise KVPolicyError(f"window must be at least 1, to keep the current token, got {self.window}.")

    def __eq__(self, other: object) -> bool:
        """Whether the other has the same scorer object and options."""
        return isinstance(other, KVPressScorer) and self._identity == other._identity

    def __hash__(self) -> int:
        """Hash by the identity of the scorer, since its fields may change."""
        return hash(self._identity)

    def __repr__(self) -> str:
        """The repr of the scorer, or its class if that is long."""
        press = repr(self.press)
        if len(press) > 120 or "\n" in press:
            press = f"<{type(self.press).__qualname__}>"
        return f"KVPressScorer({press}, decode={self.decode!r}, window={self.window}, attentions={self.attentions})"

    @property
    def _identity(self) -> tuple[int, str, int, bool]:
        return id(self.press), self.decode, self.window, self.attentions

    @property
    def statistics(self) -> tuple[Statistic[Any], ...]:
        """The arguments of the attention module, and keys and values."""
        return (ModuleCall(), Vectors())

    def observe(self, state: Scores, seen: Results, view: View) -> State:
        """Score all candidates; the state is the rank of each, from 1, which is exact in any dtype."""
        if view.ranks.size > 1:
            raise KVPolicyError(
                f"{self._name} must run on one rank, since it may depend on all heads, got {view.ranks.size}; try a "
                "selector of kvpolicy."
            )
        # Scores of different calls are not comparable, and fp16 scores may have ties; ranks within a call are exact.
        rank = torch.zeros_like(state.score)
        for rows, count, keep in self._calls(seen, view):
            score = self._ask(seen, view, rows, count, keep)
            order = score.argsort(dim=-1, descending=True, stable=True)
            high = torch.arange(count, 0, -1, dtype=rank.dtype, device=rank.device).expand_as(score)
            rank[rows, :, -count:] = torch.zeros_like(rank[rows, :, -count:]).scatter_(-1, order, high)
        return Scores(rank)

    def priority(self, state: Scores, view: View) -> Tensor:
        """The rank of each token, [B, H, N]; the window of generated tokens is always kept, older ones come last."""
        window = (view.budget // 2).clamp(1, self.window)
        return keep_always(state.score, view.newest(window) & (state.score == 0))

    @property
    def _name(self) -> str:
        return type(self.press).__name__

    def _calls(self, seen: Results, view: View) -> Iterator[tuple[slice, int, int]]:
        """Rows that are scored together, the number of candidates of each of their heads, and how many may be kept."""
        valid = seen[ModuleCall].valid
        counts = view.valid.sum(-1).tolist()
        budgets = view.budget.tolist()
        # Rows without padding and with equal budgets are scored in one call, as kvpress does.
        uniform = valid is None and len(set(map(tuple, counts))) == 1 and len(set(budgets)) == 1
        groups = [slice(0, len(budgets))] if uniform else [slice(row, row + 1) for row in range(len(budgets))]
        for rows in groups:
            of_heads = counts[rows.start]
            budget = budgets[rows.start]
            if len(set(of_heads)) > 1:
                raise KVPolicyError(
                    f"All heads must hold the same number of tokens to be scored by {self._name}, got {min(of_heads)} "
                    f"to {max(of_heads)}; try the prompt in one piece, or a selector that does not choose whole pages."
                )
            only_padding = valid is not None and not bool(valid[rows].any())
            if not of_heads or not of_heads[0] or only_padding:
                continue
            if self.decode == "evict" or budget < of_heads[0]:
                yield rows, of_heads[0], budget

    def _ask(self, seen: Results, view: View, rows: slice, count: int, keep: int) -> Tensor:
        call = _of_rows(seen[ModuleCall], rows)
        tokens = seen[Vectors]
        keys = tokens.keys[rows, :, -count:]  # invalid candidates come first
        values = tokens.values[rows, :, -count:]
        try:
            with torch.no_grad(), _with_rotary(call.module, call.rotary), _with_budget(self.press, keep, count):
                matrix = _matrix(call, keys) if self.attentions else None
                score: Any = self.press.score(call.module, call.hidden_states, keys, values, matrix, call.kwargs)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise KVPolicyStateError(
                f"{self._name}.score must score the {count} tokens of layer {view.layer_idx}, got an error: {reason}"
            ) from error
        return self._checked(score, keys)

    def _checked(self, score: Any, keys: Tensor) -> Tensor:
        wanted = tuple(keys.shape[:3])
        got = tuple(score.shape) if isinstance(score, Tensor) else type(score).__name__
        if got != wanted:
            raise KVPolicyError(f"{self._name}.score must return a score per token, {wanted}, got {got}.")
        if bool(score.isnan().any()):
            raise KVPolicyError(f"{self._name}.score must return numbers, got NaN; check the scorer and its keys.")
        return score


def _of_rows(call: Forward, rows: slice) -> Forward:
    """The arguments of the attention module for some rows; a row with padding comes alone, without it."""
    columns: Any = slice(None) if call.valid is None else call.valid[rows.start].nonzero().flatten()
    batch = call.hidden_states.shape[0]

    def pick(t: Tensor, dim: int) -> Tensor:
        # Positions and rotary tables may have one row for the whole batch.
        t = t[rows] if t.shape[0] == batch else t
        return t if call.valid is None else t.index_select(dim, columns)

    kwargs = dict(call.kwargs)
    if isinstance(kwargs.get("position_embeddings"), tuple):
        kwargs["position_embeddings"] = tuple(pick(t, 1) for t in kwargs["position_embeddings"])
    if isinstance(kwargs.get("position_ids"), Tensor):
        kwargs["position_ids"] = pick(kwargs["position_ids"], 1)
    assert call.queries is not None
    return call._replace(hidden_states=pick(call.hidden_states, 1), queries=pick(call.queries, 2), kwargs=kwargs)


def _matrix(call: Forward, keys: Tensor) -> Tensor:
    """The attention of every query, [B, Hq, P, N], in the model's dtype."""
    assert call.queries is not None
    transform = ScoreTransform(call.scale, call.softcap, call.sinks)
    score = transform.scores(call.queries.unflatten(1, (keys.shape[1], -1)), keys[:, :, None])
    new, count = score.shape[3:]
    ahead = torch.ones(new, count, dtype=torch.bool, device=score.device).triu(count - new + 1)
    return transform.weights(score.masked_fill_(ahead, -torch.inf)).flatten(1, 2).to(keys.dtype)


@contextmanager
def _with_rotary(module: nn.Module, rotary: nn.Module | None) -> Generator[None]:
    """Set `rotary_emb` of an attention module, as kvpress does, without registering it as a submodule."""
    if rotary is None or hasattr(module, "rotary_emb"):
        yield
        return
    module.__dict__["rotary_emb"] = rotary
    try:
        yield
    finally:
        module.__dict__.pop("rotary_emb", None)


@contextmanager
def _with_budget(press: Any, keep: int, count: int) -> Generator[None]:
    """Set the `compression_ratio` of a press such that it keeps `keep` of `count` tokens."""
    before = getattr(press, "compression_ratio", None)
    if not isinstance(before, float | int):
        yield
        return
    # kvpress keeps int(count * (1 - ratio)) tokens; the 0.5 protects that from rounding.
    press.compression_ratio = max(0.0, 1 - (keep + 0.5) / count) if keep < count else 0.0
    try:
        yield
    finally:
        press.compression_ratio = before
