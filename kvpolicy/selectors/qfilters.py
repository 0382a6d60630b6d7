"""Q-Filters: keep the tokens whose keys lie along the main direction of a head's queries."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from kvpolicy.protocols import SMALLEST_HEAD, DecodeMode, HeadShape, ModelInfo, Scored, State, View, scoped
from kvpolicy.selectors.filter_files import FILTER_FILES
from kvpolicy.statistics import Results, Statistic, Vectors
from kvpolicy.text.strategy import strategy, tiny_or


@scoped(filters="head")
class Filtered(NamedTuple):
    """The scores of the slots, and the filters that they come from.

    Attributes:
        score: Minus the product of the key and the filter, [B, H, S] fp32.
        filters: The filter of each head, [B, H, D] fp32. It lies here so that a step finds it on its device.
    """

    score: Tensor
    filters: Tensor


@strategy
class QFilters(Scored):
    """Keep the tokens whose keys have the largest product with the main direction of a head's queries.

    The queries of a head point mostly in one direction, whatever the text. A file has the opposite of this direction
    for every KV head of a model, its filter. A token is scored once, by its key alone: neither queries nor attention
    are needed.

    Args:
        file: The filter file, which `kvpolicy calibrate qfilters` writes, or `tiny` for that of the embedded model.
        decode: Whether generated tokens compete for the budget (`evict`) or are kept in addition to it (`grow`).

    Raises:
        KVPolicyError: If `file` is empty.

    Examples:
        >>> from kvpolicy import Policy
        >>> str(Policy.parse("qfilters:file=filters.safetensors@0.2"))
        'qfilters:file=filters.safetensors@0.2'

    Source:
        Q-Filters (arXiv:2503.02812), the authors' code (NathanGodey/qfilters) and kvpress (QFilterPress). Differences,
        beside those of `query_filters`:

        - Only the newest token is kept for its position. The authors' cache keeps a window of recent tokens, kvpress
          none.
        - The authors' filter files are not read, because they do not name their weights.
        - Equal scores keep the earlier token. Both leave them to `topk`.
        - Filters and scores are fp32 (kvpress: the dtype of the model).
        - In later prompts all candidates are scored again, which changes nothing unless a codec or a merger has changed
          their keys.
    """

    file: str = tiny_or("a file")
    decode: DecodeMode = "evict"

    nested_from: ClassVar[int | None] = 1

    @property
    def statistics(self) -> tuple[Statistic[Any], ...]:
        """The keys, of all tokens after a prompt and of each generated token."""
        return (Vectors(generated=True),)

    def check(self, model: ModelInfo) -> None:
        """Raise KVPolicyError if the filter file cannot be read, or is of another model."""
        FILTER_FILES.check(FILTER_FILES.load(self.file), self.file, model)

    def alloc(
        self, batch: int, heads: int, slots: int, device: torch.device | str, head: HeadShape = SMALLEST_HEAD
    ) -> State:
        """Scores of zero, and filters of zeros."""
        score = torch.zeros(batch, heads, slots, dtype=torch.float32, device=device)
        return Filtered(score, torch.zeros(batch, heads, head.head_dim, dtype=torch.float32, device=device))

    def observe(self, state: Filtered, seen: Results, view: View) -> State:
        """Score every candidate by its key."""
        keys = seen[Vectors].keys
        filters = self._filters(keys, view)
        return Filtered(-(keys.float() @ filters[..., None]).squeeze(-1), filters)

    def step(self, state: Filtered, row: Tensor, view: View) -> None:
        """Score a generated token by its key."""
        assert view.token is not None
        score = -(view.token.key.float() * state.filters[:, :, None]).sum(-1)  # [B, H, 1]
        state.score.copy_(torch.where(view.newest(1), score, state.score))

    def _filters(self, keys: Tensor, view: View) -> Tensor:
        """The filters of this rank's heads for every row of keys [B, H, N, D]: [B, H, D]."""
        filters = FILTER_FILES.load(self.file).filters[view.layer_idx]
        if len(filters) > 1:  # otherwise all heads share it
            filters = filters[view.ranks.held]
        every = filters.to(keys.device).expand(keys.shape[0], keys.shape[1], -1)
        return every.clone(memory_format=torch.contiguous_format)  # a state is written in place, a file never
