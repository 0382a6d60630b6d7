"""Trimming of a prompt that awaits its budget: it then holds no more tokens than its layer may be given.

Its selector keeps nested sets of tokens (see `kvpolicy.protocols.KeepsNested`). So the tokens of the largest possible
budget can be ranked again for the budget that the layer is given, and none that was dropped would have been kept.
"""

from __future__ import annotations

from torch import Tensor

from kvpolicy.engine.layer_contents import LayerContents
from kvpolicy.engine.layer_spec import LayerSpec
from kvpolicy.engine.prefill import PendingPrompt
from kvpolicy.engine.selection import Ranking, finite_priority, highest, rank_candidates
from kvpolicy.engine.state import map_slots, owned, select_rows
from kvpolicy.engine.token_batch import TokenBatch
from kvpolicy.engine.trimmed_tokens import TrimmedTokens
from kvpolicy.protocols import Selector, State, nested_from
from kvpolicy.statistics.channel_sums import ChannelSums, LargestQueries, QuerySquares
from kvpolicy.text.errors import KVPolicyError

LEAST_GAIN = 1 / 8
"""A prompt that was trimmed is trimmed again if it then holds less by this fraction: tokens are copied each time."""

_NOT_OF_TOKENS = (ChannelSums, LargestQueries, QuerySquares)
"""Statistics of channels, which the codec and the reader want of the whole prompt."""


def trimmed_from(spec: LayerSpec) -> int | None:
    """The smallest budget of a layer from which on its prompt may be trimmed; None if it never may."""
    # A merger wants what is evicted, and heads with budgets of their own may keep more than the layer on average.
    drops = spec.merger_traits.when == "never" and spec.heads is None
    return nested_from(spec.selector) if drops else None


def can_trim(layer: LayerContents, pending: PendingPrompt, least: Tensor) -> bool:
    """Whether a prompt can be trimmed without a change of what is kept in the end.

    Args:
        layer: The layer.
        pending: Its prompt.
        least: The fewest tokens that it may be given, [B] int64.
    """
    nested = trimmed_from(layer.spec)
    if nested is None or layer.layout.slots or pending.codes is not None:
        return False
    return bool((least >= nested).all())


def trim(layer: LayerContents, held: tuple[Tensor, State], pending: PendingPrompt, most: Tensor) -> PendingPrompt:
    """Drop the tokens of a first prompt that are beyond the most that its layer may be given.

    Args:
        layer: The layer.
        held: Positions and states of its slots, of which there are none.
        pending: The prompt, for which `can_trim` holds.
        most: The most tokens of each row that it may be given, [B] int64.

    Returns:
        The prompt with these tokens; the same if this frees too little.
    """
    most = most.to(layer.tensors.length.device)
    trimmed = pending.trimmed
    size = pending.keys.shape[2]
    if int(most.max()) > size * (1 - LEAST_GAIN):
        return pending
    # The first time, the selector observes the prompt; later, it ranks what it has observed under the smaller bound.
    if trimmed is None:
        ranking = rank_candidates(layer, held, pending, None, layer.tensors.length, most)
        view = ranking.view
        priority = ranking.priority
        idle = pending.idle
        state = ranking.state if idle is None else select_rows(idle, ranking.before, ranking.state)
        keys, values = _in_order(ranking, pending)
    else:
        view = trimmed.view._replace(budget=most)
        state = trimmed.state
        priority = finite_priority(layer.spec.selector.priority(state, view))
        keys = pending.keys
        values = pending.values
    # What is beyond the bound cannot be kept in the end, since the sets are nested: it is dropped from all that waits.
    chosen = highest(priority, view, most[:, None])
    batch = TokenBatch(keys, values, view.positions, state, chosen).trimmed()
    view = view._replace(positions=batch.positions, alike=False, added=None)
    # Tokens were observed; what the codec and the reader want is of the whole prompt.
    kept = tuple(each for each in pending.statistics if isinstance(each, _NOT_OF_TOKENS))
    smaller = pending._replace(
        keys=batch.keys,
        values=batch.values,
        statistics=kept,
        forward=None,
        trimmed=TrimmedTokens(view, map_slots(owned, batch.state), pending.columns),
    )
    return smaller.owned()


def ranked_again(selector: Selector, trimmed: TrimmedTokens, keep: Tensor) -> Ranking:
    """The tokens of a prompt that was trimmed, as they rank under the budget `keep` [B] int64 of its layer.

    Raises:
        KVPolicyError: If the budget is beyond the bound that the prompt was trimmed to.
    """
    lost = (keep > trimmed.view.budget) & (trimmed.view.length > trimmed.view.budget)
    if bool(lost.any()):
        row = int(lost.nonzero()[0])
        raise KVPolicyError(
            f"The bounds of an allocator must hold for its budgets, got a bound of {int(trimmed.view.budget[row])} and "
            f"then a budget of {int(keep[row])} tokens; try kvpolicy.testing.check on it."
        )
    view = trimmed.view._replace(budget=keep)
    priority = finite_priority(selector.priority(trimmed.state, view))
    return Ranking(view, trimmed.state, trimmed.state, priority, None, None)


def _in_order(ranking: Ranking, pending: PendingPrompt) -> tuple[Tensor, Tensor]:
    """Keys and values of a prompt in the order of its ranking, [B, H, P, D]."""
    if ranking.order is None:
        return pending.keys, pending.values
    index = ranking.order[..., None]
    return pending.keys.gather(2, index.expand_as(pending.keys)), pending.values.gather(
        2, index.expand_as(pending.values)
    )
