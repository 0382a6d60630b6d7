"""ExpectedAttention: keep the tokens that queries to come are expected to attend to."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from kvpolicy.kernels.products import lengths
from kvpolicy.kernels.rotary import KeyRotation
from kvpolicy.protocols import SMALLEST_HEAD, DecodeMode, HeadShape, Selector, State, View, scoped
from kvpolicy.selectors.common import keep_always, unranked_first
from kvpolicy.statistics import Candidates, Moments, QueryMoments, Results, Rotation, Statistic, Vectors
from kvpolicy.text.errors import KVPolicyError
from kvpolicy.text.strategy import finite, least, strategy


@scoped(total="head", product="head", queries="row", ranked="row")
class Expectation(NamedTuple):
    """Expected attention of the token in each slot, and the moments of the queries that it follows from.

    Attributes:
        score: Logarithm of the expected attention times the length of the value, [B, H, S] fp32.
        total: The sum of the queries, without their rotation, [B, H, G, D] fp32; empty if none are held, as `product`.
        product: The sum of their products with themselves, [B, H, G, D, D] fp32.
        queries: How many they are, [B] fp32.
        ranked: Tokens that the row had seen when its slots were scored, [B] int64.
    """

    score: Tensor
    total: Tensor
    product: Tensor
    queries: Tensor
    ranked: Tensor


@strategy
class ExpectedAttention(Selector):
    """Keep the tokens that queries to come are expected to attend to.

    Queries of a head, without their rotation, are close to a normal distribution, whose mean and covariance the prompt
    shows. The expected attention weight of a key follows in closed form for queries that stand behind the prompt.
    The selection depends on no particular question.

    Args:
        sinks: How many of the first tokens are always kept; their queries do not count.
        horizon: For how many positions behind the newest token attention is expected, on average.
        epsilon: Added to the expected attention before it is multiplied by the length of the value.
        every: After how many generated tokens all tokens are scored again; at most half the budget. Until then
            generated tokens rank above all others.
        decode: Whether generated tokens compete for the budget (`evict`) or are kept in addition to it (`grow`).
        moments: Which queries the moments are of: `all` so far, or those of the newest `prompt` or chunk, after which
            they are released. Generated tokens are then kept, with `decode=grow`.

    Raises:
        KVPolicyError: If `sinks` or `epsilon` is below 0, or `horizon` or `every` below 1, or if `moments=prompt` comes
            with `decode=evict`.

    Examples:
        >>> from kvpolicy import Policy
        >>> str(Policy.parse("expected:epsilon=0.01@0.2"))
        'expected:epsilon=0.01@0.2'

    Source:
        Expected Attention (arXiv:2510.00636) and kvpress (ExpectedAttentionPress). Differences:

        - The published results divide budgets over heads, which is `uniform/adakv+expected:decode=grow:moments=prompt`
          here.
        - The newest token is always kept.
        - Moments go on with later prompts and generated tokens. kvpress forgets them: `moments=prompt`.
        - In decode, all tokens are scored every 512 tokens or half the budget, and one token is evicted for each
          generated one. kvpress lets the cache grow between.
        - Queries are those that attention takes, with their rotation undone in fp32. kvpress computes them again from
          the hidden states.
        - Moments leave out padding, and each row has its own length, which counts from its first token in each chunk
          and while generating. kvpress' wrappers take the length of a chunk or buffer.
        - Scores are logarithms of fp64 weights, so that small ones do not become ties at 0.
        - The covariance that the rotation adds to later queries is left out, as published, and so are a cap of the
          scores (Gemma 2) and learned attention sinks (gpt-oss).
        - With a codec, coded keys and values are scored as attention reads them.
    """

    sinks: int = least(0, 4)
    horizon: int = least(1, 512)
    epsilon: float = finite(0, 0.0, example=0.01)
    every: int = least(1, 512)
    decode: DecodeMode = "evict"
    moments: Literal["all", "prompt"] = "all"
    compares_heads: ClassVar[bool] = True
    nested_from: ClassVar[int | None] = 1

    def __post_init__(self) -> None:
        if self.moments == "prompt" and self.decode == "evict":
            raise KVPolicyError(
                "ExpectedAttention.decode must be 'grow' with moments='prompt', got 'evict', which scores all tokens "
                "again while decoding; try decode='grow'."
            )

    @property
    def statistics(self) -> tuple[Statistic[Any], ...]:
        """Moments of the queries, and keys and values, of all tokens after a prompt and now and then."""
        return (Vectors(generated=True), Moments(self.sinks))

    @property
    def rerank_every(self) -> int:
        """Never by the moments of a prompt, which are released."""
        return 0 if self.moments == "prompt" else self.every

    @property
    def min_tokens(self) -> int:
        return self.sinks + 1

    def alloc(
        self, batch: int, heads: int, slots: int, device: torch.device | str, head: HeadShape = SMALLEST_HEAD
    ) -> State:
        """Scores of zero, and moments of no query."""
        group, dim = (0, 0) if self.moments == "prompt" else head[:2]
        return Expectation(
            score=torch.zeros(batch, heads, slots, dtype=torch.float32, device=device),
            total=torch.zeros(batch, heads, group, dim, dtype=torch.float32, device=device),
            product=torch.zeros(batch, heads, group, dim, dim, dtype=torch.float32, device=device),
            queries=torch.zeros(batch, dtype=torch.float32, device=device),
            ranked=torch.zeros(batch, dtype=torch.int64, device=device),
        )

    def observe(self, state: Expectation, seen: Results, view: View) -> State:
        """Add the queries of a prompt, and score every candidate."""
        observed = seen[Moments]
        moments = observed.moments
        assert moments is not None
        if self.moments == "all":
            moments = QueryMoments(*(before + new for before, new in zip(_moments(state), moments, strict=True)))
            state = state._replace(**moments._asdict())
        return self._scored(state, moments, seen[Vectors], observed.rotation, view)

    def rerank(self, state: Expectation, seen: Results, view: View) -> State:
        """Score every token by the queries so far."""
        return self._scored(state, _moments(state), seen[Vectors], seen[Rotation], view)

    def _scored(
        self, state: Expectation, moments: QueryMoments, tokens: Candidates, rotation: KeyRotation, view: View
    ) -> Expectation:
        """Score every token by the moments of some queries."""
        logits = self._expected_logits(moments, tokens, rotation, view)  # [B, H, G, N]
        scored = view.valid & (view.positions >= self.sinks)
        # In fp64: weights that are too small for fp32 would tie at 0.
        weights = logits.masked_fill(~scored[:, :, None], -torch.inf).double().softmax(-1)
        length = lengths(tokens.values)
        score = (view.ranks.group_mean(weights) + self.epsilon).log().float() + length.log()
        # In a head without a token to score, the softmax of -inf alone is NaN; all of it is masked here.
        score = score.clamp(-_MOST, _MOST).masked_fill(~scored, 0)
        return state._replace(score=score, ranked=view.length.clone())

    def _expected_logits(self, moments: QueryMoments, tokens: Candidates, rotation: KeyRotation, view: View) -> Tensor:
        """The logarithm of the mean of exp(q k) over the queries to come, for each query head, [B, H, G, N]."""
        heads, group = moments.total.shape[1:3]
        count = moments.queries.clamp_min(1)[:, None, None, None]
        mean = moments.total / count
        spread = moments.product / count[..., None] - mean[..., None] * mean[..., None, :]

        def rotated(vectors: Tensor) -> Tensor:
            """Vectors [B, H, G, n, D] at the mean of the positions to come."""
            flat = vectors.flatten(1, 2)
            return rotation.mean(flat, view.length, self.horizon).unflatten(1, (heads, group))

        scale = tokens.scale
        linear = rotated(mean[..., None, :]) * scale  # [B, H, G, 1, D]
        # The covariance is symmetric: its rows are rotated, then its columns.
        square = rotated(rotated(spread).mT) * (scale * scale / 2)
        return torch.cat([_quadratic(part, linear, square) for part in tokens.keys.split(_TILE, 2)], -1)

    def step(self, state: Expectation, row: Tensor, view: View) -> None:
        """Add the query of a generated token, which is not scored yet."""
        if self.moments == "prompt":
            return
        assert view.token is not None and view.token.plain_query is not None
        counts = (view.length > self.sinks).float()
        query = view.token.plain_query * counts[:, None, None, None]
        state.queries.add_(counts)
        state.total.add_(query)
        state.product.add_(query[..., None] * query[..., None, :])

    def priority(self, state: Expectation, view: View) -> Tensor:
        """Sinks and the newest token are always kept, then tokens that were not scored yet, by age: [B, H, N]."""
        priority = unranked_first(state.score, view, state.ranked, _MOST)
        return view.keep_newest(keep_always(priority, view.positions < self.sinks))


_TILE = 512
"""Keys that are scored at once."""

_MOST = 1024.0
"""No logarithm of a weight or of a length in fp32 is that large: above stand the tokens that were not scored yet."""


def _moments(state: Expectation) -> QueryMoments:
    """The moments that a state holds."""
    return QueryMoments(state.queries, state.total, state.product)


def _quadratic(keys: Tensor, linear: Tensor, square: Tensor) -> Tensor:
    """`linear k + k square k` of keys [B, H, n, D], for each query head: [B, H, G, n]."""
    keys = keys.float()[:, :, None]
    return ((keys @ square + linear) * keys).sum(-1)
