"""The statistics of a prompt that a selector asks for, and those that it is given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from kvpolicy.protocols.ranks import SINGLE_RANK, Ranks

BELOW_MEAN = 1 - 1e-4
"""The multiple of the mean attention below which a weight counts as less: equal weights differ by rounding only."""


class Probes(NamedTuple):
    """Which queries of a prompt are probes.

    Attributes:
        recent: Fraction of each row's queries that are the newest ones, in [0, 1].
        random: Fraction of them that is drawn at random from the others, in [0, 1].
        seed: Seed of the draw.
    """

    recent: float
    random: float
    seed: int


class Decay(NamedTuple):
    """A sum of attention in which newer queries count more.

    Attributes:
        queries: How many of the newest queries are summed over.
        factor: What each of them counts over the next one, in (0, 1).
    """

    queries: int
    factor: float


class AttentionRows(NamedTuple):
    """The attention of a few queries of a prompt, in tiles of which a selector reduces it.

    Attributes:
        weights: Over slots and new tokens, [B, Hq, W, N] fp32; rows of zeros where a batch row has fewer queries.
        queries: Position of each query in its row, [B, W] int64, -1 for none.
        positions: Position of each token, [B, H, N] int32, -1 for none; in any order.
        layer_idx: Index of the layer.
        ranks: The ranks that hold the model's other heads.
    """

    weights: Tensor
    queries: Tensor
    positions: Tensor
    layer_idx: int = 0
    ranks: Ranks = SINGLE_RANK


class RowReducer(Protocol):
    """Reduces the attention of all queries of a prompt, which it sees a few at a time, to a number of each token."""

    def reduce(self, rows: AttentionRows) -> Tensor:
        """A number of each token, [B, Hq, N] fp32; those of all queries are added."""
        ...


class Replay(NamedTuple):
    """How a context is run through the model once more after its prefill, so that its tokens can be scored.

    A replayed text is `first` and a chunk of the context, or `later`, the last `overlap` tokens of the chunk before,
    `reply`, and a chunk. It stands at positions after the context, attends to it, and leaves nothing behind.

    Attributes:
        chunk: Tokens of the context that are replayed at a time.
        sinks: First tokens of the context that are in the softmax of every chunk's scores.
        first: Token ids before the first chunk.
        later: Token ids before every other chunk.
        reply: Token ids between these and the chunk.
        overlap: How many of the last tokens of the chunk before are repeated; none without `later`.
        norms: Whether attention weights are multiplied by the norm of what the token adds to the residual stream, and
            divided by the norm of the query's input.
    """

    chunk: int
    sinks: int = 0
    first: tuple[int, ...] = ()
    later: tuple[int, ...] = ()
    reply: tuple[int, ...] = ()
    overlap: int = 0
    norms: bool = False


class Needs(NamedTuple):
    """The attention statistics that a selector needs; what is not requested is not computed.

    Attributes:
        attn_sum: Whether to sum the attention over every query of a prefill, per query head.
        window_queries: Attention rows of how many of the newest queries to keep for `Seen.recent`.
        decode_attn: Whether to pass the attention of each decoded token to `Selector.step`.
        probes: Which queries' attention to sum for `Seen.probe_sum`, or None.
        forward: Whether to pass on the arguments of the attention module as `Seen.forward`, and the keys and values
            of the candidates.
        below_mean_queries: How many of the newest queries to count in `Seen.below_mean`.
        decay: Which queries' attention to sum for `Seen.decayed_sum`, and how, or None.
        reducer: Reduces the attention of every query of a prompt to `Seen.reduced`, or None.
        newest_queries: How many of the newest queries to pass on as `Seen.queries`; with `vectors`, those of the newest
            token are passed in decode.
        query_moments: From which position on to sum the moments of the queries for `Seen.moments`, and whether to pass
            those of the newest token in decode; None for neither.
        vectors: Whether to pass on the keys and values of the candidates, and in decode those of the newest token as
            `View.token`.
        prompt_vectors: Whether to pass on the keys and values of the candidates after a prompt, and nothing in decode.
        output_norms: Whether to pass on, after a prompt, how much the value of each candidate adds to the residual
            stream, as `Seen.output_norms`.
        rerank_every: After how many generated tokens to call `rerank(state, seen, view) -> State`, which the selector
            then has, with the keys and values of all slots; after half the budget if that is less. 0 for never.
        head_shape: Whether `alloc` takes the `HeadShape` as a fifth argument, for a state per head.
        replay: How the context is run once more for `Seen.replay`, or None. Every layer then holds the whole prompt
            until the last has run.
        newest_row: Whether tokens are ranked by the attention of the newest token alone, which must then cover every
            slot: a reader that leaves slots unread is refused.
        block_queries: Positions of the blocks inside which all queries attend for `Seen.block_attn`; 0 for none.
        block_first: The first position that is in a block.
        rotation: Whether to pass on, after a prompt, how the model rotates queries and keys, as `Seen.mean_rotation`,
            `Seen.pair_lengths` and `Seen.rope_offset`.
        unrotated_keys: Whether to pass on the keys and values of the candidates, and as `Seen.unrotated` the keys
            without their rotation; nothing in decode.
        layer_input: Whether to score every token once, by the input of the attention module, while the layer runs, in
            a prompt as in decode; see `ScoresInputs`, which the selector then is. No input is held.
        replay_queries: How many queries of the replay to keep for `Candidates.replay_attention`, spread evenly over the
            context of each row.
    """

    attn_sum: bool = False
    window_queries: int = 0
    decode_attn: bool = False
    probes: Probes | None = None
    forward: bool = False
    below_mean_queries: int = 0
    decay: Decay | None = None
    reducer: RowReducer | None = None
    newest_queries: int = 0
    query_moments: int | None = None
    vectors: bool = False
    rerank_every: int = 0
    head_shape: bool = False
    replay: Replay | None = None
    newest_row: bool = False
    prompt_vectors: bool = False
    output_norms: bool = False
    block_queries: int = 0
    block_first: int = 0
    unrotated_keys: bool = False
    rotation: bool = False
    layer_input: bool = False
    replay_queries: int = 0

    def __or__(self, other: Needs) -> Needs:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The union of two needs, for a selector that wraps another."""
        return Needs(
            attn_sum=self.attn_sum or other.attn_sum,
            window_queries=max(self.window_queries, other.window_queries),
            decode_attn=self.decode_attn or other.decode_attn,
            probes=self.probes or other.probes,
            forward=self.forward or other.forward,
            below_mean_queries=max(self.below_mean_queries, other.below_mean_queries),
            decay=self.decay or other.decay,
            reducer=self.reducer or other.reducer,
            newest_queries=max(self.newest_queries, other.newest_queries),
            query_moments=other.query_moments if self.query_moments is None else self.query_moments,
            vectors=self.vectors or other.vectors,
            rerank_every=self.rerank_every or other.rerank_every,
            head_shape=self.head_shape or other.head_shape,
            replay=self.replay or other.replay,
            newest_row=self.newest_row or other.newest_row,
            prompt_vectors=self.prompt_vectors or other.prompt_vectors,
            output_norms=self.output_norms or other.output_norms,
            block_queries=self.block_queries or other.block_queries,
            block_first=self.block_first if self.block_queries else other.block_first,
            unrotated_keys=self.unrotated_keys or other.unrotated_keys,
            rotation=self.rotation or other.rotation,
            layer_input=self.layer_input or other.layer_input,
            replay_queries=max(self.replay_queries, other.replay_queries),
        )

    @property
    def key_rotation(self) -> bool:
        """Whether it must be known after a prompt how its keys are rotated."""
        return self.unrotated_keys or self.rotation

    @property
    def candidates(self) -> bool:
        """Whether keys and values of the candidates are needed after a prompt."""
        return self.vectors or self.prompt_vectors or self.output_norms or self.unrotated_keys


