"""Reading keys and values back from the blocks of an engine, however its attention backend arranges them.

Every backend of vLLM writes tokens by `do_kv_cache_update`, and none has a counterpart that reads them. So a pattern of
numbers is written once to block 0, which vLLM reserves, and the place of each number is read from it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kvpolicy.text.errors import KVPolicyError

BASE = 64
"""Numbers are written digit by digit in this base: each digit is exact in every dtype of a cache."""

WriteSlots = Callable[[Tensor, Tensor, Tensor], None]
"""Writes keys and values [n, H, D] to slots [n] of a layer's cache."""


class BlockReader:
    """Reads the tokens of a layer from its blocks.

    Args:
        cache: The cache of the layer.
        blocks: How many blocks it has.
        shape: Tokens of a block, KV heads, and their dimension.
        write: Writes to it. The block 0 is written to and cleared.

    Raises:
        KVPolicyError: If what is written is not found again, as it is.
    """

    def __init__(self, cache: Tensor, blocks: int, shape: tuple[int, int, int], write: WriteSlots) -> None:
        """Look up the arrangement of a block."""
        self._cache = cache
        self._block_size = shape[0]
        self._dim = 0
        self._blocks = blocks
        for dim in [dim for dim, size in enumerate(cache.shape) if size and size % blocks == 0]:
            self._dim = dim
            found = self._lookup(shape, write)
            if found is not None:
                self._places = found
                return
        raise KVPolicyError(
            "The attention backend must store keys and values as they are for prompts to be compressed, got a cache "
            f"{list(cache.shape)} of {cache.dtype} that is another format; try --kv-cache-dtype auto, or another "
            "--attention-backend."
        )

    def read(self, blocks: Sequence[int], tokens: int) -> tuple[Tensor, Tensor]:
        """Keys and values [H, n, D] of the first tokens in some blocks."""
        at = torch.tensor(blocks[: -(-tokens // self._block_size)], device=self._cache.device)
        content = self._by_block()[at].flatten(1)
        # [blocks, 2, H, tokens of a block, D]
        keys, values = content[:, self._places].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :tokens]
        return keys, values

    def _by_block(self) -> Tensor:
        """The cache as [blocks, ...]; a block of the engine may be several of its backend."""
        return self._cache.unflatten(self._dim, (self._blocks, -1)).movedim(self._dim, 0)

    def _lookup(self, shape: tuple[int, int, int], write: WriteSlots) -> Tensor | None:
        """Places of keys and values in a flattened block, [2, H, tokens, D] int64; None if not all are there."""
        size, heads, dim = shape
        block = self._by_block()[0]
        dtype = self._cache.dtype
        device = self._cache.device
        slots = torch.arange(size, device=device)
        numbers = torch.arange(2 * size * heads * dim, device=device)
        found = torch.zeros(block.numel(), dtype=torch.int64, device=device)
        weight = 1
        while weight <= len(numbers):
            digits = (numbers // weight % BASE + 1).view(2, size, heads, dim).to(dtype)
            block.zero_()
            write(digits[0].contiguous(), digits[1].contiguous(), slots)
            read = block.flatten().double()
            if not bool(((read == read.round()) & (read >= 0) & (read <= BASE)).all()):
                block.zero_()
                return None
            found += torch.where(read > 0, read.long() - 1, -len(numbers)) * weight
            weight *= BASE
        block.zero_()
        at = (found >= 0).nonzero().flatten()
        places = torch.full_like(numbers, -1)
        if not bool((found[at] < len(numbers)).all()):
            return None
        places[found[at]] = at
        if len(at) != len(numbers) or bool((places < 0).any()):
            return None
        return places.view(2, size, heads, dim).transpose(1, 2).contiguous()
