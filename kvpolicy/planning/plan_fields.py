"""Plans as plain data, for files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvpolicy.engine.pages import Pages
from kvpolicy.planning.activations import Prefill
from kvpolicy.planning.result import CachePlan, LayerPlan
from kvpolicy.policy import Policy
from kvpolicy.protocols import Layout

_SCALARS = ("batch", "full_nbytes", "measured", "note", "resident_nbytes", "tp", "peak_nbytes")


def plan_to_dict(plan: CachePlan) -> dict[str, Any]:
    """A plan as JSON can hold it, without its policy and weights; of its prefill, the length of the prompt."""
    layers = [
        {
            "layer_idx": layer.layer_idx,
            "tokens": layer.tokens,
            "layout": [layer.layout.exact, list(layer.layout.coded)],
            "nbytes": layer.nbytes,
            "moved": layer.moved,
            "loaded": layer.loaded,
            "stored": layer.stored,
            "pages": None if layer.pages is None else list(layer.pages),
        }
        for layer in plan.layers
    ]
    unmanaged = {str(index): size for index, size in plan.unmanaged.items()}
    columns = None if plan.prefill is None else plan.prefill.columns
    scalars = {name: getattr(plan, name) for name in _SCALARS}
    return scalars | {
        "layers": layers,
        "unmanaged": unmanaged,
        "columns": columns,
        "full_peak_nbytes": plan.full_peak_nbytes,
    }


def plan_from_dict(
    policy: Policy, content: Mapping[str, Any], prefill: Callable[[Policy, Sequence[LayerPlan], int], Prefill]
) -> CachePlan:
    """The plan that `plan_to_dict` described.

    Args:
        policy: The policy of the plan.
        content: The description; earlier versions wrote neither the length of the prompt nor copies of host memory.
        prefill: Makes what the activations follow from, of the policy, the layers and the length of the prompt.
    """
    layers = [
        LayerPlan(
            layer_idx=layer["layer_idx"],
            tokens=layer["tokens"],
            layout=Layout(layer["layout"][0], tuple(layer["layout"][1])),
            nbytes=layer["nbytes"],
            moved=layer["moved"],
            loaded=layer.get("loaded", 0),
            stored=layer.get("stored", 0),
            pages=None if layer["pages"] is None else Pages(*layer["pages"]),
        )
        for layer in content["layers"]
    ]
    unmanaged = {int(index): size for index, size in content["unmanaged"].items()}
    scalars: dict[str, Any] = {name: content[name] for name in _SCALARS}
    columns = content.get("columns")
    return CachePlan(
        policy=policy,
        layers=tuple(layers),
        unmanaged=unmanaged,
        prefill=prefill(policy, layers, columns) if columns else None,
        full_peak_nbytes=content.get("full_peak_nbytes", 0),
        **scalars,
    )
