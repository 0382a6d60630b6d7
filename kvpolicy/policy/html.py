"""A policy as an HTML table."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from html import escape
from typing import Any

from kvpolicy.text.budget import Budget, Share
from kvpolicy.text.tables import Cells, section, table


def policy_html(spec: str, parts: Mapping[Any, Any], budget: Budget) -> str:
    """An HTML table of a policy's parts: what each does, and its parameters."""
    rows = [_part_cells(kind, part) for kind, part in parts.items()]
    rows.append(("budget", escape(str(budget)), _budget_unit(budget), ""))
    columns = ("", "part", "what it does", "with")
    return section(f"policy <code>{escape(spec)}</code>", table(columns, rows, text_columns=4))


def by_layer_html(spec: str, layers: Mapping[str, Any], budget: Budget) -> str:
    """An HTML table of a policy that differs by layer: the policy of each layer, and its share."""
    rows: list[Cells] = [
        (layer, escape(str(policy).partition("@")[0]), str(policy.budget)) for layer, policy in layers.items()
    ]
    rows.append(("all", "", escape(str(budget))))
    return section(f"policy <code>{escape(spec)}</code>", table(("", "policy", "budget"), rows, text_columns=2))


def _part_cells(kind: str, part: Any) -> Cells:
    summary = (inspect.getdoc(type(part)) or "").partition("\n\n")[0]
    options = fields(part) if is_dataclass(part) else ()
    pairs = [(option.name, getattr(part, option.name)) for option in options]
    values = ", ".join(f"{name}={value}" for name, value in pairs if name != "heads" or value is not None)
    return kind, escape(type(part).__name__), escape(" ".join(summary.split())), escape(values)


def _budget_unit(budget: Budget) -> str:
    if isinstance(budget, str):
        return "bytes of the whole cache"
    if isinstance(budget, Share):
        return f"of each prompt's tokens, but at least {budget.least:,} tokens per layer on average"
    return "tokens per layer on average" if isinstance(budget, int) else "of each prompt's tokens"
