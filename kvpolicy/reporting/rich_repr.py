"""How objects show themselves in a notebook: as tables, and on one line."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvpolicy.hf.attach import Handle
    from kvpolicy.hf.cache import PolicyCache
    from kvpolicy.planning.result import CachePlan
    from kvpolicy.policy import Policy
    from kvpolicy.reporting.report import LayerReport, Report

MOST_ROWS = 16
"""A longer table is folded."""

Cells = tuple[str, ...]

NOT_MEASURED = (
    "layers are shown alike: the allocator measures them in the prompt; a row's tokens add up to the same, but bytes "
    "may differ with a codec, and be more with several rows, since a layer has slots for the row with the most"
)
"""What a plan says whose allocator has yet to measure."""


def unit_of(nbytes: float) -> tuple[int, str]:
    """The binary unit in which a number of bytes is at least 1, and its name.

    Examples:
        >>> unit_of(3 * 2**20), unit_of(12)
        ((1048576, 'MiB'), (1, 'B'))
    """
    for power, name in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if nbytes >= 2**power:
            return 2**power, name
    return 1, "B"


def in_words(nbytes: int) -> str:
    """A number of bytes to three places.

    Examples:
        >>> in_words(3 * 2**20 + 2**19), in_words(1000)
        ('3.5 MiB', '1,000 B')
    """
    size, unit = unit_of(nbytes)
    value = nbytes / size
    return f"{value:,.3g} {unit}" if value < 100 else f"{value:,.0f} {unit}"


def share_in_words(nbytes: int, full: int) -> str:
    """The one as a share of the other, nothing where that is nothing."""
    return f"{nbytes / full:.1%}" if full else ""


# on one line


def policy_words(policy: Policy) -> str:
    """What makes a policy again: its words, or its parts where one has no name."""
    words = str(policy)
    return words if words == parts_words(policy) else f"Policy.parse({words!r})"


def parts_words(policy: Policy) -> str:
    """A policy by its parts."""
    fields = ", ".join(f"{field.name}={getattr(policy, field.name)!r}" for field in dataclasses.fields(policy))
    return f"Policy({fields})"


def cache_words(cache: PolicyCache) -> str:
    """A cache's policy, rows and bytes."""
    return f"PolicyCache({cache.policy}, {_state(cache)})"


def handle_words(handle: Handle, model: str, attached: bool) -> str:
    """A handle's policy and model, and what its newest cache holds."""
    state = "no cache yet" if handle.cache is None else _state(handle.cache)
    return f"Handle({handle.policy} on {model}, {state}{'' if attached else ', detached'})"


def sizes_words(source: Report | CachePlan) -> str:
    """A report or a plan: policy, layers and bytes."""
    layers = f"{len(source.layers)} layer{'s' * (len(source.layers) != 1)}"
    return f"{type(source).__name__}({source.policy}, {layers}, {_held(source.nbytes, source.full_nbytes)})"


def _state(cache: PolicyCache) -> str:
    if cache.batch_size < 0:
        return "no prompt yet"
    rows = f"{cache.batch_size} row{'s' * (cache.batch_size != 1)}"
    return f"{rows}, {_held(cache.nbytes, cache.full_nbytes)}"


def _held(nbytes: int, full: int) -> str:
    return f"{in_words(nbytes)}" + (f", {share_in_words(nbytes, full)} of the full cache" if full else "")


# as tables


def policy_html(policy: Policy) -> str:
    """A policy's parts, what each does and with which numbers."""
    rows = [_part(kind, getattr(policy, kind)) for kind in ("allocator", "selector", "codec")]
    rows.append(("budget", escape(str(policy.budget)), escape(_budget(policy.budget)), ""))
    return _div(f"policy <code>{escape(str(policy))}</code>", _table(("", "part", "what it does", "with"), rows, 4))


def report_html(report: Report) -> str:
    """A report by layer: budget, tokens kept, bytes by kind, and their share of the full cache's."""
    kinds = _kinds(layer.nbytes for layer in report.layers)
    alone = sum(sum(layer.nbytes.values()) for layer in report.layers if not layer.budget)
    own = [layer for layer in report.layers if layer.budget]
    full = (report.full_nbytes - alone) // len(own) if own else 0
    rows = [(layer.layer_idx, _layer(layer, kinds, full)) for layer in report.layers]
    sums = _sizes(_sum(layer.nbytes for layer in report.layers), kinds, report.full_nbytes)
    head = ("layer", "budget", "kept", "seen", *kinds, "total", "of full")
    title = f"<code>{escape(str(report.policy))}</code>: {_held(report.nbytes, report.full_nbytes)}"
    return _div(title, _layers(head, rows, ("all", "", "", "", *sums)), *_notes(report))


