"""Even: the same number of pages for every head."""

from __future__ import annotations

import torch
from torch import Tensor

from kvpolicy.allocators.heads import divide_pages
from kvpolicy.protocols import HeadAllocator, HeadRequest
from kvpolicy.text.strategy import strategy


@strategy
class Even(HeadAllocator):
    """Give every head of a layer the same budget, in whole pages.

    It keeps what an allocator without head budgets keeps, but for rounding to pages: a base to compare other head
    allocators with. If the pages are not divisible by the heads, the first heads get one page more.

    Examples:
        >>> from kvpolicy import Policy
        >>> str(Policy.parse("uniform/even+snapkv@0.2"))
        'uniform/even+snapkv@0.2'
    """

    def divide(self, request: HeadRequest) -> Tensor:
        ranks = request.view.ranks
        batch, own = request.priority.shape[:2]
        wished = torch.ones(batch, ranks.kv_heads(own), dtype=torch.float64, device="cpu")
        return divide_pages(wished, torch.zeros_like(request.pages), request)[:, ranks.held]
