"""How the tokens of one KV head move: from the exact part to a codec's stages, and from one stage to the next."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from .coding import Codec, Coder, Given, Pair, Rotation, Token, as_it_is

T = TypeVar("T")


def in_blocks(items: Sequence[T], size: int) -> list[list[T]]:
    """Cut a list into blocks, of which the last may be shorter."""
    return [list(items[start : start + size]) for start in range(0, len(items), size)]


class Part:
    """The slots of one stage of one KV head: the position in each, None where it is dead."""

    def __init__(self, coder: Coder, group_size: int) -> None:
        """Start without slots."""
        self.coder = coder
        self.group_size = group_size
        self.slots: list[int | None] = []

    def grow(self, count: int) -> None:
        """Have `count` slots."""
        self.slots += [None] * (count - len(self.slots))

    def dead(self) -> list[int]:
        """The slots that may be taken, those of the emptiest group of slots first."""
        live = [sum(p is not None for p in group) for group in in_blocks(self.slots, self.group_size)]
        return sorted((s for s, p in enumerate(self.slots) if p is None), key=lambda s: (live[s // self.group_size], s))


@dataclass
class Head:
    """What one KV head holds.

    Attributes:
        tokens: All that is kept, ascending by position.
        parts: The stages.
        frozen: Positions of the tokens that were frozen, whether they are kept or not.
        atoms: Keys, in the codec's key space, and values of the frozen slots, [W, D]; None where nothing is frozen.
    """

    tokens: list[Token] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)
    frozen: set[int] = field(default_factory=set)
    atoms: Pair | None = None

    def drop(self, gone: set[int]) -> None:
        """Forget tokens; coded ones leave dead slots."""
        for token in self.tokens:
            if token.position in gone:
                self.leave(token)
        self.tokens = [token for token in self.tokens if token.position not in gone]

    def leave(self, token: Token) -> None:
        """Take a token out of its slot, if it has one."""
        if token.place is not None:
            stage, slot = token.place
            self.parts[stage].slots[slot] = None
            token.place = None

    def exact(self) -> list[Token]:
        """The tokens of the exact part that may ever leave it or make room in it: all but the frozen ones."""
        return [token for token in self.tokens if token.place is None and token.position not in self.frozen]

    def coded(self) -> list[Token]:
        """The tokens of all stages."""
        return [token for token in self.tokens if token.place is not None]


class Mover:
    """Moves the tokens of one row and layer as a codec asks.

    Attributes:
        codec: Which.
        pins: Positions of the first prompt that stay exact, but for those that are frozen.
        margin: How near any number that was coded came to a tie, of coders that say so.
    """

    def __init__(self, codec: Codec, layer_idx: int, heads: int, undo: Rotation, apply: Rotation) -> None:
        """Start with nothing; `undo` and `apply` are the rotary embedding of keys."""
        self.codec = codec
        self.undo, self.apply = (undo, apply) if codec.key_space == "unrotated" else (as_it_is, as_it_is)
        self.layer_idx = layer_idx
        self.pins = set[int]()
        self.head_dim = 0
        self.settled = False
        self.margin = math.inf
        self.query_absmax: list[Tensor | None] = [None] * heads
        self.query_square: list[Tensor | None] = [None] * heads
        self.heads: list[Head] = []

    def note_queries(self, queries: list[Tensor]) -> None:
        """Remember the largest |query| of each channel; queries [n, D] of each KV head's query heads together."""
        for h, some in enumerate(queries):
            self.head_dim = some.shape[-1]
            peak = some.abs().amax(0).float()
            old = self.query_absmax[h]
            self.query_absmax[h] = peak if old is None else torch.maximum(peak, old)

    def note_prompt(self, queries: list[Tensor]) -> None:
        """Remember the mean square of each channel of the newest queries [G, n, D] of each KV head in a prompt."""
        if self.codec.query_squares:
            newest = [some[:, -self.codec.query_squares :].double() for some in queries]
            self.query_square = [some.square().mean((0, 1)).float() for some in newest]

    def settle(
        self, heads: list[Head], order: Callable[[Head], list[Token]], tokens: int, seen: int, massive: set[int]
    ) -> None:
        """Code what does not fit the exact parts after a prompt.

        Args:
            heads: With the tokens that were chosen.
            order: All tokens of a head that may leave the exact part, in the order in which they leave.
            tokens: The most that the row may hold.
            seen: How many tokens there were so far.
            massive: Positions that hold the largest hidden numbers of this prompt.
        """
        self.heads = heads
        exact, coded = self.codec.layout(tokens)
        for h, head in enumerate(heads):
            for stage in range(len(head.parts), len(coded)):
                head.parts.append(Part(self.codec.coder(stage, self.layer_idx, h), self.codec.group_size))
            for part, count in zip(head.parts, coded, strict=False):
                part.grow(count)
        if not self.settled:
            self._pin(seen, massive, frozen=any(coded))
        if any(coded):
            for h, head in enumerate(heads):
                leaving = self._overflow(head, exact, order(head))
                if head.coded():
                    for some in in_blocks(leaving, self.codec.block):
                        self._place(h, 0, some, order)
                else:
                    self._fill(h, leaving)
        self.settled = True

    def tick(self, heads: list[Head], order: Callable[[Head], list[Token]], tokens: int) -> None:
        """Code a block of every head whose exact part is full, between two steps."""
        exact, coded = self.codec.layout(tokens)
        if not any(coded):
            return
        for h, head in enumerate(heads):
            if len(head.exact()) < exact - self._frozen(head):
                continue
            if self.codec.recode_all:
                for token in head.coded():
                    head.leave(token)
                self._fill(h, self._overflow(head, exact, order(head)))
            else:
                self._place(h, 0, [t for t in order(head) if t in head.exact()][: self.codec.block], order)

    def precise(self, head: Head, tokens: int) -> int:
        """How many tokens stay exact, or in the first of several stages, of a row of so many tokens."""
        exact, coded = self.codec.layout(tokens)
        return exact - self._frozen(head) - self.codec.block + (coded[0] if len(coded) > 1 else 0)

    def _pin(self, seen: int, massive: set[int], *, frozen: bool) -> None:
        """Fix what never leaves the exact part."""
        if self.codec.pins == "first":
            self.pins = set(range(min(self.codec.pinned, seen)))
        elif self.codec.pins == "massive":
            self.pins = massive
        elif self.codec.pins == "newest" and frozen and any(head.tokens for head in self.heads):
            for head in self.heads:
                newest = head.tokens[max(len(head.tokens) - self.codec.pinned, 0) :]
                head.frozen = {token.position for token in newest}
                pairs = [(self.undo(t.key.float(), t.position), t.value) for t in newest]
                zero = torch.zeros(self.head_dim)
                pairs += [(zero, zero)] * (self.codec.pinned - len(pairs))
                head.atoms = torch.stack([k for k, _ in pairs]), torch.stack([v.float() for _, v in pairs])

    def _frozen(self, head: Head) -> int:
        """Exact slots that no other token may use."""
        return 0 if head.atoms is None else self.codec.pinned

    def _overflow(self, head: Head, exact: int, order: list[Token]) -> list[Token]:
        """The tokens that leave the exact part after a prompt, in their order."""
        loose = head.exact()
        stays = exact - self._frozen(head) - self.codec.block
        count = max(len(loose) - stays, 0) // self.codec.group_size * self.codec.group_size
        return [token for token in order if token in loose][:count]

    def _fill(self, h: int, leaving: list[Token]) -> None:
        """Code the tokens of a head that has none coded: the last to leave in the first stage."""
        head = self.heads[h]
        stop = len(leaving)
        for stage, part in enumerate(head.parts):
            start = max(stop - len(part.slots), 0)
            self._write(h, stage, leaving[start:stop], list(range(stop - start)))
            stop = start
        assert stop == 0, "the stages have room for all"

    def _place(self, h: int, stage: int, tokens: list[Token], order: Callable[[Head], list[Token]]) -> None:
        """Code tokens in a stage; where it is full, its own go on to the next stage first.

        Where there are more tokens than the stage has slots at all, the first of them pass it by.
        """
        head = self.heads[h]
        part = self.heads[h].parts[stage]
        lacking = len(tokens) - len(part.dead())
        if lacking > 0:
            gone = [token for token in order(head) if token.place is not None and token.place[0] == stage][:lacking]
            for token in gone:
                head.leave(token)
            past = lacking - len(gone)
            self._place(h, stage + 1, gone + tokens[:past], order)
            tokens = tokens[past:]
        self._write(h, stage, tokens, part.dead()[: len(tokens)])

    def _write(self, h: int, stage: int, tokens: list[Token], slots: list[int]) -> None:
        if not tokens:
            return
        head = self.heads[h]
        part = self.heads[h].parts[stage]
        assert len(slots) == len(tokens), "a slot for every token"
        live = [position is not None for position in part.slots]
        given = Given(head.atoms, self.query_absmax[h], self.query_square[h])
        pairs = [t.stored or (self.undo(t.key.float(), t.position), t.value.float()) for t in tokens]
        for token, slot, (key, value) in zip(tokens, slots, part.coder.write(slots, pairs, live, given), strict=True):
            part.slots[slot] = token.position
            token.place = (stage, slot)
            token.stored = (key, value)
            token.read = self.apply(key, token.position).to(token.key.dtype), value.to(token.value.dtype)
        self.margin = min(self.margin, getattr(part.coder, "margin", math.inf))
