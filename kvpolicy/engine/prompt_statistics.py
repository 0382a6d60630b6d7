"""Statistics of a prompt's queries for selectors, mergers, codecs and readers, in one piece or tile by tile."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from kvpolicy.engine.layer_contents import LayerContents
from kvpolicy.engine.layer_spec import LayerSpec
from kvpolicy.engine.prefill import PendingPrompt
from kvpolicy.statistics import AttentionSum, Coming, Forward, InputScores, Statistic, Tile, union
from kvpolicy.statistics.channel_sums import ChannelSums
from kvpolicy.statistics.input_scores import score_inputs
from kvpolicy.statistics.windows import ScoreTransform


def wanted(layer: LayerContents) -> tuple[Statistic[Any], ...]:
    """The statistics that the parts of a layer need of a prompt, before it begins."""
    codec = () if layer.tensors.limits is None else layer.spec.codec_statistics
    return union(layer.prompt_statistics, codec, _of_reader(layer.measures_salience))


def looks_at_queries(spec: LayerSpec) -> bool:
    """Whether a layer's parts look at what queries of a prompt attend to, those of layers that read its keys too."""
    of_reader = _of_reader(spec.reader_traits.salience is not None)
    every = union(spec.prompt_statistics, spec.allocator_statistics, spec.codec_statistics, of_reader)
    return any(each.of_readers for each in every)


def _of_reader(salience: bool) -> tuple[Statistic[Any], ...]:
    """The statistics that a reader needs."""
    return (ChannelSums(),) if salience else ()


def see_prompt(
    layer: LayerContents,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    valid: Tensor | None,
    transform: ScoreTransform,
    forward: Forward | None,
    held: PendingPrompt | None = None,
    attn_sum: Tensor | None = None,
) -> PendingPrompt:
    """All that a layer must see of a prompt in one piece; see `LayerStore.attend_prompt`.

    `attn_sum` is its attention summed over the queries, [B, Hq, S + P] fp32, if the selector needs it.
    """
    statistics = PromptStatistics(layer, valid, q.shape[2], held)
    scorer = layer.spec.input_scorer
    scores = None if scorer is None else score_inputs(scorer, layer.gate, forward)
    statistics.add(q.detach(), k.detach(), 0, scores)
    forward = forward._replace(queries=q.detach()) if forward is not None and layer.spec.needs_call else None
    return statistics.prompt(k.detach(), v.detach(), transform, forward, attn_sum)


class PromptStatistics:
    """The statistics of a prompt of P tokens. Queries that are kept are chosen among all P before the first one comes.

    Args:
        layer: The layer that takes the prompt; its parts determine the statistics.
        valid: Which of the tokens are not padding, [B, P] bool; None if all are.
        columns: P.
        held: Earlier chunks of the prompt, which are not compressed yet, or None.

    Attributes:
        statistics: The statistics so far.
    """

    def __init__(
        self, layer: LayerContents, valid: Tensor | None, columns: int, held: PendingPrompt | None = None
    ) -> None:
        """Nothing seen yet."""
        seen = layer.tensors.length if held is None else held.lengths(layer.tensors.length)
        coming = Coming(valid, columns, seen, layer.spec.rope)
        self.statistics = tuple(each.begun(coming) for each in wanted(layer))
        self._valid = valid
        self._columns = columns

    def of_reader(self) -> PromptStatistics:
        """The same for a layer that reads the keys of this one: without what is known of the keys' own layer."""
        self.statistics = tuple(each for each in self.statistics if not isinstance(each, InputScores))
        return self

    def add(self, q: Tensor, k: Tensor, start: int, scores: Tensor | None = None) -> None:
        """Take the tokens from column `start` on.

        Args:
            q: [B, Hq, T, D].
            k: [B, H, T, D].
            start: Column of the first of them.
            scores: Their scores by the input of the layer, [B, H, T] fp32, if the selector needs them.
        """
        new = q.shape[2]
        valid = None if self._valid is None else self._valid[:, start : start + new]
        tile = Tile(q, k, start, valid, new == self._columns, scores)
        self.statistics = tuple(each.added(tile) for each in self.statistics)

    def prompt(
        self, keys: Tensor, values: Tensor, transform: ScoreTransform, forward: Forward | None, attn_sum: Tensor | None
    ) -> PendingPrompt:
        """The pending prompt, after its last token was seen.

        Args:
            keys: [B, H, P, D].
            values: [B, H, P, D].
            transform: From products to attention weights.
            forward: The arguments of the attention module, if the selector needs them.
            attn_sum: Attention summed over the queries, if it needs them.
        """
        return PendingPrompt(
            keys=keys,
            values=values,
            valid=self._valid,
            transform=transform,
            statistics=tuple(
                replace(each, total=attn_sum) if isinstance(each, AttentionSum) else each for each in self.statistics
            ),
            forward=None if forward is None else forward._replace(valid=self._valid, **transform._asdict()),
        )
