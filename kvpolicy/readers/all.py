"""ReadAll: read every kept token."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from kvpolicy.protocols import Index, Reader, ReaderTraits
from kvpolicy.text.limits import MAX_FIELD
from kvpolicy.text.strategy import strategy


@strategy
class ReadAll(Reader):
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

    def score(self, index: Index, queries: Tensor, products: Callable[[Tensor], Tensor]) -> Tensor:
        """The products themselves; not called, since every slot is read."""
        return products(queries)
