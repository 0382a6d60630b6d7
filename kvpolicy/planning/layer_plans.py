"""The slots and bytes of each layer, from a divided budget."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvpolicy.engine.pages import Pages, paged_layout, row_pages
from kvpolicy.engine.row_limits import buffer_slots
from kvpolicy.planning.memory import DIGEST_NBYTES, layer_bytes, paged_bytes
from kvpolicy.planning.result import LayerPlan
from kvpolicy.planning.tokens import Tokens
from kvpolicy.policy import Policy
from kvpolicy.protocols import LayerShape, traits_for


def pages_of(policy: Policy, tokens: Tokens, layer: int, shape: LayerShape) -> Pages | None:
    """The pages of a layer with a budget for each head; None without head budgets.

    With several ranks these are the most that a rank may hold: all but one page for each head of the other ranks.

    Args:
        policy: The policy of the layer.
        tokens: The division of the budget.
        layer: Number of the layer under the policy.
        shape: Its shape.
    """
    if policy.heads is None:
        return None
    heads = shape.all_heads or shape.heads
    rows = row_pages(tokens.keep[:, layer], tokens.extra, tokens.last, heads)
    if heads > shape.heads:
        most = torch.maximum(-(-tokens.last // rows.size), rows.body // heads + 1) * shape.heads
        rows = rows._replace(body=torch.minimum(rows.body - (heads - shape.heads), most))
    return rows.allocated(shape.heads)


def plan_layers(
    policy: Policy, tokens: Tokens, shapes: list[LayerShape], indices: list[int], batch: int
) -> tuple[LayerPlan, ...]:
    """The plan of each layer.

    Args:
        policy: The policy.
        tokens: The division of its budget.
        shapes: The layers under the policy.
        indices: Their indices in the model.
        batch: Number of rows.
    """
    plans: list[LayerPlan] = []
    layouts = {index: policy.at(index).codec.layout(most) for index, most in zip(indices, tokens.most, strict=True)}
    for number, (index, most, shape) in enumerate(zip(indices, tokens.most, shapes, strict=True)):
        own = policy.at(index)
        layout = layouts[index]
        pages = pages_of(own, tokens, number, shape)
        if pages is not None:
            buffer = buffer_slots(own.codec, most) if own.codec.stages else 0
            if buffer:
                layout = paged_layout(buffer, *pages, shape.heads)
            counted = paged_bytes(own, batch, shape, pages, buffer)
        else:
            chooser = own.reader.traits.source(index)
            source = None if chooser in (None, index) else layouts.get(chooser)
            counted = layer_bytes(own, batch, shape, layout, index, source)
        sizes = dict(counted.held)
        if not plans:
            # The first layer holds the mask digest of the whole cache.
            sizes["counters"] += DIGEST_NBYTES * batch
        plans.append(
            LayerPlan(layer_idx=index, tokens=most, layout=layout, nbytes=sizes, pages=pages, **counted.step._asdict())
        )
    return tuple(plans)


def waiting_bytes(policy: Policy, layers: Sequence[LayerPlan], token_nbytes: int, columns: int) -> list[int]:
    """Bytes of earlier layers that wait to be encoded while each layer has its prompt; see `LayerGroup`.

    Args:
        policy: The policy.
        layers: The plan of each layer.
        token_nbytes: Bytes of the keys and values of one token of every row in one layer.
        columns: Tokens of the prompt.
    """
    before = {index: group[:number] for group in policy.layer_groups for number, index in enumerate(group)}
    encoded = {
        layer.layer_idx: min(
            sum(layer.layout.coded), columns - traits_for(policy.at(layer.layer_idx).codec, layer.tokens).residual
        )
        for layer in layers
        if layer.layer_idx in before
    }
    waiting = [[encoded[other] for other in before.get(layer.layer_idx, ())] for layer in layers]
    return [token_nbytes * max(sum(tokens), 0) for tokens in waiting]
