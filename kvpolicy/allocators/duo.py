"""DuoAttention: heads that need the whole context share the budget, the others keep sinks and recent tokens."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from kvpolicy.allocators.head_files import HEAD_FILES, HeadFile, Table
from kvpolicy.protocols import HeadAllocator, HeadRequest, ModelInfo
from kvpolicy.text.errors import KVPolicyError
from kvpolicy.text.strategy import AutoInt, between, least, strategy, tiny_or

SINKS = 64
RECENT = 256
"""Tokens of a streaming head if neither the file nor an option sets them, as the authors deploy it."""


@strategy
class DuoAttention(HeadAllocator):
    """Give streaming heads the room of sinks and recent tokens, and the other heads the rest.

    Some heads retrieve tokens from anywhere in the context; most attend to the first and the newest tokens alone, and
    lose little without the others. A file has a score for every KV head of a model; those of the lowest scores are
    streaming heads. The retrieval heads of a layer share what its streaming heads leave.

    Args:
        file: The head file: JSON of `kvpolicy calibrate heads`, the `.tsv` of the authors or its folder, JSON of
            HeadKV, or `tiny` for that of the embedded model.
        sparsity: Fraction of all heads that are streaming heads, in [0, 1].
        sinks: First tokens that a streaming head has room for; `auto` is what the file says, or 64.
        recent: Newest tokens that a streaming head has room for; `auto` is what the file says, or 256.

    Raises:
        KVPolicyError: If `sparsity` is not a fraction, `sinks` is negative, or `recent` is below 1.

    Examples:
        >>> from kvpolicy import Policy
        >>> str(Policy.parse("uniform/duo:file=heads.json:sparsity=0.75+streaming:sinks=64@0.4"))
        'uniform/duo:file=heads.json:sparsity=0.75+streaming:sinks=64@0.4'

    Source:
        DuoAttention (arXiv:2410.10819) and its authors' code. Differences:

        - which tokens a head keeps is the selector's choice within the head's room: with `streaming` and as many sinks
          as the file has, a streaming head keeps what the paper says, with another selector it keeps the best tokens of
          that selector;
        - the budget of a layer is given, and never exceeded: retrieval heads keep the whole context only if it fits
          into what streaming heads leave;
        - where a budget is too small, a streaming head gets no more than an equal share; where retrieval heads cannot
          use more, or a layer has none, the rest is divided evenly among the streaming heads, as the size of a layer
          does not depend on the file;
        - room is rounded up to whole pages of 4 to 64 tokens, and holds at least what the selector always keeps (there,
          heads are reordered into two groups of different size);
        - prefill attention is never restricted (the authors restrict that of later chunks to what streaming heads
          keep);
        - with `decode=evict`, full retrieval heads evict as well; with `decode=grow`, streaming heads grow as well;
        - of equal scores the earlier layer and the lower head retrieve (the authors add random noise of 1e-6);
        - the authors train scores on retrieval tasks; `kvpolicy calibrate heads` estimates them, as kvpress does, or by
          the probe of RazorAttention.
    """

    file: str = tiny_or("a file")
    sparsity: float = between(0, 1, 0.5)
    sinks: AutoInt = least(0, "auto")
    recent: AutoInt = least(1, "auto")

    def check(self, model: ModelInfo) -> None:
        """Raise KVPolicyError if the head file cannot be read, or is of another model."""
        HEAD_FILES.check(self._scores(), self.file, model)

    def streaming_heads(self, heads: int) -> tuple[tuple[bool, ...], ...]:
        """Which of the `heads` KV heads of each layer of the model are streaming heads."""
        return _lowest(self._scores().by_head(heads), self.sparsity)

    def divide(self, request: HeadRequest) -> Tensor:
        ranks = request.view.ranks
        # What a selector always keeps, such as its window, must fit into every head.
        protected = ranks.all_heads((request.priority == torch.inf).sum(-1)).amax(-1)
        content = self._scores()
        sinks, recent = (
            found if found is not None else default
            for found, default in (
                (content.sinks if self.sinks == "auto" else self.sinks, SINKS),
                (content.recent if self.recent == "auto" else self.recent, RECENT),
            )
        )
        room = protected.clamp_min(sinks + recent)
        streams = self.streaming_heads(ranks.kv_heads(request.priority.shape[1]))[request.view.layer_idx]
        columns = (room, request.pages, request.size, request.most)
        rows = [_pages_of_row(streams, *row) for row in zip(*(column.tolist() for column in columns), strict=True)]
        return request.pages.new_tensor(rows)[:, ranks.held]

    def _scores(self) -> HeadFile:
        """The head file, which must have scores."""
        content = HEAD_FILES.load(self.file)
        if content.kind != "score":
            raise KVPolicyError(
                f"The head file {self.file!r} must have scores of heads, got shares of the tokens; try kvpolicy "
                "calibrate heads."
            )
        return content


@functools.lru_cache(maxsize=8)
def _lowest(scores: Table, sparsity: float) -> tuple[tuple[bool, ...], ...]:
    """Which heads are below the quantile `sparsity` of all scores; of equal ones, the later are."""
    places = [(score, -layer, -head) for layer, row in enumerate(scores) for head, score in enumerate(row)]
    # As many as are below the quantile that NumPy interpolates between the ranks from 0 to len - 1.
    count = len(places) if sparsity >= 1 else math.ceil(sparsity * (len(places) - 1) - 1e-9)
    lowest = {(-layer, -head) for _, layer, head in sorted(places)[: max(count, 0)]}
    return tuple(tuple((layer, head) in lowest for head in range(len(row))) for layer, row in enumerate(scores))


def _pages_of_row(streams: tuple[bool, ...], room: int, pages: int, size: int, most: int) -> list[int]:
    """Pages of each head of a layer, where streaming heads have room for `room` tokens, as far as there is.

    Examples:
        >>> _pages_of_row((True, False, False, True), room=20, pages=33, size=8, most=100)
        [3, 14, 13, 3]
        >>> _pages_of_row((True, False, False, True), room=20, pages=33, size=8, most=8)
        [9, 8, 8, 8]
    """
    heads = len(streams)
    few = min(-(-room // size), pages // heads, most)
    held = [few if streaming else 0 for streaming in streams]
    retrieval = [head for head, streaming in enumerate(streams) if not streaming]
    streaming = [head for head, streaming in enumerate(streams) if streaming]
    # Each group takes what the one before it cannot use; the last is not limited, so that no page is left.
    for group, limit in ((retrieval, most), (streaming, most), (range(heads), pages)):
        rest = pages - sum(held)
        if not group or not rest:
            continue
        wanted = min(rest, sum(limit - held[head] for head in group))
        each, odd = divmod(sum(held[head] for head in group) + wanted, len(group))
        for place, head in enumerate(group):
            held[head] = each + (place < odd)
    return held
