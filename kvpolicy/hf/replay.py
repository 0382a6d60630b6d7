"""Run a context through its model once more, and score its tokens by the attention that they receive."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from kvpolicy.engine.partial_attention import has_parts
from kvpolicy.engine.prefill import PendingPrompt
from kvpolicy.engine.replay import Chunk, Gain, add_scores, attend_context, chunks, input_norms, received
from kvpolicy.engine.replay_parts import ChunkPlace, attend_and_score
from kvpolicy.engine.replayed_queries import ReplayedQueries, no_queries
from kvpolicy.hf.cache_names import cache_argument
from kvpolicy.hf.latent import latent_projection
from kvpolicy.hf.layer import PolicyLayer
from kvpolicy.hf.passing_cache import PassingCache
from kvpolicy.hf.projection import output_projection
from kvpolicy.hf.rotary_lookup import steady_angles
from kvpolicy.hf.transcript import Transcript
from kvpolicy.kernels.mixed_values import mixed_values, read_values
from kvpolicy.statistics import Forward, Replay, ReplayedRows
from kvpolicy.statistics.output_norms import euclidean_norms
from kvpolicy.statistics.replay import NOT_REPLAYED
from kvpolicy.statistics.statistic import first_of
from kvpolicy.statistics.windows import Past, ScoreTransform
from kvpolicy.text.errors import KVPolicyError

TABLES = ("wpe", "embed_positions")
"""Names of learned position embeddings, which end somewhere."""


def replay(layers: Sequence[Any], transcript: Transcript, decoder: nn.Module, plan: Replay) -> None:
    """Replay the contexts of a cache whose layers hold their prompts, and leave scores in these.

    Args:
        layers: All layers of the cache.
        transcript: The prompts as the model was given them.
        decoder: The module that was called with it.
        plan: How they are replayed.

    Raises:
        KVPolicyError: If the model cannot be replayed.
    """
    first = next(layer for layer in layers if isinstance(layer, PolicyLayer))
    # A row with a prompt in an earlier forward is not replayed now, as in a batch of one.
    context = transcript.valid.to(first.store.tensors.length.device) & (first.store.tensors.length == 0)[:, None]
    cache = ReplayCache(layers, context, plan)
    tokens = _joined(transcript.ids, decoder)
    by_layer = torch.cat(transcript.by_layer, 1) if transcript.by_layer and tokens.is_floating_point() else None
    given = cache_argument(decoder, cache)
    with torch.no_grad(), steady_angles(decoder):
        for chunk in chunks(context, plan):
            text, valid = _text(tokens, chunk, plan, decoder)
            cache.begin(chunk, valid)
            call = _call(text, valid, context, transcript, decoder)
            if by_layer is not None:
                call["per_layer_inputs"] = _inputs_by_layer(by_layer, chunk, plan, decoder)
            decoder(**call, **given, use_cache=True)
    for layer, scores in cache.scores.items():
        replayed = cache.queries.get(layer)
        layers[layer].pending = layers[layer].pending._replace(replay=scores, replayed=replayed)


class ReplayCache(PassingCache):
    """Cache that a replay passes to the decoder: it shows the layers' held prompts, and stores only scores.

    Attributes:
        context: Which tokens of the held prompts are replayed, [B, P] bool.
        chunk: The chunk that is replayed now.
        valid: Which tokens of the running replay are not padding, [B, R] bool.
        whole: Whether neither has padding.
        scores: The scores of each layer so far, [B, H, P] fp32.
        queries: The queries of each layer that its merger observes.
    """

    takes_tiles = True
    chunk: Chunk
    valid: Tensor
    whole: bool
    _replayed: tuple[Tensor, Tensor]

    def __init__(self, layers: Sequence[Any], context: Tensor, plan: Replay) -> None:
        """A view of a cache's layers."""
        super().__init__(layers)
        self.context = context
        self.wants_inputs = plan.norms
        self._chunk_size = plan.chunk
        self._last = max(index for index in range(len(layers)) if self.manages(index))
        self.scores: dict[int, Tensor] = {}
        self.queries: dict[int, ReplayedQueries] = {}
        self._outputs: dict[int, Tensor] = {}
        self._decoded: tuple[int, PendingPrompt] | None = None

    def begin(self, chunk: Chunk, valid: Tensor) -> None:
        """Prepare for the replay of a chunk by tokens of which `valid` [B, R] are not padding."""
        self.begin_states()
        self.chunk = chunk
        self.valid = valid.to(self.context.device)
        self.whole = bool(valid.all()) and bool(self.context.all())

    def attend(
        self,
        layer_idx: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        valid: Tensor | None,
        transform: ScoreTransform,
        forward: Forward | None = None,
    ) -> Tensor:
        """Attend from replayed tokens to the context and to their own past, and score a chunk of the context.

        See `PolicyCache.attend`; nothing is stored.
        """
        # Layers that read the same keys score the same tokens, each of which has its largest score.
        owner = self.owner(layer_idx)
        store = self.held[owner].store
        pending = self._prompt(owner)
        heads = q.shape[1]
        if store.ranks.phantom:  # a rank without heads takes part with one that no sum counts
            q, k, v = (t.new_zeros(t.shape[0], 1, *t.shape[2:]) for t in (q, k, v))
        gain = None if forward is None or store.ranks.phantom else self._gain(layer_idx, forward)
        if owner not in self.scores:
            shape = pending.keys.shape[:3]
            self.scores[owner] = torch.full(shape, NOT_REPLAYED, dtype=torch.float32, device=k.device)
        k, v = self._so_far(layer_idx, k, v)
        # Layers may be on several devices.
        chunk = self.chunk.to(k.device)
        if owner == layer_idx:
            self._observe(layer_idx, q, chunk)
        occupied = self.context.to(k.device)[:, None].expand(-1, k.shape[1], -1)
        past = Past(pending.keys, pending.values, occupied)
        if self.whole and layer_idx != self._last and has_parts(q, k, v, transform):
            start = chunk.number * self._chunk_size
            place = ChunkPlace(start, start + chunk.columns.shape[1], chunk.sinks.shape[1])
            out, scores = attend_and_score(q, k, v, transform, past, place, gain)
        else:
            flags = None if self.whole else self.valid[:, : k.shape[2]].to(k.device)
            scores = received(q, k, pending.keys, transform, chunk, flags, gain)
            if layer_idx == self._last:  # nothing that follows is read
                out = v.new_zeros(*q.shape[:3], mixed_values(k, v).shape[3])
            else:
                out = attend_context(q, k, v, transform, past, flags)
        add_scores(self.scores[owner], chunk, scores)
        return out[:, :heads]

    def _observe(self, layer_idx: int, q: Tensor, chunk: Chunk) -> None:
        """Keep the queries that the layer's merger asks for."""
        asked = first_of(ReplayedRows, self.held[layer_idx].store.spec.prompt_statistics)
        if asked is None:
            return
        width = asked.width
        if layer_idx not in self.queries:
            self.queries[layer_idx] = no_queries(q, self.context, width)
        start = 0 if self.tile is None else self.tile.start
        self.queries[layer_idx].add(q, start, chunk, self._chunk_size, self.valid.shape[1])

    def _prompt(self, layer_idx: int) -> PendingPrompt:
        """The prompt that a layer holds, decoded; that of one layer at a time, for all of its tiles."""
        if self._decoded is None or self._decoded[0] != layer_idx:
            self._decoded = None  # first, so that one is alive at a time
            self._decoded = layer_idx, self.held[layer_idx].pending.decoded()
        return self._decoded[1]

    def _so_far(self, layer_idx: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of the running replay up to its newest token, given those of a layer's newest tile."""
        if self.tile is None:
            return k, v
        if self.tile.start == 0:
            size = (*k.shape[:2], self.tile.columns)
            self._replayed = k.new_empty(*size, k.shape[3]), v.new_empty(*size, v.shape[3])
        for held, new in zip(self._replayed, (k, v), strict=True):
            held[:, :, self.tile.start : self.tile.stop] = new
        keys, values = (held[:, :, : self.tile.stop] for held in self._replayed)
        return keys, values

    def _gain(self, layer_idx: int, forward: Forward) -> Gain:
        if layer_idx not in self._outputs:
            owner = self.owner(layer_idx)
            latent = self.held[owner].store.spec.latent
            prompt = self._prompt(owner)
            projection = latent_projection(forward.module) if latent else output_projection(forward.module)
            self._outputs[layer_idx] = euclidean_norms(read_values(prompt.keys, prompt.values, latent), projection)
        return Gain(self._outputs[layer_idx], input_norms(forward.hidden_states))


def _joined(parts: tuple[Tensor, ...], decoder: Any) -> Tensor:
    """The tokens of all chunks, as ids [B, P] if all are, else as embeddings [B, P, hidden]."""
    if any(part.is_floating_point() for part in parts):
        parts = tuple(part if part.is_floating_point() else _embedded(decoder, part) for part in parts)
    return torch.cat(parts, 1)


def _embedded(decoder: Any, ids: Tensor) -> Tensor:
    if not hasattr(decoder, "get_input_embeddings"):
        raise KVPolicyError(
            "The module with the layers must embed tokens by itself for a prompt to be replayed, got "
            f"{type(decoder).__name__}, which is given embeddings; try a selector without a replay, such as snapkv."
        )
    with torch.no_grad():
        return decoder.get_input_embeddings()(ids)


def _text(tokens: Tensor, chunk: Chunk, plan: Replay, decoder: nn.Module) -> tuple[Tensor, Tensor]:
    """The text that replays a chunk, padded behind each row's own tokens.

    Returns:
        Ids [B, R] or embeddings [B, R, hidden], and which of them are not padding, [B, R] bool.
    """
    chosen = chunk.chosen.to(tokens.device)

    def given(ids: Tensor) -> Tensor:
        return _embedded(decoder, ids) if tokens.is_floating_point() else ids.to(tokens.dtype)

    text = _laid_out(tokens, chunk, plan, given)
    # A row that has no token of this chunk has no instruction either.
    instructed = chosen.any(1, keepdim=True).expand(-1, text.shape[1] - chosen.shape[1])
    return text, torch.cat([instructed, chosen], 1)


def _inputs_by_layer(held: Tensor, chunk: Chunk, plan: Replay, decoder: Any) -> Tensor:
    """What layers are given beside the embeddings of the text that replays a chunk, [B, R, layers, size].

    Args:
        held: What they were given of the context, [B, N, layers, size].
        chunk: The chunk.
        plan: How contexts are replayed.
        decoder: The module that makes it of ids.
    """
    others = len(inspect.signature(decoder.get_per_layer_inputs).parameters) - 1
    return _laid_out(held, chunk, plan, lambda ids: decoder.get_per_layer_inputs(ids, *[None] * others))


def _laid_out(held: Tensor, chunk: Chunk, plan: Replay, given: Callable[[Tensor], Tensor]) -> Tensor:
    """What replays a chunk, [B, R, ...]: an instruction, the tokens before the chunk, the reply, and its own tokens.

    Args:
        held: The context, [B, N, ...].
        chunk: The chunk.
        plan: How contexts are replayed.
        given: Makes the same of ids [B, n] that are not in the context.
    """

    def taken(columns: Tensor) -> Tensor:
        columns = columns.to(held.device).view(*columns.shape, *[1] * (held.dim() - 2))
        return held.gather(1, columns.expand(-1, -1, *held.shape[2:]))

    def line(ids: tuple[int, ...]) -> Tensor:
        return given(torch.tensor(ids, dtype=torch.int64, device=held.device).expand(held.shape[0], -1))

    before = [line(plan.later if chunk.number else plan.first), taken(chunk.overlap), line(plan.reply)]
    return torch.cat([*before, taken(chunk.columns)], 1)


def _call(text: Tensor, valid: Tensor, context: Tensor, transcript: Transcript, decoder: Any) -> dict[str, Any]:
    """The arguments of the decoder for one text of a replay, but for the cache.

    Raises:
        KVPolicyError: If the text ends behind the last position that the model has learned.
    """
    rows, new = text.shape[:2]
    start = transcript.next_position.to(text.device)
    end = int(start.max()) + new
    limit = getattr(decoder.config, "max_position_embeddings", None)
    if any(isinstance(getattr(decoder, name, None), nn.Embedding) for name in TABLES) and end > (limit or end):
        raise KVPolicyError(
            f"A context must be replayed within the {limit} positions that the model has learned, got a replay up to "
            f"position {end - 1}; try a shorter context, or a smaller chunk."
        )
    call: dict[str, Any] = {"input_ids" if text.dim() == 2 else "inputs_embeds": text}
    # The mask covers all that the cache has seen. Columns before the transcript are hidden, since they are no part of
    # the context.
    if not (bool(valid.all()) and bool(context.all()) and not transcript.columns):
        earlier = context.new_zeros(rows, transcript.columns)
        call["attention_mask"] = torch.cat([earlier, context, valid.to(context.device)], 1).long().to(text.device)
    # Models without a rotary embedding may count positions from the mask, as they did for the context.
    if transcript.positioned or hasattr(decoder, "rotary_emb"):
        call["position_ids"] = start[:, None] + torch.arange(new, device=text.device)
    return call