class Forward(NamedTuple):
    """The arguments of an attention module's forward, for a selector that computes its own scores.

    Attributes:
        module: The attention module.
        hidden_states: Its input, [B, P, hidden].
        kwargs: Its other arguments, as the model's code passed them.
        rotary: The model's rotary embedding, or None.
        queries: The queries as attention takes them, [B, Hq, P, D].
        valid: Which of the P tokens are not padding, [B, P] bool; None if all are.
        scale: The factor that products of queries and keys are multiplied by.
        softcap: The cap that is then applied to them, or None.
        sinks: Learned scores that take part in the softmax, [Hq], or None.
    """

    module: nn.Module
    hidden_states: Tensor
    kwargs: dict[str, Any]
    rotary: nn.Module | None = None
    queries: Tensor | None = None
    valid: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None
    sinks: Tensor | None = None


class QueryMoments(NamedTuple):
    """The first and second moments of queries without their rotation, fp32, of valid tokens only.

    Attributes:
        queries: How many queries there are, [B].
        total: Their sum, [B, H, G, D].
        product: The sum of their outer products, [B, H, G, D, D].
    """

    queries: Tensor
    total: Tensor
    product: Tensor


MeanRotation = Callable[[Tensor, Tensor, "int | Tensor"], Tensor]
"""Rotates vectors [B, n, m, D] to positions ahead of `first` [B], and returns the mean; see `Seen`."""


