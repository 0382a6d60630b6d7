"""Journal of a cache: what its forwards changed, so far as it can be taken back; `taking_back.py` does so."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import DynamicSlidingWindowLayer

from kvpolicy.engine.journal import crop_obstacle
from kvpolicy.engine.state import map_numbers
from kvpolicy.hf.layer import PolicyLayer
from kvpolicy.hf.seen_text import KnownTokens, extend_digest
from kvpolicy.hf.states import copied_states
from kvpolicy.planning.memory import layer_spec
from kvpolicy.planning.result import CachePlan
from kvpolicy.policy import Policy
from kvpolicy.text.errors import KVPolicyStateError

REMEMBERED = 64
"""Prompts and chunks that a cache remembers, so that a long conversation does not fill the host's memory."""


class Rows(NamedTuple):
    """Lengths and mask digests of a cache's rows, on the host.

    Attributes:
        columns: Columns seen.
        length: Tokens that each row has seen.
        digest: Digest of the columns that each row has seen.
    """

    columns: int
    length: list[int]
    digest: list[int]

    def after(self, columns: int, valid: Tensor | None) -> Rows:
        """Rows after `columns` more columns, of which `valid` [B, columns] are not padding; all if it is None."""
        digest = torch.tensor(self.digest, device="cpu")
        extend_digest(digest, valid, columns)
        added = torch.tensor(columns, device="cpu") if valid is None else valid.sum(-1)
        return Rows(self.columns + columns, (torch.tensor(self.length, device="cpu") + added).tolist(), digest.tolist())

    def map_rows(self, fn: Callable[[Tensor], Tensor]) -> Rows:
        """Select or repeat rows."""
        length, digest = (map_numbers(fn, rows) for rows in (self.length, self.digest))
        return Rows(self.columns, length, digest)


class PromptEntry(NamedTuple):
    """A forward of a prompt or chunk, which is taken back by emptying slots.

    Attributes:
        before: The rows before it.
        columns: Its columns.
        valid: Which of them are not padding, one byte for each column of a row; None if all are.
        end: Announced tokens of each row at the end, as known before; None if unknown.
        plan: The cache's plan before.
        rope_deltas: Offset of the positions behind each row's pictures before, or None.
    """

    before: Rows
    columns: int
    valid: tuple[bytes, ...] | None
    end: list[int] | None
    plan: CachePlan | None
    rope_deltas: list[int] | None

    def map_rows(self, fn: Callable[[Tensor], Tensor]) -> PromptEntry:
        """Select or repeat rows."""
        deltas = None if self.rope_deltas is None else map_numbers(fn, self.rope_deltas)
        end = None if self.end is None else map_numbers(fn, self.end)
        valid = self.valid
        if valid is not None:
            valid = tuple(valid[row] for row in fn(torch.arange(len(valid), device="cpu")).tolist())
        return PromptEntry(self.before.map_rows(fn), self.columns, valid, end, self.plan, deltas)

    def first_valid(self, columns: int) -> Tensor | None:
        """Which of its first columns are not padding, [B, columns] bool; None if all are."""
        if self.valid is None or all(0 not in row[:columns] for row in self.valid):
            return None
        return torch.tensor([list(row[:columns]) for row in self.valid], device="cpu").bool()

    def rows_after(self, columns: int) -> Rows:
        """The rows after its first columns."""
        return self.before.after(columns, self.first_valid(columns))


class StepEntry(NamedTuple):
    """The changes of a decode step in the layers that no policy manages, by their index.

    Attributes:
        states: Copies of states.
        windows: Keys and values [B, H, 1, D] of the token that leaves a sliding window; empty if none does.
    """

    states: dict[int, list[Tensor]]
    windows: dict[int, tuple[Tensor, ...]]

    @classmethod
    def of(cls, layers: Sequence[Any]) -> StepEntry:
        """Copy what the step that begins changes."""
        return cls(copied_states(layers), {index: _leaving(window) for index, window in windows_of(layers).items()})

    def undo(self, layers: Sequence[Any]) -> None:
        """Undo the step, the newest one that is not undone."""
        for index, copies in self.states.items():
            layers[index].restore_states(copies)
        for index, oldest in self.windows.items():
            layer = layers[index]
            keys, values = (t[:, :, :-1] for t in (layer.keys, layer.values))
            if oldest:
                keys, values = (torch.cat(pair, 2) for pair in zip(oldest, (keys, values), strict=True))
            layer.keys = keys.clone()
            layer.values = values.clone()
            layer.cumulative_length -= 1

    def nbytes(self, index: int) -> int:
        """Bytes that are kept of a layer."""
        return sum(t.nbytes for t in (*self.states.get(index, ()), *self.windows.get(index, ())))


class Mark(NamedTuple):
    """A mark to which a cache can go back; each layer under the policy has a journal of its own.

    Attributes:
        most: The most tokens of each row until a rollback.
        columns: Columns seen at the mark.
        steps: Eager steps since then.
    """

    most: int
    columns: int
    steps: list[StepEntry]


