"""AdaKV: more budget for heads whose attention is spread over many tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from kvpolicy.allocators.heads import divide_pages, sorted_by_head
from kvpolicy.protocols import HeadAllocator, HeadRequest
from kvpolicy.text.strategy import between, strategy


@strategy
class AdaKV(HeadAllocator):
    """Give more budget to heads whose attention is spread over many tokens.

    The tokens of all heads of a layer are ranked together by the selector's priority. A head gets budget in proportion
    to how many of its tokens are among the highest, as many as the layer can keep. A fraction of an equal share is safe
    from this competition.

    Args:
        safeguard: Fraction of an equal share that every head keeps, in [0, 1]; 1 gives every head the same budget.

    Examples:
        >>> from kvpolicy import Policy
        >>> str(Policy.parse("uniform/adakv:safeguard=0.5+snapkv@0.2"))
        'uniform/adakv:safeguard=0.5+snapkv@0.2'

    Source:
        AdaKV (arXiv:2407.11550), Algorithm 1, in the form in which the best tokens of each head are safe before the
        others compete, so that the total is exact. Differences:

        - `safeguard` is 0.2, which the authors use with grouped-query attention (their default is 0.5);
        - the authors' code mixes the two shares after the competition and rounds each head by itself, which loses a few
          tokens;
        - a head's budget is rounded to whole pages of 4 to 64 tokens;
        - the ranking is the selector's own, whatever the selector, with its window, which every head keeps;
        - each chunk or turn divides the budget again, among the tokens that are left.
    """

    safeguard: float = between(0, 1, 0.2)

    @property
    def compares_heads(self) -> bool:
        """Tokens of different heads compete."""
        return True

    def divide(self, request: HeadRequest) -> Tensor:
        ranks = request.view.ranks
        ranked = sorted_by_head(request)
        every = ranks.all_heads(ranked)
        counts = self._winners(every, request.pages * request.size)
        # What a selector always keeps, such as its window, must fit into every head.
        protected = ranks.all_heads((ranked == torch.inf).sum(-1)).amax(-1)
        return divide_pages(counts.double(), protected, request)[:, ranks.held]

    def _winners(self, ranked: Tensor, total: Tensor) -> Tensor:
        """How many tokens of each head are among the `total` [B] best of the layer, of [B, H, N] in falling order."""
        heads = ranked.shape[1]
        safe = (total.double() * self.safeguard / heads + 1e-9).long()
        number = torch.arange(ranked.shape[-1], device=ranked.device)
        competing = ranked.masked_fill((number < safe[:, None, None]) & (ranked > -torch.inf), torch.inf)
        # Stable: of equal priorities the lower head wins, and in a head the earlier token.
        order = competing.flatten(1).argsort(dim=-1, descending=True, stable=True)
        place = torch.arange(order.shape[-1], device=order.device)
        wins = torch.zeros_like(order, dtype=torch.bool).scatter_(-1, order, place < total[:, None])
        return (wins.unflatten(1, ranked.shape[1:]) & (ranked > -torch.inf)).sum(-1)