class Seen(NamedTuple):
    """Attention statistics of one prefill or chunk over the candidate tokens, fp32; 0 where a token is not valid.

    Attributes:
        attn_sum: [B, Hq, N], summed over the queries of this forward; None unless `Needs.attn_sum`.
        window_attn: [B, Hq, W, N], the newest W valid queries, the newest last; rows of zeros where a batch row has
            fewer. None unless `Needs.window_queries`.
        probe_sum: [B, Hq, N], summed over the probes; None unless `Needs.probes`.
        probe_count: [B, Hq, N], how many probes could attend to the token; None unless `Needs.probes`.
        below_mean: [B, Hq, N], how many of the newest queries of this forward attend to the token less than to the mean
            of the tokens that they see; None unless `Needs.below_mean_queries`.
        decayed_sum: [B, Hq, N], attention summed over the newest queries of this forward, each times a factor for every
            query behind it; None unless `Needs.decay`.
        reduced: [B, Hq, N], what `Needs.reducer` made of the attention of every query of this forward; None without it.
        queries: [B, Hq, W, D], the newest W valid queries of this forward as attention takes them, the newest last; any
            where a batch row has fewer. None unless `Needs.newest_queries`, and in `rerank`.
        moments: The moments of this forward's queries; None unless `Needs.query_moments`, and in `rerank`.
        mean_rotation: `mean_rotation(vectors, first, ahead)` rotates vectors [B, n, m, D] to `ahead` positions from
            `first` [B] on, or to positions at the distances `ahead` [n] from it, and returns the mean, fp32; None
            unless `Needs.query_moments` or `Needs.rotation`.
        pair_lengths: `pair_lengths(vectors)` returns the length of vectors [..., D] in each plane that the embedding
            rotates, [..., F] fp32; None unless `Needs.rotation`.
        rope_offset: Offset of the embedding's positions from those of the row, [B] int64; None if they are the same,
            in `rerank`, and without `Needs.rotation`.
        scale: The factor that products of queries and keys are multiplied by.
        added: [B] int64, how many tokens this forward adds to each row; None unless `Needs.below_mean_queries`,
            `Needs.decay`, `Needs.newest_queries` or `Needs.block_queries`.
        forward: The arguments of the attention module; None unless `Needs.forward`.
        keys: [B, H, N, D], as attention takes them, those of coded slots decoded; None unless `Needs.forward` or
            `Needs.candidates`. Numbers at invalid tokens are to be ignored.
        values: [B, H, N, D]; None unless `Needs.forward` or `Needs.candidates`.
        replay: [B, H, N], the largest attention of a replayed query of the KV head, -1 where a token was not replayed:
            tokens of later prompts, and those kept before. None unless `Needs.replay`, and for later prompts.
        output_norms: [B, Hq, N], the sum of the absolute numbers that the value of a token becomes behind the query
            head's slice of the output projection; None unless `Needs.output_norms`, and in `rerank`.
        block_attn: [B, Hq, N], attention summed over all queries of this forward in the token's block of positions,
            earlier and later ones, by a softmax over this block of products without a scale; 0 for tokens from before,
            and for those in no block. None unless `Needs.block_queries`.
        unrotated: The keys without their rotation, [B, H, N, D] fp32; None unless `Needs.unrotated_keys`, and in
            `rerank`. Numbers at invalid tokens are to be ignored.
        window_sinks: [B, Hq, W], the weight of the learned sink in each row of `window_attn`; None if there is none.
    """

    attn_sum: Tensor | None
    window_attn: Tensor | None
    probe_sum: Tensor | None = None
    probe_count: Tensor | None = None
    below_mean: Tensor | None = None
    decayed_sum: Tensor | None = None
    reduced: Tensor | None = None
    queries: Tensor | None = None
    moments: QueryMoments | None = None
    mean_rotation: MeanRotation | None = None
    pair_lengths: Callable[[Tensor], Tensor] | None = None
    rope_offset: Tensor | None = None
    scale: float | None = None
    added: Tensor | None = None
    forward: Forward | None = None
    keys: Tensor | None = None
    values: Tensor | None = None
    replay: Tensor | None = None
    output_norms: Tensor | None = None
    block_attn: Tensor | None = None
    unrotated: Tensor | None = None
    window_sinks: Tensor | None = None

    def recent(self, window: Tensor) -> Tensor:
        """Attention summed over each row's newest `window` [B] queries, [B, Hq, N]."""
        assert self.window_attn is not None, "the selector did not request window_queries"
        width = self.window_attn.shape[2]
        age = torch.arange(width - 1, -1, -1, device=self.window_attn.device)
        weight = (age < window[:, None]).to(self.window_attn.dtype)  # [B, W]
        return (weight[:, None, None] @ self.window_attn).squeeze(2)
