"""Explanation of a policy that differs by layer: its totals for a model, and the reason for each layer's choice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvpolicy.cli.formatting import counted, input_size, paragraph, size, table, terms
from kvpolicy.cli.layer_table import layer_facts, transfer_text
from kvpolicy.planning.curves import Curves, load_tuned
from kvpolicy.planning.tuned import Reason, lengths, reasons
from kvpolicy.policy import TunedPolicy
from kvpolicy.text.budget import Share, fraction_of, json_budget

DISTORTION = {
    "output": "the squared error of the layer's attention output, relative to its norm and weighted by what such an "
    "error does to the model's predictions",
    "joint": "the KL divergence of the model's predictions if this layer alone is compressed, times what these "
    "parts do in all layers at once, relative to the sum over layers",
    "kl": "the KL divergence of the model's predictions if this layer alone is compressed",
}
"""The definition of a distortion, by the measure of a file."""


def facts_by_layer(given: Any, planned: Any, model: Any) -> dict[str, Any]:
    """The facts of `explain` about a policy that differs by layer, given as `given` and planned, for JSON."""
    policy = planned.policy
    curves = load_tuned(given.source.file) if isinstance(given, TunedPolicy) else None
    # Why the tuner chose the policy of each layer, where a file of curves says it.
    why: Sequence[Reason | None] = [None] * len(planned.layers)
    tuned: dict[str, Any] | None = None
    if isinstance(curves, Curves):
        prompt, new = lengths(curves, given)
        why = reasons(curves, model.whole, prompt, new, [policy.at(index) for index in curves.layers])
        tuned = {
            "measure": curves.measure,
            "text": dict(curves.text),
            "candidates": len(curves.candidates),
            "prompt": prompt,
            "new": new,
            "evidence": None if curves.evidence is None else dict(curves.evidence),
        }
    # Layers that no policy manages have no reason and no share.
    own = {plan.layer_idx: reason for plan, reason in zip(planned.layers, why, strict=True)}
    layers = layer_facts(planned)
    for layer in layers:
        index = layer["layer"]
        if index in own:
            layer["policy"] = str(policy.at(index)).partition("@")[0]
            layer["share"] = policy.at(index).budget
            reason = own[index]
            layer["distortion"] = None if reason is None else reason._asdict()
    return {
        "budget": {"value": json_budget(policy.budget), "said": [_budget(policy.budget)]},
        "tuned": tuned,
        "note": planned.note,
        "layers": layers,
        "cache": planned.by_kind() | {"total": planned.nbytes},
        "full_cache": planned.full_nbytes,
    }


def render_by_layer(facts: dict[str, Any]) -> str:
    """Format the facts as text."""
    head = [
        ("policy", facts["policy"]),
        ("model", f"{facts['model']} in {facts['dtype']}"),
        ("input", input_size(facts["batch"], facts["prompt"], facts["new"])),
    ]
    blocks = [terms(head, 0), paragraph(f"Budget: {facts['budget']['value']}. {facts['budget']['said'][0]}")]
    tuned = facts["tuned"]
    if tuned is not None:
        blocks.append(paragraph(_origin(tuned)))
    blocks.append(table(_rows(facts["layers"], tuned is not None)))
    if tuned is not None:
        blocks.append(
            paragraph(
                f"A distortion is {DISTORTION[tuned['measure']]}: of what the layer has, and of the best that was "
                "measured for half and for twice the bytes. A layer has more where that saves most."
            )
        )
    nbytes = facts["cache"]["total"]
    full = facts["full_cache"]
    blocks.append(paragraph(f"Total: {size(nbytes)}, {nbytes / full:.3f} of the full cache ({size(full)})."))
    if facts["note"]:
        blocks.append(paragraph(f"{facts['note'][:1].upper()}{facts['note'][1:]}."))
    if facts["link"]:
        blocks.append(paragraph(transfer_text(facts["link"])))
    if tuned is not None:
        blocks += _evidence(tuned["evidence"])
    return "\n\n".join(blocks)


def _budget(budget: Any) -> str:
    if isinstance(budget, str):
        return "Bytes of the whole cache."
    if isinstance(budget, int):
        return "As many bytes as so many tokens per layer take in a full cache."
    if fraction_of(budget) == 1.0:
        return "No token is evicted."
    least = f", but at least those of {budget.least:,} tokens per layer" if isinstance(budget, Share) else ""
    return f"The fraction of the full cache's bytes, prompt and new tokens, in the layers under the policy{least}."


def _origin(tuned: dict[str, Any]) -> str:
    text = tuned["text"]
    return (
        f"Tuned on {counted(text['windows'], 'text')}: {counted(tuned['candidates'], 'candidate')} in each layer, "
        f"chosen for prompts of {tuned['prompt']:,} tokens and {tuned['new']:,} tokens behind them. For other "
        "lengths, the tokens of all layers are multiplied by one number."
    )


def _rows(layers: Sequence[dict[str, Any]], tuned: bool) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [("layer", "policy", "tokens", "bytes", *(_HEADS if tuned else ()))]
    for layer in layers:
        nbytes = size(layer["bytes"]["total"])
        if "tokens" not in layer:
            rows.append((str(layer["layer"]), "unmanaged", "", nbytes, *([""] * 3 if tuned else ())))
            continue
        found = layer["distortion"]
        losses = [found[name] for name in ("loss", "half", "double")] if found else []
        cells = ["" if loss is None else f"{loss:.2g}" for loss in losses]
        rows.append((str(layer["layer"]), layer["policy"], f"{layer['tokens']:,}", nbytes, *cells))
    return rows


_HEADS = ("distortion", "at half", "at twice")


def _evidence(evidence: Any) -> list[str]:
    if not evidence:
        return [paragraph("The file has no evidence on texts that were held out; kvpolicy tune --budget adds it.")]
    lines = [f"At a budget of {budget}: {found['verdict']}" for budget, found in evidence.items()]
    return [paragraph(f"Evidence on texts that were held out. {' '.join(lines)}")]
