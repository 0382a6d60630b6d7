"""Heat maps of the layers: importance, budgets, and kept positions."""

from __future__ import annotations

import math
from typing import Any

from kvpolicy.reporting.plots._style import DIVERGING, SEQUENTIAL
from kvpolicy.reporting.plots.layers import field, heat
from kvpolicy_eval.report.curves import smallest
from kvpolicy_eval.report.gather import Findings, Point
from kvpolicy_eval.report.style import Drawing


def importance(findings: Findings) -> str:
    """Cosine of each layer's residual stream before and after attention, by model and task; empty if unknown."""
    by_model = cosines(findings)
    if not by_model:
        return ""
    drawing = Drawing("importance", len(by_model), 1, (9.6, 1.1 + 0.3 * max(map(len, by_model.values()))))
    for axes, (model, rows) in zip(drawing.axes, by_model.items(), strict=True):
        heat(axes, list(rows.values()), list(rows), SEQUENTIAL, "cosine")
        axes.set(title=model, xlabel="layer")
    return drawing.svg("Cosine of each layer's input and output of attention")


def budgets(findings: Findings, model: str) -> str:
    """Budget of each layer over an equal share, at the smallest budgets; empty if all layers are equal."""
    rows = {point.policy: layer_shares(point) for point in smallest(findings, model)}
    rows = {policy: shares for policy, shares in rows.items() if layers_differ(shares)}
    if not rows:
        return ""
    drawing = Drawing(f"layers-{findings.models.index(model)}", 1, 1, (9.6, 1.2 + 0.3 * len(rows)))
    heat(drawing.axes[0], list(rows.values()), list(rows), DIVERGING, "over even", middle=1.0)
    drawing.axes[0].set_xlabel("layer")
    return drawing.svg("Budget of each layer over an even share")


def kept(findings: Findings, model: str, task: str) -> str:
    """Kept positions: layers from top to bottom, the prompt from left to right; empty without probes."""
    points = [p for p in smallest(findings, model) if p.probes.get(task, {}).get("kept") and p.budget]
    if not points:
        return ""
    columns = min(3, len(points))
    rows = math.ceil(len(points) / columns)
    layers = len(points[0].probes[task]["kept"])
    name = f"kept-{findings.models.index(model)}-{findings.probed.index(task)}"
    drawing = Drawing(name, rows, columns, (3.2, 0.75 + min(0.09 * layers, 2.5)))
    image: Any = None
    for number, (axes, point) in enumerate(zip(drawing.axes, points, strict=False)):
        probe = point.probes[task]
        image = field(axes, probe["kept"], SEQUENTIAL, 0, 100, (0, 100, layers - 0.5, -0.5))
        axes.set_title(point.policy if len(point.policy) < 40 else f"{point.policy[:38]}…", fontsize=8)
        axes.tick_params(labelsize=8)
        axes.set_yticks([0, layers - 1], [str(probe["layers"][0]), str(probe["layers"][-1])])
        axes.set_xticks([0, 50, 100], ["0", "50", "100"] if number + columns >= len(points) else [])
        if number % columns == 0:
            axes.set_ylabel("layer", fontsize=8)
        if number + columns >= len(points):
            axes.set_xlabel("position, % of the prompt", fontsize=8)
    for axes in drawing.axes[len(points) :]:
        axes.set_axis_off()
    bar = drawing.figure.colorbar(image, ax=drawing.axes, shrink=0.8, pad=0.01)
    bar.set_label("kept, % of heads", fontsize=8)
    bar.ax.tick_params(labelsize=8)
    return drawing.svg(f"Positions kept by each layer on {task}")


def cosines(findings: Findings) -> dict[str, dict[str, list[float]]]:
    """Cosine of each layer, by model and task."""
    by_model: dict[str, dict[str, list[float]]] = {}
    for point in findings.points:
        for task, probe in point.probes.items():
            if probe.get("cosine"):
                by_model.setdefault(point.model, {}).setdefault(task, probe["cosine"])
    return by_model


def layer_shares(point: Point) -> list[float]:
    """Budget of each layer over an equal share, averaged over tasks; empty without probes."""
    rows = [probe["budget"] for probe in point.probes.values() if probe.get("budget")]
    sums = [sum(row) for row in rows]
    return [
        sum(row[layer] * len(row) / total for row, total in zip(rows, sums, strict=True)) / len(rows)
        for layer in range(len(rows[0]) if rows else 0)
    ]


def layers_differ(shares: list[float]) -> bool:
    """Whether the budgets of layers differ by more than rounding."""
    return bool(shares) and max(shares) - min(shares) > 0.02
