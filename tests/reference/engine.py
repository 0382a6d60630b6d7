"""One row and one layer of a cache, as a list of tokens per KV head and a full attention matrix."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from . import head_allocators, mergers, selectors
from .coding import Codec, Config, Rotation, Token, as_it_is, seen
from .mergers import regress
from .selectors import kvcrush, kvzip
from .stages import Head, Mover

PLENTY = 500
"""More slots than any head of a test has tokens."""


class ReferenceLayer:
    """A cache layer for one row without padding.

    Attributes:
        margin: How near any choice so far was to another one: see `selectors.margin`.
        order_margin: The same of the order in which tokens were coded.
    """

    def __init__(
        self,
        selector: str | Config,
        budget: int,
        *,
        num_heads: int,
        num_kv_heads: int,
        decode: Literal["evict", "grow"] = "evict",
        codec: Codec | None = None,
        layer_idx: int = 0,
        capacity: int | None = None,
        heads: tuple[str, Config] | None = None,
        undo: Rotation = as_it_is,
        apply: Rotation = as_it_is,
        merger: Config | None = None,
        projection: Tensor | None = None,
    ) -> None:
        """Start empty.

        Args:
            selector: A name, or a dict with `name` and hyper-parameters (`base`, if any, is one of these too).
            budget: Most tokens a query may attend to.
            num_heads: Query heads.
            num_kv_heads: KV heads.
            decode: Whether generated tokens compete for the budget or get room beside it.
            codec: None, or what `codecs.make` makes.
            layer_idx: Which layer; KVCrush's random anchor depends on it.
            capacity: The most tokens that the row may hold; by default the budget, for generated tokens that compete.
            heads: Name and parameters of a head allocator; every head keeps `budget` tokens without one.
            undo: Takes a key's rotary embedding away, for codecs that ask for it.
            apply: Puts it back.
            merger: None, or a dict with `name` and hyper-parameters.
            projection: What the layer does with the outputs of all query heads, [M, Hq * D], for selectors that ask.
        """
        self.selector = selectors.complete(selector)
        self.base = self.selector["base"] if self.selector["name"] == "kvcrush" else self.selector
        self.budget = budget
        self.capacity = capacity
        self.head_allocator = heads
        self.room = [budget] * num_kv_heads
        self.group = num_heads // num_kv_heads
        self.decode = decode
        if codec is not None and heads is not None:  # every head has slots for all that it may keep, and a buffer
            exact = codec.residual + codec.block
            codec = replace(codec, layout=lambda tokens: (exact, [PLENTY]))
        self.mover = None if codec is None else Mover(codec, layer_idx, num_kv_heads, undo, apply)
        self.layer_idx = layer_idx
        self.length = self.ranked = 0
        self.scale = 1.0
        self.undo = undo
        self.apply = apply
        self.memory: list[dict[Any, Any]] = [{} for _ in range(num_kv_heads)]
        self.margin = self.order_margin = math.inf
        self.heads = [Head() for _ in range(num_kv_heads)]
        self._held: list[Tensor] | None = None
        self._held_queries: Tensor | None = None
        self._held_massive = set[int]()
        self.merger = merger
        self.projection = None if projection is None else projection.chunk(num_heads, dim=1)
        self.memories: list[dict[str, Any]] = [{} for _ in self.heads]

    @property
    def positions(self) -> list[list[int]]:
        """The kept positions of each KV head, ascending."""
        return [[token.position for token in head.tokens] for head in self.heads]

    @property
    def coded_slots(self) -> list[list[int | None]]:
        """The position in each coded slot of each KV head, stage after stage, None where it is dead."""
        return [[position for stage in head for position in stage] for head in self.stage_slots]

    @property
    def stage_slots(self) -> list[list[list[int | None]]]:
        """The position in each slot of each stage of each KV head, None where it is dead."""
        return [[list(part.slots) for part in head.parts] for head in self.heads]

    @property
    def code_margin(self) -> float:
        """How near any number that was coded so far came to a tie, of codecs that say so."""
        return math.inf if self.mover is None else self.mover.margin

    @property
    def representatives(self) -> list[list[int]]:
        """The positions that stand in for others, per KV head."""
        return [[token.position for token in head.tokens if token.stays] for head in self.heads]

    @property
    def scores(self) -> list[list[complex]]:
        """What the selector remembers of each kept token, per KV head, in the order of `positions`."""
        return [[token.score for token in head.tokens] for head in self.heads]

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        budget: int | None = None,
        capacity: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        step: bool | None = None,
        hidden: Tensor | None = None,
        inputs: Tensor | None = None,
        held: bool = False,
        texts: list[kvzip.Text] | None = None,
        last: int | None = None,
        tail: int = 0,
    ) -> Tensor:
        """Attend with q [Hq, n, D] over what is kept and k, v [H, n, D], then choose; returns [Hq, n, D] fp64.

        The first call is the prefill. Later, one token is a decode step and more are a continuation; `step` says
        otherwise, for a continuation of one token in a batch where other rows have more. `hidden` [n, M] is the
        layer's input, for codecs that look at it; `inputs` [n, M] is that of its attention, for selectors that do. A
        chunk that is `held` is not chosen from yet; `texts` are the replays of the whole prompt, chunks that were held
        included. With a head allocator, `last` is the most tokens that the row will ever have, and `tail` what each
        head gets beside the budget.
        """
        self.tick()
        self.budget = self.budget if budget is None else budget
        self.capacity = self.capacity if capacity is None else capacity
        single = self.length > 0 and (k.shape[1] == 1 if step is None else step) and self._held is None
        single = single and not held and not texts
        first = self.length
        self.length += k.shape[1]
        if single and self.decode == "evict":
            self._make_room()
        for h, head in enumerate(self.heads):
            new = [Token(first + i, k[h, i].detach().clone(), v[h, i].detach().clone()) for i in range(k.shape[1])]
            born = selectors.scores_of_inputs(self.base, inputs, self.layer_idx, h)
            for token, score in zip(new, born or [], strict=False):
                token.score = score
            head.tokens += new
        out, attention = self._attend(q, scale, softcap, sinks)
        self.margin = min(self.margin, selectors.closeness(self.base, attention))
        self.scale = scale
        if single:
            self._step(attention, q)
        else:
            attention = self._with_held(attention)
            self._note(q, hidden, first)
            q = q if self._held_queries is None else torch.cat([self._held_queries, q], 1)
            if self.mover is not None and q.shape[1]:
                self.mover.note_prompt([q[self._query_heads(h)] for h in range(len(self.heads))])
            self._held, self._held_queries = (attention, q) if held else (None, None)
            if not held:
                self._replay(texts, scale, softcap, sinks)
                self._observe(texts or [], scale, softcap, sinks)
                self._choose(attention, q, self._pages(last), tail)
                self._settle()
        return out

    def _with_held(self, attention: list[Tensor]) -> list[Tensor]:
        """The rows of chunks that were held, then the new ones."""
        if self._held is None:
            return attention
        whole = []
        for old, new in zip(self._held, attention, strict=True):
            wide = torch.zeros(old.shape[0], new.shape[1], dtype=old.dtype)
            wide[:, : old.shape[1]] = old
            whole.append(torch.cat([wide, new]))
        return whole

    def _replay(
        self, texts: list[kvzip.Text] | None, scale: float, softcap: float | None, sinks: Tensor | None
    ) -> None:
        """Score all tokens by the replays, if there are any."""
        if not texts:
            return
        config = self.base
        while "base" in config:
            config = config["base"]
        if config["name"] != "kvzip":
            return
        for h, head in enumerate(self.heads):
            keys = torch.stack([token.key for token in head.tokens])
            values = torch.stack([token.value for token in head.tokens])
            group = self._query_heads(h)
            scores = kvzip.scores_after_replay(config, keys, values, texts, h, group, scale, softcap, sinks)
            for token, score in zip(head.tokens, scores, strict=True):
                token.score = score

    def _observe(self, texts: list[kvzip.Text], scale: float, softcap: float | None, sinks: Tensor | None) -> None:
        """Let a merger that fits the replay know its attention; None of later prompts."""
        if self.merger is None or self.merger.get("queries") != "replay":
            return
        chunk = self.base.get("chunk", regress.CHUNK)
        for h, (head, memory) in enumerate(zip(self.heads, self.memories, strict=True)):
            keys = torch.stack([token.seen_key for token in head.tokens])
            group = self._query_heads(h)
            rows = regress.replayed(self.merger, keys, texts, chunk, group, scale, softcap, sinks)
            memory["replayed"] = rows if texts else None

    def _attend(
        self, q: Tensor, scale: float, softcap: float | None, sinks: Tensor | None
    ) -> tuple[Tensor, list[Tensor]]:
        """Outputs, and the matrix [n, N] of every query head; the last n tokens are the queries' own."""
        out = []
        attention = []
        for h, head in enumerate(self.heads):
            keys, values = seen(head.tokens)
            counts = torch.tensor([math.log(token.count) for token in head.tokens], dtype=torch.float64)
            n = q.shape[1]
            old = len(head.tokens) - q.shape[1]
            later = torch.ones(n, old + n, dtype=torch.bool).triu(old + 1)
            for hq in self._query_heads(h):
                logits = q[hq].double() @ keys.T * scale
                logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
                logits = (logits + counts).masked_fill(later, -math.inf)
                if sinks is not None:  # a column that no token is behind
                    logits = torch.cat([logits, sinks[hq].detach().double().expand(n, 1)], dim=1)
                attention.append(torch.softmax(logits, dim=-1)[:, : old + n])
                out.append(attention[-1] @ values)
        return torch.stack(out), attention

    def _query_heads(self, h: int) -> list[int]:
        return list(range(h * self.group, (h + 1) * self.group))

    def _base_budget(self, budget: int | None = None) -> int:
        """What of a budget, the row's by default, the selector or the selector inside a refiner may keep."""
        budget = self.budget if budget is None else budget
        if self.selector["name"] != "kvcrush":
            return budget
        return budget - kvcrush.representatives(self.selector, budget)

    def _precise(self, head: Head) -> int:
        """How many tokens of a head stay precise: what a ranking of its tokens by worth is asked for."""
        assert self.mover is not None
        least = selectors.smallest_budget(self.base)
        if self.selector["name"] == "kvcrush":
            least = kvcrush.smallest_share(self.selector, least)
        tokens = self._most()
        floor = least
        while self._base_budget(floor) < least:
            floor += 1
        return min(max(self.mover.precise(head, tokens), floor), tokens)

    def _priorities(self, h: int, budget: int | None = None) -> list[float]:
        """What the tokens of a KV head are worth, with a budget, by default the row's."""
        budget = self.budget if budget is None else budget
        return selectors.priorities(self.base, self._look(h, budget=budget, vectors=False))

    def _report(self, gap: float) -> None:
        """Note how near a choice was to another one."""
        self.margin = min(self.margin, gap)

    def _make_room(self) -> None:
        """Evict one token from every head that is full; the new token is counted but not yet there."""
        for h, (head, memory, room) in enumerate(zip(self.heads, self.memories, self.room, strict=True)):
            if len(head.tokens) >= room:
                worth = self._priorities(h)
                self.margin = min(self.margin, selectors.margin(worth))
                gone = selectors.evicted(_never_standing(head.tokens, worth))
                victim = head.tokens[gone]
                others = [token for token in head.exact() if token is not victim]
                memory["worth"] = _worth_by_position(head.tokens, worth)
                self.margin = min(self.margin, mergers.merge_token(self.merger, memory, victim, others))
                head.drop({victim.position})

    def _step(self, attention: list[Tensor], q: Tensor) -> None:
        """Update the scores after a generated token."""
        for h, head in enumerate(self.heads):
            scores = selectors.scores_of_step(self.base, self._look(h, q, attention))
            if scores is not None:
                for token, score in zip(head.tokens, scores, strict=True):
                    token.score = score
            newest = selectors.score_of_newest(self.base, self._look(h, q))  # of a wrapper, beside those of its base
            if newest is not None:
                head.tokens[-1].score = newest
            if scores is not None or newest is not None:
                continue
            old = [token.score for token in head.tokens]
            new = selectors.scores_after_decode(self.base, old, attention, self._query_heads(h))
            for token, score in zip(head.tokens, new, strict=True):
                token.score = score

    def _pages(self, last: int | None) -> head_allocators.Room | None:
        """The pages of a row that will have `last` tokens; None without a head allocator."""
        if self.head_allocator is None:
            return None
        assert last is not None, "pages depend on all tokens that will come"
        return head_allocators.room(self.budget, last, len(self.heads))

    def _choose(
        self, attention: list[Tensor], q: Tensor, given: head_allocators.Room | None = None, tail: int = 0
    ) -> None:
        """Update the scores after a prefill or chunk, and drop what does not fit."""
        self.budget = self.budget if given is None else given.average  # what selectors reckon with
        for h, head in enumerate(self.heads):
            old = [token.score for token in head.tokens]
            new = selectors.scores_after_prefill(self.base, old, attention, self._query_heads(h), self._base_budget())
            for token, score in zip(head.tokens, new, strict=True):
                token.score = score
        self._rank(q, attention)
        apart = self._distances(attention)
        self.room = [self.budget] * len(self.heads)
        if given is not None and self.head_allocator is not None:
            worths = [self._priorities(h) for h in range(len(self.heads))]
            if self.head_allocator[0] == "adakv":  # heads that lose no token to a merger tie where attention is even
                self._report(selectors.margin([x for worth in worths for x in worth]))
            pages = head_allocators.divide(*self.head_allocator, worths, given)
            self.room = [count * given.size for count in pages]
        for h, head in enumerate(self.heads):
            kept, standing = self._kept(h, apart, self.room[h])
            self.room[h] += tail
            for token in head.tokens:
                token.stays = token.position in standing
            targets = [token for token in head.exact() if token.position in kept]
            own = [attention[hq] for hq in self._query_heads(h)]
            self.memories[h]["worth"] = _worth_by_position(head.tokens, self._priorities(h))
            near = mergers.merge_prompt(self.merger, self.memories[h], head.tokens, kept, targets, own)
            self.margin = min(self.margin, near)
            head.drop({token.position for token in head.tokens} - kept)

    def _look(
        self,
        h: int,
        q: Tensor | None = None,
        attention: list[Tensor] | None = None,
        budget: int | None = None,
        vectors: bool = True,
    ) -> selectors.Look:
        """What a selector sees of a KV head.

        Args:
            h: Which one.
            q: The queries of new tokens, [Hq, n, D].
            attention: The matrix of every query head of the layer in a prompt that was just read.
            budget: Of the row, by default what it may hold now.
            vectors: Whether the selector may look at keys and values.
        """
        tokens = self.heads[h].tokens
        group = self._query_heads(h)
        keys, values = seen(tokens) if vectors and tokens else (torch.empty(0), torch.empty(0))
        new = [] if q is None else [[*enumerate(q[hq], self.length - q.shape[1])] for hq in group]
        return selectors.Look(
            positions=[t.position for t in tokens],
            keys=keys.tolist(),
            values=values.tolist(),
            queries=new or [[] for _ in group],
            scale=self.scale,
            undo=self.undo,
            apply=self.apply,
            length=self.length,
            memory=self.memory[h],
            scores=[t.score for t in tokens],
            budget=self._base_budget(self._now() if budget is None else budget),
            attention=None if attention is None else [attention[hq] for hq in group],
            projection=None if self.projection is None else [self.projection[hq] for hq in group],
            report=self._report,
            layer=self.layer_idx,
            head=h,
        )

    def _now(self) -> int:
        """Tokens that the row may hold between prompts."""
        return self.budget if self.decode == "evict" or self.capacity is None else self.capacity

    def _rank(self, q: Tensor | None = None, attention: list[Tensor] | None = None) -> None:
        """Score all tokens by what they are, if the selector does so; after a prompt if there is `attention`."""
        self.ranked = self.length
        budget = None if attention is None else self.budget
        looks = [self._look(h, q, attention, budget) for h in range(len(self.heads))]
        for head, scores in zip(self.heads, selectors.scores_of_layer(self.base, looks), strict=True):
            for token, score in zip(head.tokens, scores or [], strict=False):
                token.score = score

    def _distances(self, attention: list[Tensor]) -> dict[int, int]:
        """KVCrush's distance of every position on offer to the anchor."""
        if self.selector["name"] != "kvcrush":
            return {}
        share = self._base_budget()
        looks = [self._look(hq // self.group, None, attention) for hq in range(len(attention))]
        rows = [
            selectors.statistic_of_head(self.base, look, hq % self.group)
            or selectors.statistic(self.base, attention[hq], share)
            for hq, look in enumerate(looks)
        ]
        self.margin = min([self.margin, *(selectors.margin(row) for row in rows)])
        bits = [kvcrush.bits(row, self.selector["quantile"]) for row in rows]
        anchor = kvcrush.anchor(self.selector["anchor"], bits, self.selector["seed"], self.layer_idx)
        held = [[token.position for token in self.heads[hq // self.group].tokens] for hq in range(len(bits))]
        return kvcrush.distances([dict(zip(*pair, strict=True)) for pair in zip(held, bits, strict=True)], anchor)

    def _kept(self, h: int, apart: dict[int, int], count: int) -> tuple[set[int], set[int]]:
        """Positions that stay, and those of them that stand in for others."""
        positions = [token.position for token in self.heads[h].tokens]
        worth = self._priorities(h)
        self.margin = min(self.margin, selectors.margin(worth))
        if self.selector["name"] != "kvcrush":
            return {positions[j] for j in selectors.top(worth, count)}, set()
        strong, standing = kvcrush.keep_tokens(self.selector, positions, worth, apart, self.budget)
        return {*strong, *standing}, set(standing)

    def _order(self, head: Head) -> list[Token]:
        """All tokens of a head in the order in which they leave the exact part, or a stage."""
        assert self.mover is not None
        codec = self.mover.codec
        pins = self.mover.pins
        if codec.demote_by == "age":
            return sorted(head.tokens, key=lambda t: (t.position in pins, t.position))
        h = next(h for h, other in enumerate(self.heads) if other is head)
        worth = _never_standing(head.tokens, self._priorities(h, self._precise(head)))
        self.order_margin = min(self.order_margin, selectors.margin(worth))
        pairs = sorted(zip(worth, head.tokens, strict=True), key=lambda pair: (pair[0], -pair[1].position))
        newest = self.length - codec.residual
        return sorted([token for _, token in pairs], key=lambda t: t.position in pins or t.position >= newest)

    def _most(self) -> int:
        """The most tokens that the row may hold."""
        if self.capacity is not None:
            return self.capacity
        assert self.decode == "evict", "a row that grows must be told how far"
        return self.budget

    def tick(self) -> None:
        """Do what is due between two steps; `forward` begins with it."""
        every = selectors.rerank_every(self.base)
        if every and self.length and self.length - self.ranked >= max(1, min(every, self._most() // 2)):
            self._rank()
        if self.mover and self.length:
            self.mover.tick(self.heads, self._order, self._most())

    def _note(self, queries: Tensor, hidden: Tensor | None, first: int) -> None:
        """Remember what a codec wants to know of a prefill or chunk."""
        if self.mover is None or not queries.shape[1]:
            return
        self.mover.note_queries([torch.cat([*queries[self._query_heads(h)]]) for h in range(len(self.heads))])
        if self.mover.codec.pins == "massive" and not first:
            assert hidden is not None, "this codec looks at hidden states"
            sizes = [(-abs(x), t) for t, row in enumerate(hidden.tolist()) for x in row]
            self._held_massive = {t for _, t in sorted(sizes)[: self.mover.codec.pinned]}

    def _settle(self) -> None:
        """Code all that does not fit the exact part after a prompt."""
        if self.mover is not None:
            massive = self._held_massive
            self._held_massive = set[int]()
            self.mover.settle(self.heads, self._order, self._most(), self.length, massive)


def _never_standing(tokens: list[Token], worth: list[float]) -> list[float]:
    """What tokens are worth; those that stand in for others are never the least."""
    return [math.inf if token.stays else x for token, x in zip(tokens, worth, strict=True)]


def _worth_by_position(tokens: list[Token], worth: list[float]) -> dict[int, float]:
    """What a merger is told of the tokens of a head."""
    return {token.position: x for token, x in zip(tokens, _never_standing(tokens, worth), strict=True)}
