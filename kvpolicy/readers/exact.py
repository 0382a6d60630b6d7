"""ExactTopK: read the values of the tokens with the largest attention."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from kvpolicy.protocols import Index, ReaderTraits
from kvpolicy.readers.common import Amount, TokenReader, amount
from kvpolicy.text.strategy import least, strategy


@strategy
class ExactTopK(TokenReader):
    """Read every key, and the values of the tokens with the largest attention weights.

    A decode step computes all scores, and attends to the `read` tokens that a KV head's query heads weight most. It
    saves half of what a step moves at best. It is the upper bound of every reader that estimates these weights, and
    what such a reader is compared with.

    Args:
        read: How many tokens each KV head reads in a step (int), or the fraction of the layer's slots (float).
        dense: How many of the model's first layers read everything.
        recent: The newest tokens that are always read; the newest one and the first kept one always are.

    Raises:
        KVPolicyTypeError: If a value is of another type.
        KVPolicyError: If a value is out of range.

    Examples:
        >>> ExactTopK(read=0.05).count(1000)
        50

    Source:
        the oracle that papers on sparse decoding compare with, such as Quest (Tang et al., ICML 2024,
        arXiv:2406.10774), Figure 3. Differences:

        - There is one set of tokens per KV head. A token is as needed as the query head that weights it most says,
          where the weights are normalized over all slots first.
        - Ties go to the earlier position.
        - With a codec, all keys are decoded to score them.
    """

    read: Amount = amount(0.05)
    dense: int = least(0, 0)
    recent: int = least(1, 1)

    @property
    def traits(self) -> ReaderTraits:
        """Every key is read."""
        return ReaderTraits(dense=self.dense, recent=self.recent, scan=self)

    @property
    def is_whole(self) -> bool:
        """Yes: whole keys are read."""
        return True

    def channels_read(self, head_dim: int) -> int:
        """All channels."""
        return head_dim

    def score(self, index: Index, queries: Tensor, products: Callable[[Tensor], Tensor]) -> Tensor:
        """The products with every key, [B, H, G, S] fp32."""
        return products(queries)
