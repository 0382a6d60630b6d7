"""Plans as plain data, for files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvpolicy.engine.pages import Pages
from kvpolicy.planning.result import CachePlan, LayerPlan
from kvpolicy.policy import Policy
from kvpolicy.protocols import Layout

_SCALARS = ("batch", "full_nbytes", "measured", "note", "resident_nbytes", "tp", "peak_nbytes")


def plan_to_dict(plan: CachePlan) -> dict[str, Any]:
    """A plan as JSON can hold it, without its policy and without weights."""
    layers = [
        {
            "layer_idx": layer.layer_idx,
            "tokens": layer.tokens,
            "layout": [layer.layout.exact, list(layer.layout.coded)],
            "nbytes": layer.nbytes,
            "moved": layer.moved,
            "pages": None if layer.pages is None else list(layer.pages),
        }
        for layer in plan.layers
    ]
    unmanaged = {str(index): size for index, size in plan.unmanaged.items()}
    return {name: getattr(plan, name) for name in _SCALARS} | {"layers": layers, "unmanaged": unmanaged}


def plan_from_dict(policy: Policy, content: Mapping[str, Any]) -> CachePlan:
    """The plan that `plan_to_dict` described.

    Args:
        policy: The policy of the plan.
        content: The description.
    """
    layers = [
        LayerPlan(
            layer_idx=layer["layer_idx"],
            tokens=layer["tokens"],
            layout=Layout(layer["layout"][0], tuple(layer["layout"][1])),
            nbytes=layer["nbytes"],
            moved=layer["moved"],
            pages=None if layer["pages"] is None else Pages(*layer["pages"]),
        )
        for layer in content["layers"]
    ]
    unmanaged = {int(index): size for index, size in content["unmanaged"].items()}
    scalars: dict[str, Any] = {name: content[name] for name in _SCALARS}
    return CachePlan(policy=policy, layers=tuple(layers), unmanaged=unmanaged, **scalars)