class Journal:
    """The decode steps since a mark, or the prompts and the tokens behind them, which a cache can take back.

    Attributes:
        obstacle: What keeps tokens from being taken back without a mark; empty if nothing does.
        mark: The mark that is held; None without.
        prompts: The last prompts and chunks, the latest last; empty if there is an obstacle.
        is_shared: Whether other caches share the slots, so that nothing may change them.
        known: The token ids of the first columns, where a file told them; else None.
        is_whole: Whether the last prompt was added whole, beyond the budget.
    """

    def __init__(self, obstacle: str, known: KnownTokens | None = None) -> None:
        """Nothing to take back."""
        self.obstacle = obstacle
        self.known = known
        self.mark: Mark | None = None
        self.prompts: list[PromptEntry] = []
        self.is_shared = False
        self.is_whole = False

    def begun(self, columns: int) -> Journal:
        """The journal of a cache that has only the first columns, as one behind a shared prefix after a reset."""
        return Journal(self.obstacle, None if self.known is None else self.known.first(columns))

    def map_rows(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Select or repeat rows."""
        self.prompts = [prompt.map_rows(fn) for prompt in self.prompts]
        self.known = None if self.known is None else self.known.map_rows(fn)

    def forget(self) -> None:
        """Forget what refers to columns, which an edit has changed: a crop is refused then, and no ids are compared."""
        self.prompts = []
        self.known = None

    def nbytes(self, index: int) -> int:
        """Bytes that are kept of a layer which no policy manages."""
        return 0 if self.mark is None else sum(step.nbytes(index) for step in self.mark.steps)

    # what must not change

    def refuse_marked(self, what: str) -> None:
        """Refuse what a rollback could not undo."""
        if self.mark is not None:
            raise KVPolicyStateError(
                f"{what} must be called without a mark, which could not undo it, got a mark that is held with "
                f"{len(self.mark.steps)} token(s) fed; try cache.rollback(accepted) first."
            )

    def refuse_changes(self, what: str) -> None:
        """Refuse what would change slots that other caches share, or that a rollback could not undo."""
        self.refuse_marked(what)
        self.refuse_shared(what)

    def refuse_shared(self, what: str) -> None:
        """Refuse what would change slots that other caches share."""
        if self.is_shared:
            raise KVPolicyStateError(
                f"{what} must not change a cache whose slots other caches share, got one after fork(shared=True); try "
                "cache.fork() for a copy, or cache.reset() for another prompt."
            )

    # a forward that is about to begin

    def note_step(self, layers: Sequence[Any]) -> None:
        """Note a decode step, or refuse it.

        Args:
            layers: All layers of the cache.
        """
        self.refuse_shared("A forward")
        if self.mark is None:
            return
        if len(self.mark.steps) >= self.mark.most:
            raise KVPolicyStateError(
                f"At most {self.mark.most} tokens must be fed under this mark, got one more; try "
                "cache.rollback(accepted) first, or a mark with a larger most."
            )
        self.mark.steps.append(StepEntry.of(layers))

    def note_prompt(
        self,
        layers: Sequence[PolicyLayer],
        new: int,
        seen: Tensor,
        valid: Tensor | None,
        end: list[int] | None,
        plan: CachePlan | None,
    ) -> None:
        """Note a prompt or chunk, or refuse it.

        Args:
            layers: The layers under the policy.
            new: Its columns.
            seen: Tokens that each row has seen, [B].
            valid: Which of the new tokens are not padding, [B, P] bool; None if all are.
            end: Announced tokens of each row at the end, as known so far.
            plan: The plan of the cache so far.
        """
        self.refuse_shared("A forward")
        if self.mark is not None:
            raise KVPolicyStateError(
                f"Tokens must be fed one at a time under a mark, got {new} at once; try cache.rollback(accepted) first."
            )
        if self.obstacle:
            return
        first = layers[0]
        digest = torch.zeros_like(seen) if first.mask_digest is None else first.mask_digest
        before = Rows(first.get_seq_length(), seen.tolist(), digest.tolist())
        rows = None if valid is None or bool(valid.all()) else tuple(bytes(row) for row in valid.byte().tolist())
        self.prompts = [*self.prompts, PromptEntry(before, new, rows, end, plan, first.rope_deltas)][-REMEMBERED:]
        oldest = self.prompts[0].before.columns
        if oldest and len(self.prompts) == REMEMBERED:
            for layer in layers:
                layer.store.journal.forget_sizes(oldest)


def obstacle_of(policy: Policy, states: Collection[int] = ()) -> str:
    """Name what keeps tokens from being taken back while nothing is evicted; empty if nothing does.

    Args:
        policy: The policy of the cache.
        states: The layers with a state.
    """
    if states:
        return f"the state of layer {min(states)}, which holds no earlier one"
    if policy.layer_metric:
        return f"the allocator {policy.allocator}, which measures the first prompt of a row"
    found = (crop_obstacle(layer_spec(own, 0)) for own in policy.distinct)
    return next(filter(None, found), "")


def windows_of(layers: Sequence[Any]) -> dict[int, DynamicSlidingWindowLayer]:
    """The sliding windows that have seen a token, by layer."""
    found = ((index, layer) for index, layer in enumerate(layers) if isinstance(layer, DynamicSlidingWindowLayer))
    return {index: layer for index, layer in found if layer.is_initialized}


def records_past(window: DynamicSlidingWindowLayer) -> bool:
    """Whether a window keeps what leaves it until a crop."""
    return getattr(window, "record_past", False)


def _leaving(window: DynamicSlidingWindowLayer) -> tuple[Tensor, ...]:
    """Keys and values of the token that the next one pushes out of a window."""
    assert window.keys is not None and window.values is not None
    # transformers keeps one token less than the window, so that from there on each step pushes one out, unless the
    # layer records its past. Cloned, since a slice would keep the whole window alive.
    is_full = window.keys.shape[2] >= window.sliding_window - 1 and not records_past(window)
    return (window.keys[:, :, :1].clone(), window.values[:, :, :1].clone()) if is_full else ()
