"""What a report says, section by section: the page and the Markdown show the same."""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape

from kvpolicy_eval.report import curves, maps, tables
from kvpolicy_eval.report.gather import Findings
from kvpolicy_eval.report.parts import FEW, differences
from kvpolicy_eval.report.tables import Table
from kvpolicy_eval.sweep.bootstrap import DRAWS


@dataclass(slots=True)
class Section:
    """A part of the report.

    Attributes:
        key: Short name, for links and for places in a page.
        short: Of its link.
        title: Its heading.
        text: What to know when reading it.
        figures: SVG.
        tables: By name.
        folded: Figures that are shown on demand, by name.
    """

    key: str
    short: str
    title: str
    text: str
    figures: list[str] = field(default_factory=list[str])
    tables: dict[str, Table] = field(default_factory=dict[str, Table])
    folded: dict[str, str] = field(default_factory=dict[str, str])


def sections(findings: Findings, draw: bool = True) -> list[Section]:
    """Every section.

    Args:
        findings: Of a sweep.
        draw: Whether to draw figures, which Markdown does not have.
    """
    found = [accuracy(findings, draw), budgets(findings, draw), parts(findings, draw), layers(findings, draw)]
    found += [positions(findings, draw), costs(findings, draw), run(findings)]
    if findings.failed:
        text = "These are in no mean. `kvpolicy-eval sweep --retry` runs them again."
        found.append(Section("failed", "Failed", "Cells that failed", text, tables={"": tables.failures(findings)}))
    return found


def accuracy(findings: Findings, draw: bool) -> Section:
    """Accuracy against bytes."""
    section = Section("bytes", "Bytes", "Accuracy against bytes", _means(findings) + _apart(findings))
    if draw and findings.averaged:
        section.figures.append(curves.accuracy_by_bytes(findings))
    for model in findings.models if findings.averaged else ():
        section.tables[model] = tables.accuracy(findings, model)
    return section


def budgets(findings: Findings, draw: bool) -> Section:
    """Accuracy against budget, by task."""
    text = (
        "Every task by itself, with its own metric, and 95 % intervals where it can be resampled. Where kinds of "
        "budgets are mixed, points stand at the bytes that they held."
    )
    section = Section("budget", "Budgets", "Accuracy against budget, by task", text)
    for model in findings.models:
        if draw:
            section.figures.append(curves.accuracy_by_budget(findings, model))
        section.tables[model] = tables.by_task(findings, model)
    return section


def parts(findings: Findings, draw: bool) -> Section:
    """What one part of a policy changes."""
    found = differences(findings)
    text = (
        "A policy against the same one without its layer budgets, its representatives or its codec, at the same budget "
        "of tokens. Both are resampled with the same examples. Of twenty comparisons in which nothing differs, one is "
        f"expected to seem different at 95 %. Where a task has fewer than {FEW} examples, no verdict is given."
    )
    text = text if found else "No two policies that have a mean accuracy differ in one part alone."
    section = Section("parts", "Parts", "What one part changes", text)
    if found:
        section.figures += [curves.differences_plot(found)] if draw else []
        several = len(findings.models) > 1
        for model in findings.models:
            section.tables[model if several else ""] = tables.changes([one for one in found if one.model == model])
    return section


def layers(findings: Findings, draw: bool) -> Section:
    """Importance and budgets of layers."""
    text = (
        "The cosine between a token's residual stream before and after a layer's attention: near 1, attention changed "
        "little. Budgets are those of the first prompts of each task, over what even layers would get; methods whose "
        "layers are even are left out."
    )
    section = Section("layers", "Layers", "Layers: importance and budgets", text)
    if draw:
        section.figures += [maps.importance(findings), *(maps.budgets(findings, model) for model in findings.models)]
    for model in findings.models:
        section.tables[model] = tables.layers(findings, model)
    return section


def positions(findings: Findings, draw: bool) -> Section:
    """Where tokens were kept."""
    text = "Each method at its smallest budget, on the first prompts of a task, after the prefill."
    section = Section("positions", "Positions", "Where tokens were kept", text)
    for model in findings.models:
        section.tables[model] = tables.positions(findings, model)
        figures = {f"{model}, {task}": maps.kept(findings, model, task) for task in findings.probed if draw}
        for number, (name, figure) in enumerate((name, figure) for name, figure in figures.items() if figure):
            if number == 0:
                section.figures.append(f"<h3>{escape(name)}</h3>{figure}")
            else:
                section.folded[name] = figure
    return section


def costs(findings: Findings, draw: bool) -> Section:
    """Speed and memory."""
    text = (
        "Tokens per second count prompts and prefills, on the machine named below, and whatever else it did meanwhile: "
        "take them as a hint, and a benchmark for a number. Bytes are exact: those allocated for a sequence's cache, "
        "mean over tasks. The figure shows each method at its smallest budget."
    )
    section = Section("costs", "Costs", "Speed and memory", text)
    for model in findings.models:
        section.figures += [curves.costs(findings, model)] if draw else []
        section.tables[model] = tables.costs(findings, model)
    return section


def run(findings: Findings) -> Section:
    """Versions, settings and commands."""
    settings = [[name, f"`{value}`"] for name, value in findings.settings.items()]
    commands = [[f"`{command}`"] for command in findings.commands]
    return Section(
        "run", "The run", "The run", "", tables={
            "Versions": tables.versions(findings), "Settings": Table(["setting", "value"], settings),
            "Commands": Table(["command"], commands),
        },
    )  # fmt: skip


def _means(findings: Findings) -> str:
    if not findings.averaged:
        return "There is no mean accuracy: no task has a metric that is better when higher and lies between 0 and 1."
    return (
        f"Means over {_named(findings.averaged)}, with 95 % intervals of {DRAWS:,} bootstrap draws over examples, task "
        "by task. A score of exactly 0 or 1 has no width, which does not make it certain. Pareto front: no other "
        "policy answers as well with fewer bytes, or better with as few; those on it are in bold."
    )


def _apart(findings: Findings) -> str:
    """What is in no mean, and why."""
    if not findings.apart:
        return ""
    return f" In no mean, since not all of their scores lie between 0 and 1: {_named(findings.apart)}."


def _named(tasks: list[str]) -> str:
    return ", ".join(f"`{task}`" for task in tasks)
