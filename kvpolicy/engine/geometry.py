"""How the slots of a layer are arranged: equally many in every head, or in pages that belong to single heads.

A `LayerStore` says what happens to a layer, and its geometry where: `SlotGeometry` or `PageGeometry`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from kvpolicy.engine.attention_part import Part
from kvpolicy.engine.layer_tensors import LayerTensors
from kvpolicy.engine.link import Link, StepBytes
from kvpolicy.engine.merging import SlotMerge
from kvpolicy.engine.prefill import PendingPrompt
from kvpolicy.engine.row_limits import RowBudget
from kvpolicy.engine.token_batch import SlotData
from kvpolicy.engine.undo_log import Targets
from kvpolicy.protocols import LayerShape, Layout, State, View
from kvpolicy.statistics.windows import Past, ScoreTransform


class Geometry(Protocol):
    """The arrangement of the slots of one layer. Slots of a head are named as the geometry counts them."""

    def alloc(self, batch: int, shape: LayerShape, device: torch.device | str) -> LayerTensors:
        """Empty tensors for the sizes that are set; on the device `meta` too."""
        ...

    def find_layout(self) -> Layout:
        """The layout, from the tensors where they determine it."""
        ...

    def compress(self, pending: PendingPrompt, budget: RowBudget, *, massive: Tensor | None = None) -> None:
        """Bring a prompt under the budget: select, make slots, and place the selected tokens.

        Args:
            pending: The prompt, from `LayerStore.attend_prompt`.
            budget: Tokens of each row.
            massive: The prompt's tokens with the largest activations, [B, P] bool, if the codec pins them.
        """
        ...

    def past(self) -> Past | None:
        """Every slot, decoded; None if there are none."""
        ...

    def held_slots(self) -> tuple[Tensor, State]:
        """Positions of the slots of each head, [B, H, S] int32, and the selector's state of them."""
        ...

    # a decode step, traceable

    def free_slot(self, view: View, valid: Tensor | None) -> tuple[Tensor, SlotMerge | None]:
        """Find a slot for each head's new token, evicting one where the budget is full.

        Args:
            view: The slots.
            valid: Which rows have a token, [B, 1] bool; None if all have.

        Returns:
            The slots, [B, H, 1] int64, and the slot that takes in the evicted token, if tokens are merged in steps.
        """
        ...

    def write(self, slots: Tensor, data: SlotData, mask: Tensor | None) -> None:
        """Write new tokens to slots, in place.

        Args:
            slots: From `free_slot`, [B, H, n] int64.
            data: The tokens.
            mask: Which of the slots are written, [B, H, n] bool; None for all.
        """
        ...

    def attend(self, q: Tensor, transform: ScoreTransform, want_weights: bool) -> tuple[Tensor, Tensor | None]:
        """Attend from one token per row [B, Hq, 1, D].

        Returns:
            The output [B, Hq, 1, D], and the attention weights of all slots in fp32 if they are wanted, else None.
        """
        ...

    def attend_part(self, queries: Tensor, transform: ScoreTransform, *, whole: bool) -> Part:
        """Attend from many queries of each head to every slot, of a layer with one row.

        Args:
            queries: [1, H, M, D].
            transform: From products to scores; without sinks.
            whole: Whether every slot holds a token.

        Returns:
            The output [1, H, M, D], and the normalizer [1, H, M].
        """
        ...

    def count_read(self, link: Link) -> None:
        """Count on `link` what a decode step reads."""
        ...

    # taking steps back

    def step_targets(self) -> Targets:
        """The tensors that a decode step writes to, by name, and the slots of each head."""
        ...

    def refresh(self, slots: Tensor) -> None:
        """Update what is computed from slots [B, H, n] after they were written back."""
        ...

    # between steps

    def full_rows(self) -> Tensor | None:
        """Rows with a head whose full-precision buffer is full, so that a block must be demoted, [B] bool.

        None if no codec demotes tokens.
        """
        ...

    def demote(self) -> None:
        """Demote a block of every head with a full buffer."""
        ...

    def count_free_steps(self) -> float:
        """Decode steps until tokens must be demoted, or slots added."""
        ...

    def tokens_needed(self) -> list[int]:
        """Tokens that each row must be given slots for before the next step."""
        ...

    def tokens_lacking(self, new: int) -> list[int]:
        """Tokens that each row must be given slots for so that `new` more fit at once."""
        ...

    def extend(self, more: list[int]) -> int:
        """Give each row slots for so many tokens more; in a growing cache they raise the budget too.

        Returns:
            How many tokens were added to the longest row.
        """
        ...

    # what is held

    def tokens_by_head(self) -> Tensor:
        """Tokens that each head holds, [B, H] int64."""
        ...

    def tokens_counted(self) -> Tensor:
        """Tokens of each row that its budget is taken up by, [B] int64."""
        ...

    def head_positions(self) -> Tensor:
        """Positions of the tokens of each head, [B, H, n] int32, -1 for an empty slot."""
        ...

    def describe(self) -> str:
        """The slots, as a `repr` shows them."""
        ...

    def fix_addresses(self) -> None:
        """Tell the compiler what stays of every tensor, after any of them was replaced."""
        ...

    def numbers(self) -> dict[str, Any]:
        """The numbers of the layer on the host, as JSON values."""
        ...

    def set_numbers(self, numbers: Mapping[str, Any]) -> None:
        """Restore the result of `numbers`."""
        ...


def step_bytes(geometry: Geometry, host: bool = False) -> StepBytes:
    """Bytes that a decode step moves of a layer, whose tensors may be on the device meta.

    Args:
        geometry: The slots of the layer.
        host: Whether its keys and values lie in host memory.
    """
    link = Link(host)
    link.start()
    geometry.count_read(link)
    return link.counted
