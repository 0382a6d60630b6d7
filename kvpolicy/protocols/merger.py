"""The interface of a merger: what becomes of a token that is not kept."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from kvpolicy.protocols.selector import State
from kvpolicy.statistics.ranks import SINGLE_RANK, Ranks
from kvpolicy.statistics.statistic import Statistic


class MergerTraits(NamedTuple):
    """Properties of a merger that the engine must know.

    Attributes:
        when: `never`: evicted tokens are dropped. `prompt`: kept tokens are changed at the end of a prompt or chunk.
            `always`: also whenever a token is evicted in decoding.
        counted: Whether a slot may stand for several tokens. Each slot then stores the logarithm of their number, 0
            for a single token, which attention adds to the slot's score.
        ranked: Whether the merger is given the selector's priorities.
        compares: Whether `merge_token` looks at keys and values of other slots than the one that it writes. Where heads
            have budgets of their own, each head is given the slots of all heads of a row, and such a merger is refused.
    """

    when: Literal["never", "prompt", "always"] = "never"
    counted: bool = False
    ranked: bool = False
    compares: bool = False


class Candidates(NamedTuple):
    """All tokens of a layer after a prompt: its slots and the new tokens, in any order.

    Attributes:
        keys: As attention takes them, [B, H, N, D]; read from codes where a token is coded.
        values: [B, H, N, D].
        positions: Original positions, [B, H, N] int32, -1 where there is no token.
        kept: Which tokens are kept, [B, H, N] bool; the other tokens are evicted now.
        targets: Index of the kept tokens that are not coded, by ascending position, [B, H, T] int64.
        is_target: Which entries of `targets` name a token, [B, H, T] bool; the others repeat one.
        counts: Logarithm of the number of tokens that each one stands for, [B, H, N] fp32; None unless counted.
        attention: Attention weights of the newest W queries over all N tokens, [B, Hq, W, N] fp32, rows of zeros where
            a batch row has fewer; None unless `RecentQueries` are asked for.
        length: Tokens that each row has seen, [B] int64.
        priority: The selector's priority of each token, [B, H, N] fp32; None unless ranked.
        ranks: The ranks that hold the model's other heads.
        replay_attention: Attention weights of W queries of the replay over all N tokens, [B, Hq, W, N] fp32, without
            the replay's own tokens; rows of zeros where a batch row has fewer, as in later prompts. None unless
            `ReplayedRows` are asked for, and where nothing was replayed.
        sinks: The weight of the learned sink in each row of `attention`, [B, Hq, W] fp32; None if there is none.
        replay_sinks: The same of `replay_attention`.
    """

    keys: Tensor
    values: Tensor
    positions: Tensor
    kept: Tensor
    targets: Tensor
    is_target: Tensor
    counts: Tensor | None = None
    attention: Tensor | None = None
    length: Tensor | None = None
    priority: Tensor | None = None
    ranks: Ranks = SINGLE_RANK
    replay_attention: Tensor | None = None
    sinks: Tensor | None = None
    replay_sinks: Tensor | None = None

    @property
    def evicted(self) -> Tensor:
        """Which tokens are evicted, [B, H, N] bool."""
        return (self.positions >= 0) & ~self.kept

    def at_targets(self, t: Tensor) -> Tensor:
        """The entries of `t`, [B, H, N] or [B, H, N, D], that belong to the targets, [B, H, T] or [B, H, T, D]."""
        if t.dim() == 3:
            return t.gather(2, self.targets)
        return t.gather(2, self.targets[..., None].expand(-1, -1, -1, t.shape[-1]))


class Merged(NamedTuple):
    """Contents of the targets after a merge.

    Attributes:
        values: [B, H, T, D].
        keys: [B, H, T, D]; None if they stay as they are.
        counts: [B, H, T] fp32; None if they stay as they are.
    """

    values: Tensor
    keys: Tensor | None = None
    counts: Tensor | None = None


class Tokens(NamedTuple):
    """Tokens of each head: a victim, or the full-precision slots that it may be merged into.

    Attributes:
        keys: As attention takes them, [B, H, n, D].
        values: [B, H, n, D].
        positions: Original positions, [B, H, n] int32.
        counts: Logarithm of the number of tokens that each one stands for, [B, H, n] fp32; None unless counted.
        there: Whether a victim is evicted, or whether a slot may be a target, [B, H, n] bool. Other entries are
            undefined.
        priority: The selector's priority of the token in each slot, [B, H, n] fp32; None unless ranked.
    """

    keys: Tensor
    values: Tensor
    positions: Tensor
    counts: Tensor | None
    there: Tensor
    priority: Tensor | None = None


class Merge(NamedTuple):
    """One slot of each head that takes in a victim.

    Attributes:
        slot: Index of the slot, [B, H, 1] int64.
        write_mask: Whether the slot is written, [B, H, 1] bool; where it is not, the victim is dropped.
        values: The slot's new value, [B, H, 1, D].
        keys: Its new key, [B, H, 1, D]; None if it stays as it is.
        counts: Its new count, [B, H, 1] fp32; None if it stays as it is.
    """

    slot: Tensor
    write_mask: Tensor
    values: Tensor
    keys: Tensor | None = None
    counts: Tensor | None = None


@runtime_checkable
class Merger(Protocol):
    """What becomes of a token that is not kept?

    A merger changes kept tokens in favor of evicted ones. It changes tokens in full precision only: those of the
    full-precision buffer, and the tokens of a prompt before they are coded. Coded tokens can be victims, but not
    targets, because the codes of a block can not be written one by one.

    A class that inherits from it drops evicted tokens, but for what it overrides: `traits` and `merge_prompt` for a
    merger of prompts. An object that has all members is accepted whatever its class.
    """

    __slots__ = ()

    @property
    def traits(self) -> MergerTraits:
        """Properties that the engine must know; by default, nothing is merged."""
        return MergerTraits()

    @property
    def statistics(self) -> tuple[Statistic[Any], ...]:
        """The statistics of a prompt that this merger needs; by default none.

        `RecentQueries`, or `Replay` with `ReplayedRows`.
        """
        return ()

    def alloc(self, batch: int, heads: int, device: torch.device | str) -> State:
        """The state of each head, tensors [B, H, ...]; by default there is none."""
        return ()

    def merge_prompt(self, state: State, candidates: Candidates) -> Merged:
        """Merge all evicted tokens of a prompt at once; `state` is updated in place.

        A head without an evicted token must come out as it is, bit for bit, and so must entries of
        `Candidates.targets` that are no target. By default all do.
        """
        return Merged(candidates.at_targets(candidates.values))

    def merge_token(self, state: State, victim: Tokens, slots: Tokens) -> Merge:
        """Merge the token that a decode step evicts from each head, before its slot is overwritten.

        Traceable, without a synchronization with the host. `state` is updated in place, in the heads with a victim.

        Args:
            state: The state.
            victim: One token of each head.
            slots: The full-precision buffer.

        By default nothing is merged.
        """
        slot = torch.zeros_like(victim.positions, dtype=torch.int64)
        return Merge(slot, torch.zeros_like(victim.there), slots.values[:, :, :1])
