"""Everything that the golden record takes from the internals of the engine: adapt this file when they change."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn


def policy_layers(cache: Any) -> list[Any]:
    """The layers of a cache that are under the policy and have seen a token."""
    return [layer for layer in cache.layers if hasattr(layer, "positions")]


def slot_positions(layer: Any) -> Tensor:
    """The position of the token in each slot, -1 where there is none, [B, H, S]; slots in full precision come first."""
    return layer.positions


def exact_tensors(layer: Any) -> tuple[Tensor, Tensor]:
    """Keys and values of the slots in full precision, [B, H, E, D]."""
    body = _body(layer)
    return body.keys, body.values


def other_tensors(layer: Any) -> dict[str, list[Tensor]]:
    """What else a layer holds: the codec's tensors, the selector's state, numbers of each row, by quantity."""
    body = _body(layer)
    return {
        "codes": _flatten(body.codes),
        "state": _flatten(body.state),
        "rows": _flatten(_limits(body.limits if hasattr(body, "limits") else body.rows)),  # former name: rows
        "length": _flatten(body.length),
        "budget": _flatten(body.budget),
    }


def _unmanaged(plan: Any) -> dict[int, int]:
    """Bytes of the unmanaged layers, by layer; a tree from before the rename has them under another name."""
    return plan.unmanaged if hasattr(plan, "unmanaged") else plan.left_alone


def _limits(limits: Any) -> Any:
    """The limits of each row without those that are empty: some trees have these, and others do not."""
    if limits is None:
        return None
    held = ("block", "residual", "query_absmax", "query_square")
    return tuple(getattr(limits, name) for name in limits._fields if name not in held or getattr(limits, name).shape[0])


def plan_numbers(plan: Any) -> list[int]:
    """A plan as numbers: of each layer, then of the whole. Kinds of bytes that are 0 are left out."""
    found: list[int] = []
    for layer in plan.layers:
        exact, coded = layer.layout
        found += [layer.layer_idx, layer.tokens, exact, *coded]
        found += [size for size in layer.nbytes.values() if size]
    for index, size in _unmanaged(plan).items():
        found += [index, size]
    return [*found, plan.nbytes, plan.full_nbytes, plan.resident_nbytes, int(plan.measured)]


def share_over_ranks(model: nn.Module, replicas: int) -> None:
    """Tell kvpolicy that a model is one rank's part, on every rank; `replicas` of them hold each KV head."""
    from kvpolicy.parallel import share

    share(model, replicas=replicas)


def scorer_selector(scorer: Any, **options: Any) -> Any:
    """The selector that keeps what a scorer written for kvpress rates highest."""
    from kvpolicy.adapters import KVPressScorer

    return KVPressScorer(scorer, **options)


def _body(layer: Any) -> Any:
    """What owns a layer's tensors."""
    store = getattr(layer, "store", layer)
    return getattr(store, "tensors", store)  # an earlier tree has them in the store itself


def _flatten(part: Any) -> list[Tensor]:
    """Every tensor of nested tuples, lists, dictionaries and dataclasses, in order."""
    if part is None:
        return []
    if isinstance(part, Tensor):
        return [part]
    inner: Iterable[Any]
    if dataclasses.is_dataclass(part):
        inner = [getattr(part, field.name) for field in dataclasses.fields(part)]
    elif isinstance(part, dict):
        inner = part.values()
    elif isinstance(part, tuple | list):
        inner = part
    else:
        raise TypeError(f"{type(part).__name__} holds tensors in a way that access.py does not know")
    return [tensor for one in inner for tensor in _flatten(one)]
