"""The sections of a report, which the page and the Markdown share."""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape

from kvpolicy.tuning.verdict import MARGIN
from kvpolicy_eval.report import curves, maps, tables
from kvpolicy_eval.report.gather import Findings
from kvpolicy_eval.report.parts import FEW, differences
from kvpolicy_eval.report.tables import Table
from kvpolicy_eval.sweep.bootstrap import DRAWS


@dataclass(slots=True)
class Section:
    """A section of the report.

    Attributes:
        key: Identifier, for links and for places in pages.
        short: Text of its link.
        title: Heading.
        text: How to read it.
        figures: Figures as SVG.
        tables: Tables by name.
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
    """All sections.

    Args:
        findings: Of a sweep.
        draw: Whether to draw figures; Markdown has none.
    """
    result = [
        accuracy(findings, draw),
        *([places(findings)] if len(findings.modes) > 1 else []),
        budgets(findings, draw),
        parts(findings, draw),
        layers(findings, draw),
        positions(findings, draw),
        costs(findings, draw),
        run(findings),
    ]
    if findings.failed:
        text = "No mean includes them. `kvpolicy-eval sweep --retry` runs them again."
        result.append(Section("failed", "Failed", "Failed cells", text, tables={"": tables.failures(findings)}))
    return result


def accuracy(findings: Findings, draw: bool) -> Section:
    """Accuracy against bytes."""
    section = Section("bytes", "Bytes", "Accuracy against bytes", _means(findings) + _excluded(findings))
    if draw and findings.averaged:
        section.figures.append(curves.accuracy_by_bytes(findings))
    for model in findings.models if findings.averaged else ():
        for mode in findings.facets:
            name = model if mode is None else f"{model}, {mode}"
            section.tables[name] = tables.accuracy(findings, model, mode)
    return section


def places(findings: Findings) -> Section:
    """Accuracy by the place of the question."""
    text = (
        "The same means side by side. The question is part of the compressed prompt (inside), is fed to the compressed "
        "cache (after), or is a second one, fed after the answer to the first (second)."
    )
    section = Section("modes", "Place of the question", "Accuracy by the place of the question", text)
    for model in findings.models:
        section.tables[model] = tables.by_mode(findings, model)
    return section


def budgets(findings: Findings, draw: bool) -> Section:
    """Accuracy against budget, by task."""
    text = (
        "Each task with its metric, and 95 % intervals if the metric can be resampled. If budgets of different kinds "
        "are mixed, the x axis shows the bytes held."
    )
    section = Section("budget", "Budgets", "Accuracy against budget, by task", text)
    for model in findings.models:
        if draw:
            section.figures.append(curves.accuracy_by_budget(findings, model))
        section.tables[model] = tables.by_task(findings, model)
    return section


def parts(findings: Findings, draw: bool) -> Section:
    """Effect of one part of a policy."""
    compared = differences(findings)
    text = (
        "A policy against the same policy without its layer budgets, its representatives, its merger or its codec, at "
        "the same budget of tokens. Both are resampled with the same examples. Of twenty comparisons of equal "
        "policies, one is "
        f"expected to show a difference at 95 %. A verdict needs a difference of more than {MARGIN:.0%}. If a task has "
        f"fewer than {FEW} examples, no verdict is given."
    )
    text = text if compared else "No two policies with a mean accuracy differ in a single part."
    section = Section("parts", "Parts", "What one part changes", text)
    if compared:
        section.figures += [curves.differences_plot(compared)] if draw else []
        several = len(findings.models) > 1
        for model in findings.models:
            section.tables[model if several else ""] = tables.changes([one for one in compared if one.model == model])
    return section


def layers(findings: Findings, draw: bool) -> Section:
    """Importance and budgets of the layers."""
    text = (
        "Cosine between a token's residual stream before and after a layer's attention; near 1, attention changes "
        "little. Budgets are those of the first prompts of each task, relative to equal budgets; methods with equal "
        "budgets are left out."
    )
    section = Section("layers", "Layers", "Layers: importance and budgets", text)
    if draw:
        section.figures += [maps.importance(findings), *(maps.budgets(findings, model) for model in findings.models)]
    for model in findings.models:
        section.tables[model] = tables.layers(findings, model)
    return section


def positions(findings: Findings, draw: bool) -> Section:
    """Kept positions."""
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
        "Tokens per second include prompts and prefills, on the machine named below, under whatever load it had: use a "
        "benchmark for exact speeds. Bytes are exact: those allocated for a sequence's cache, averaged over tasks. The "
        "figure shows each method at its smallest budget."
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
    contents = {
        "Versions": tables.versions(findings),
        "Settings": Table(["setting", "value"], settings),
        "Commands": Table(["command"], commands),
    }
    return Section("run", "The run", "The run", "", tables=contents)


def _means(findings: Findings) -> str:
    if not findings.averaged:
        return "There is no mean accuracy: no task has a metric that is better when higher and lies between 0 and 1."
    return (
        f"Means over {_named(findings.averaged)}, {_apart(findings)}with 95 % intervals of {DRAWS:,} bootstrap draws "
        "over the examples of each task. The interval of a score of exactly 0 or 1 has no width, which does not make "
        "the score certain. "
        "Policies in bold are on the Pareto front: no other policy is as accurate with fewer bytes, or more accurate "
        "with as few."
    )


def _apart(findings: Findings) -> str:
    """Words for results that are shown apart; empty if none are."""
    return "by the place of the question, " if len(findings.modes) > 1 else ""


def _excluded(findings: Findings) -> str:
    """Tasks that no mean includes."""
    if not findings.excluded:
        return ""
    return f" Not in the mean, because some of their scores lie outside 0 and 1: {_named(findings.excluded)}."


def _named(tasks: list[str]) -> str:
    return ", ".join(f"`{task}`" for task in tasks)
