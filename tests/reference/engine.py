"""One row and one layer of a cache, as a list of tokens per KV head and a full attention matrix."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from . import kivi, kvcrush, selectors
from .selectors import Config


@dataclass
class Token:
    """A kept token of one KV head.

    Attributes:
        position: Its original position.
        key: As it came, [D].
        value: As it came, [D].
        score: What the selector remembers of it.
        stays: Whether it stands in for others and is never evicted in decode.
        read: What attention reads once it is coded: key and value.
    """

    position: int
    key: Tensor
    value: Tensor
    score: float = 0.0
    stays: bool = False
    read: tuple[Tensor, Tensor] | None = None

    @property
    def seen_key(self) -> Tensor:
        """The key that attention reads, fp64."""
        return (self.read[0] if self.read else self.key).double()

    @property
    def seen_value(self) -> Tensor:
        """The value that attention reads, fp64."""
        return (self.read[1] if self.read else self.value).double()


class ReferenceLayer:
    """A cache layer for one row without padding.

    Attributes:
        margin: How near any choice so far was to another one: see `selectors.margin`.
    """

    def __init__(
        self,
        selector: str | Config,
        budget: int,
        *,
        num_heads: int,
        num_kv_heads: int,
        decode: Literal["evict", "grow"] = "evict",
        codec: Config | None = None,
        layer_idx: int = 0,
        capacity: int | None = None,
    ) -> None:
        """Start empty.

        Args:
            selector: A name, or a dict with `name` and hyper-parameters (kvcrush: `base` is one of these too).
            budget: Most tokens a query may attend to.
            num_heads: Query heads.
            num_kv_heads: KV heads.
            decode: Whether generated tokens compete for the budget or get room beside it.
            codec: None, or a dict of KIVI's `bits`, `group_size`, `residual_length`.
            layer_idx: Which layer; KVCrush's random anchor depends on it.
            capacity: Tokens that the coded slots are laid out for; by default the budget where generated tokens
                compete, and without end where they do not.
        """
        self.selector = selectors.complete(selector)
        self.base = self.selector.get("base", self.selector)
        self.budget = budget
        self.capacity = capacity
        self.group = num_heads // num_kv_heads
        self.decode = decode
        self.codec = None if codec is None else {**kivi.DEFAULTS, **codec}
        self.layer_idx = layer_idx
        self.length = 0
        self.margin = math.inf
        self.heads: list[list[Token]] = [[] for _ in range(num_kv_heads)]
        self.coded: list[kivi.CodedPart] = []
        if self.codec:
            self.coded = [kivi.CodedPart(self.codec, self._groups()) for _ in range(num_kv_heads)]

    @property
    def positions(self) -> list[list[int]]:
        """The kept positions of each KV head, ascending."""
        return [[token.position for token in head] for head in self.heads]

    @property
    def coded_slots(self) -> list[list[int | None]]:
        """The position in each coded slot of each KV head, None where it is dead; no heads without codec."""
        return [list(part.slots) for part in self.coded]

    @property
    def representatives(self) -> list[list[int]]:
        """The positions that stand in for others, per KV head."""
        return [[token.position for token in head if token.stays] for head in self.heads]

    @property
    def scores(self) -> list[list[float]]:
        """What the selector remembers of each kept token, per KV head, in the order of `positions`."""
        return [[token.score for token in head] for head in self.heads]

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        budget: int | None = None,
        capacity: int | None = None,
        softcap: float | None = None,
        step: bool | None = None,
    ) -> Tensor:
        """Attend with q [Hq, n, D] over what is kept and k, v [H, n, D], then choose; returns [Hq, n, D] fp64.

        The first call is the prefill. Later, one token is a decode step and more are a continuation; `step` says
        otherwise, for a continuation of one token in a batch where other rows have more.
        """
        self.budget = self.budget if budget is None else budget
        self.capacity = self.capacity if capacity is None else capacity
        self._tick()
        single = self.length > 0 and (k.shape[1] == 1 if step is None else step)
        first = self.length
        self.length += k.shape[1]
        if single and self.decode == "evict":
            self._make_room()
        for h, head in enumerate(self.heads):
            head += [Token(first + i, k[h, i].detach().clone(), v[h, i].detach().clone()) for i in range(k.shape[1])]
        out, attention = self._attend(q, scale, softcap)
        if single:
            self._step(attention)
        else:
            self._choose(attention)
            self._settle()
        return out

    def _attend(self, q: Tensor, scale: float, softcap: float | None) -> tuple[Tensor, list[Tensor]]:
        """Outputs, and the matrix [n, N] of every query head; the last n tokens are the queries' own."""
        out, attention = [], []
        for hq, queries in enumerate(q.double()):
            head = self.heads[hq // self.group]
            keys = torch.stack([token.seen_key for token in head])
            values = torch.stack([token.seen_value for token in head])
            logits = queries @ keys.T * scale
            logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
            n, old = len(queries), len(head) - len(queries)
            for i in range(n):
                logits[i, old + i + 1 :] = -math.inf
            attention.append(torch.softmax(logits, dim=-1))
            out.append(attention[-1] @ values)
        return torch.stack(out), attention

    def _query_heads(self, h: int) -> list[int]:
        return list(range(h * self.group, (h + 1) * self.group))

    def _base_budget(self) -> int:
        """What the selector, or the selector inside a refiner, may keep."""
        if self.selector["name"] != "kvcrush":
            return self.budget
        return self.budget - kvcrush.representatives(self.selector, self.budget)

    def _priorities(self, head: list[Token]) -> list[float]:
        share = self._base_budget()
        return [selectors.priority(self.base, t.position, t.score, self.length, share) for t in head]

    def _make_room(self) -> None:
        """Evict one token from every head that is full; the new token is counted but not yet there."""
        for h, head in enumerate(self.heads):
            if len(head) >= self.budget:
                worth = self._priorities(head)
                self.margin = min(self.margin, selectors.margin(worth))
                gone = selectors.evicted([math.inf if t.stays else x for t, x in zip(head, worth, strict=True)])
                self._drop(h, {head[gone].position})

    def _step(self, attention: list[Tensor]) -> None:
        """Update the scores after a generated token."""
        for h, head in enumerate(self.heads):
            old = [token.score for token in head]
            new = selectors.scores_after_decode(self.base, old, attention, self._query_heads(h))
            for token, score in zip(head, new, strict=True):
                token.score = score

    def _choose(self, attention: list[Tensor]) -> None:
        """Update the scores after a prefill or chunk, and drop what does not fit."""
        for h, head in enumerate(self.heads):
            old = [token.score for token in head]
            new = selectors.scores_after_prefill(self.base, old, attention, self._query_heads(h), self._base_budget())
            for token, score in zip(head, new, strict=True):
                token.score = score
        apart = self._distances(attention)
        for h, head in enumerate(self.heads):
            kept, standing = self._kept(head, apart)
            for token in head:
                token.stays = token.position in standing
            self._drop(h, {token.position for token in head} - kept)

    def _drop(self, h: int, gone: set[int]) -> None:
        """Forget tokens of one head; coded ones leave dead slots."""
        self.heads[h] = [token for token in self.heads[h] if token.position not in gone]
        if self.codec:
            for position in gone:
                self.coded[h].drop(position)

    def _distances(self, attention: list[Tensor]) -> dict[int, int]:
        """KVCrush's distance of every position on offer to the anchor."""
        if self.selector["name"] != "kvcrush":
            return {}
        share = self._base_budget()
        rows = [selectors.statistic(self.base, matrix, share) for matrix in attention]
        self.margin = min([self.margin, *(selectors.margin(row) for row in rows)])
        bits = [kvcrush.bits(row, self.selector["quantile"]) for row in rows]
        anchor = kvcrush.anchor(self.selector["anchor"], bits, self.selector["seed"], self.layer_idx)
        held = [[token.position for token in self.heads[hq // self.group]] for hq in range(len(bits))]
        return kvcrush.distances([dict(zip(*pair, strict=True)) for pair in zip(held, bits, strict=True)], anchor)

    def _kept(self, head: list[Token], apart: dict[int, int]) -> tuple[set[int], set[int]]:
        """Positions that stay, and those of them that stand in for others."""
        positions, worth = [token.position for token in head], self._priorities(head)
        self.margin = min(self.margin, selectors.margin(worth))
        if self.selector["name"] != "kvcrush":
            return {positions[j] for j in selectors.top(worth, self.budget)}, set()
        strong, standing = kvcrush.keep_tokens(self.selector, positions, worth, apart, self.budget)
        return {*strong, *standing}, set(standing)

    def _groups(self) -> int | None:
        """How many groups of coded slots the capacity asks for."""
        tokens = self.budget if self.capacity is None and self.decode == "evict" else self.capacity
        if self.codec is None or tokens is None:
            return None
        if tokens < self.codec["residual_length"] + self.codec["group_size"]:
            return 0
        return -(-(tokens - self.codec["residual_length"]) // self.codec["group_size"])

    def _tick(self) -> None:
        """Code the oldest exact tokens of every head whose exact part is full."""
        if self.codec:
            full = self.codec["residual_length"] + self.codec["group_size"]
            for h, head in enumerate(self.heads):
                if sum(token.read is None for token in head) >= full:
                    self._flush(h)

    def _settle(self) -> None:
        """Code all that does not fit the exact part after a prefill or chunk."""
        if self.codec:
            for h, head in enumerate(self.heads):
                self.coded[h].grow(self._groups() or 0)
                exact = sum(token.read is None for token in head)
                for _ in range(max(exact - self.codec["residual_length"], 0) // self.codec["group_size"]):
                    self._flush(h)

    def _flush(self, h: int) -> None:
        """Code the oldest group of exact tokens of one head."""
        part = self.coded[h]
        oldest = [token for token in self.heads[h] if token.read is None][: part.size]
        read = part.flush([t.position for t in oldest], [t.key for t in oldest], [t.value for t in oldest])
        for token, pair in zip(oldest, read, strict=True):
            token.read = pair
