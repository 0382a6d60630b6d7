"""The tables of the report, for the page and for Markdown."""

from __future__ import annotations

from math import isnan
from typing import NamedTuple

from kvpolicy_eval.report.curves import smallest
from kvpolicy_eval.report.gather import Findings, Point, amount, front
from kvpolicy_eval.report.maps import cosines, layer_shares, layers_differ
from kvpolicy_eval.report.parts import Difference


class Table(NamedTuple):
    """Column names and rows of text, in which backquotes mark code.

    Attributes:
        head: Names of the columns.
        rows: Cells of each row.
    """

    head: list[str]
    rows: list[list[str]]


def accuracy(findings: Findings, model: str, mode: str | None = None) -> Table:
    """Mean accuracy of each method at each budget over all tasks or those of a mode, and the bytes held."""
    points = [point for point in findings.points if point.model == model]
    best = {point.policy for point in front(points, mode)}
    named = [name_of(budget) for budget in findings.budgets]
    head = ["policy", *(f"at {name}" for name in named), "without a budget", "bytes held"]
    rows: list[list[str]] = []
    for method in dict.fromkeys(point.method for point in points):
        of_method = {point.budget: point for point in points if point.method == method}
        cells = [_cell(of_method.get(budget), best, mode) for budget in [*findings.budgets, ""]]
        shares = [f"{share:.1%}" for p in of_method.values() if (share := p.average("kv_share", mode)) is not None]
        rows.append([f"`{method}`", *cells, ", ".join(shares)])
    used = [at for at in range(len(head)) if at == 0 or any(row[at] for row in rows)]
    return Table([head[at] for at in used], [[row[at] for at in used] for row in rows])


def by_mode(findings: Findings, model: str) -> Table:
    """Mean accuracy of every policy, by the place of the question."""
    points = [point for point in findings.points if point.model == model]
    rows = [[f"`{point.policy}`", *(str(point.score(mode) or "") for mode in findings.modes)] for point in points]
    return Table(["policy", *findings.modes], rows)


def by_task(findings: Findings, model: str) -> Table:
    """Score of every policy on every task."""
    head = ["policy", *(f"{task}, {findings.metrics[task].removesuffix(',none')}" for task in findings.tasks)]
    points = [point for point in findings.points if point.model == model]
    rows = [[f"`{p.policy}`", *(str(p.tasks.get(task, "")) for task in findings.tasks)] for p in points]
    return Table(head, rows)


def changes(differences: list[Difference]) -> Table:
    """Effect of one part."""
    rows = [[one.part, f"`{one.policy}`", f"`{one.base}`", _signed(one), one.verdict] for one in differences]
    return Table(["part", "with it", "without it", "change of mean accuracy", "at 95 %"], rows)


def layers(findings: Findings, model: str) -> Table:
    """Cosines by task, and budgets over an equal share for methods whose layers differ."""
    rows = [[f"cosine, {task}", *(f"{v:.3f}" for v in row)] for task, row in cosines(findings).get(model, {}).items()]
    for point in smallest(findings, model):
        shares = layer_shares(point)
        if layers_differ(shares):
            rows.append([f"budget, `{point.policy}`", *(f"{share:.2f}" for share in shares)])
    most = max((len(row) for row in rows), default=1) - 1
    return Table(["layer", *map(str, range(most))], [row + [""] * (most + 1 - len(row)) for row in rows])


def positions(findings: Findings, model: str) -> Table:
    """Share of the kept tokens in each quarter of the prompt, and in its last twelfth."""
    head = ["policy", "task", "first quarter", "second", "third", "last quarter", "of it the last 1/12"]
    rows: list[list[str]] = []
    for point in smallest(findings, model):
        for task, probe in point.probes.items() if point.budget else ():
            if probe.get("kept"):
                bins = [sum(column) for column in zip(*probe["kept"], strict=True)]
                total = sum(bins) or 1
                size = len(bins)
                parts = [sum(bins[at * size // 4 : (at + 1) * size // 4]) / total for at in range(4)]
                parts.append(sum(bins[size * 11 // 12 :]) / total)
                rows.append([f"`{point.policy}`", task, *(f"{part:.0%}" for part in parts)])
    return Table(head, rows)


def costs(findings: Findings, model: str) -> Table:
    """Speed and memory of every policy, averaged over tasks."""
    head = ["policy", "tokens per second", "new tokens per second", "KV bytes of a sequence", "of the full cache"]
    peak = any(point.average("peak_bytes") for point in findings.points)
    rows: list[list[str]] = []
    for point in findings.points:
        if point.model == model and point.costs:
            rates = [point.average(name) or 0 for name in ("tokens_per_second", "new_tokens_per_second", "kv_bytes")]
            row = [f"`{point.policy}`", *(f"{rate:,.0f}" for rate in rates), f"{point.average('kv_share') or 0:.1%}"]
            rows.append(row + ([f"{(point.average('peak_bytes') or 0) / 2**30:.2f} GiB"] if peak else []))
    return Table(head + (["peak of the accelerator"] if peak else []), rows)


def failures(findings: Findings) -> Table:
    """Failed cells with their errors."""
    rows = [
        [row.model, f"`{row.method}@{row.budget}`" if row.budget else f"`{row.method}`", row.task, row.error]
        for row in findings.failed
    ]
    return Table(["model", "policy", "task", "error"], rows)


def versions(findings: Findings) -> Table:
    """Versions of the software, and the hardware."""
    names = list(dict.fromkeys(name for versions in findings.versions for name in versions))
    rows = [
        [name, ", ".join(dict.fromkeys(versions.get(name, "") for versions in findings.versions))] for name in names
    ]
    return Table(["what", "version"], rows)


def name_of(budget: str) -> str:
    """A budget as text.

    Examples:
        >>> name_of("0.2"), name_of("64"), name_of("8MiB")
        ('20%', '64 tokens', '8MiB')
    """
    kind, size = amount(budget)
    return (f"{100 * size:.4g}%", f"{budget} tokens", budget)[kind]


def _cell(point: Point | None, best: set[str], mode: str | None) -> str:
    if point is None:
        return ""
    score = point.score(mode)
    if score is None:
        return "a score is missing"
    return f"**{score}**" if point.policy in best else str(score)


def _signed(one: Difference) -> str:
    score = one.score
    interval = "" if isnan(score.low) else f" [{score.low:+.3f}, {score.high:+.3f}]"
    return f"{score.value:+.3f}{interval}"
