"""ReadAll: read every kept token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvpolicy.protocols import Index, ModelInfo, ReaderTraits
from kvpolicy.spec.validation import MAX_FIELD


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadAll:
    """Read every kept token in every decode step.

    This is the default reader of a policy. It has no index.

    Examples:
        >>> ReadAll().count(1000)
        1000
    """

    @property
    def traits(self) -> ReaderTraits:
        """Every layer reads everything."""
        return ReaderTraits(dense=MAX_FIELD)

    def page_size(self, slots: int) -> int:
        """Single slots."""
        return 1

    def count(self, slots: int) -> int:
        """All of them."""
        return slots

    def check(self, model: ModelInfo) -> None:
        """Every model is supported."""

    def alloc(
        self, batch: int, heads: int, entries: int, head_dim: int, dtype: torch.dtype, device: torch.device | str
    ) -> Index:
        """No index."""
        return ()

    def fit(self, index: Index, salience: Tensor, rows: Tensor) -> None:
        """No index."""

    def refresh(self, index: Index, entries: Tensor, keys: Tensor, occupied: Tensor) -> None:
        """No index."""

    def score(self, index: Index, queries: Tensor, products: Callable[[Tensor], Tensor]) -> Tensor:
        """The products themselves; not called, since every slot is read."""
        return products(queries)