def plan_html(plan: CachePlan) -> str:
    """A plan by layer: tokens, bytes by kind, and their share of the full cache's."""
    kinds = _kinds([plan.by_kind()])
    full = (plan.full_nbytes - sum(plan.left_alone.values())) // max(1, len(plan.layers))
    rows = [
        (layer.layer_idx, (f"{layer.tokens:,}", *_sizes(layer.nbytes, kinds, full))) for layer in plan.layers
    ]  # fmt: skip
    rows += [
        (index, ("left alone", *_sizes({"left alone": size}, kinds, 0))) for index, size in plan.left_alone.items()
    ]
    sums = _sizes(plan.by_kind(), kinds, plan.full_nbytes)
    head = ("layer", "budget", *kinds, "total", "of full")
    rank = f" on each of {plan.tp} ranks" if plan.tp > 1 else ""
    batch = f"{plan.batch} row{'s' * (plan.batch != 1)}"
    title = f"<code>{escape(str(plan.policy))}</code>, {batch}: {_held(plan.nbytes, plan.full_nbytes)}{rank}"
    notes = [] if plan.measured else [NOT_MEASURED]
    return _div(title, _layers(head, sorted(rows), ("all", "", *sums)), *notes, *_notes(plan))


def cache_html(cache: PolicyCache) -> str:
    """A cache's report, or its policy before the first prompt."""
    if cache.batch_size < 0:
        return _div("cache that has seen no prompt yet", policy_html(cache.policy))
    return report_html(cache.report())


def handle_html(handle: Handle, model: str, attached: bool) -> str:
    """Whose handle it is, and its newest cache's report."""
    state = "attached to" if attached else "detached from"
    below = policy_html(handle.policy) if handle.cache is None else cache_html(handle.cache)
    return _div(f"{state} {escape(model)}{', no cache yet' if handle.cache is None else ''}", below)


def _part(kind: str, part: Any) -> Cells:
    text = (inspect.getdoc(type(part)) or "").partition("\n\n")[0]
    fields = dataclasses.fields(part) if dataclasses.is_dataclass(part) else ()
    numbers = ", ".join(f"{field.name}={getattr(part, field.name)}" for field in fields)
    return kind, escape(type(part).__name__), escape(" ".join(text.split())), escape(numbers)


def _budget(budget: Any) -> str:
    if isinstance(budget, str):
        return "bytes of the whole cache"
    return "tokens per layer on average" if isinstance(budget, int) else "of each prompt's tokens"


def _layer(layer: LayerReport, kinds: Sequence[str], full: int) -> Cells:
    if not layer.budget:
        return (escape(layer.note.partition(":")[0]), "", "", *_sizes(layer.nbytes, kinds, 0))
    rows = (_span(numbers) for numbers in (layer.budget, layer.kept, layer.seen))
    return (*rows, *_sizes(layer.nbytes, kinds, full))


def _span(numbers: Sequence[int]) -> str:
    """One number where all rows agree, else the least and the most."""
    return f"{min(numbers):,}" if min(numbers) == max(numbers) else f"{min(numbers):,} to {max(numbers):,}"


def _kinds(sizes: Iterable[dict[str, int]]) -> list[str]:
    return [kind for kind, size in _sum(sizes).items() if size]


def _sum(sizes: Iterable[dict[str, int]]) -> dict[str, int]:
    total: dict[str, int] = {}
    for one in sizes:
        for kind, size in one.items():
            total[kind] = total.get(kind, 0) + size
    return total


def _sizes(sizes: dict[str, int], kinds: Sequence[str], full: int) -> Cells:
    cells = [in_words(sizes[kind]) if sizes.get(kind) else "" for kind in kinds]
    total = sum(sizes.values())
    return (*cells, in_words(total), share_in_words(total, full))


def _notes(source: Report | CachePlan) -> list[str]:
    beside = f"beside the cache, calibrated and the model's own: {in_words(source.resident_nbytes)}"
    return ([beside] if source.resident_nbytes else []) + ([escape(source.note)] if source.note else [])


def _layers(head: Cells, rows: Iterable[tuple[int, Cells]], last: Cells) -> str:
    """A table in which layers that are alike and follow each other share a line; folded where it is long."""
    lines: list[Cells] = []
    for cells, run in itertools.groupby(rows, key=lambda row: row[1]):
        indices = [index for index, _ in run]
        name = str(indices[0]) if len(indices) == 1 else f"{indices[0]} to {indices[-1]}"
        lines.append((name, *cells))
    if len(lines) <= MOST_ROWS:
        return _table(head, [*lines, last])
    summary = f"<summary>{len(lines)} lines, layer by layer</summary>"
    return f"{_table(head, [last])}<details>{summary}{_table(head, lines)}</details>"


def _table(head: Cells, rows: Iterable[Cells], words: int = 1) -> str:
    """A table whose first columns are words and the others numbers; cells are HTML."""
    sides = itertools.chain(itertools.repeat("left", words), itertools.repeat("right"))
    styles = [f'style="text-align:{side}"' for side, _ in zip(sides, head)]  # noqa: B905
    top = "".join(f"<th {style}>{cell}</th>" for style, cell in zip(styles, head, strict=True))
    body = "".join(
        "<tr>" + "".join(f"<td {style}>{cell}</td>" for style, cell in zip(styles, row, strict=True)) + "</tr>"
        for row in rows
    )
    return f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"


def _div(title: str, *parts: str) -> str:
    return f"<div><p>{title}</p>{''.join(part if part.startswith('<') else f'<p>{part}</p>' for part in parts)}</div>"
