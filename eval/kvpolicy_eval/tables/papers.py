"""Values of a paper, beside ours, or beside what a run would need.

`papers.yaml` has for each paper the sweep that measures the same, and rows with these keys:

- `what` and `place`: model and task as the paper calls them, and its table, if that is known; of a library, the pull
  request.
- `model`, `policy` and `task`: the cells of the sweep; without `task` all of its tasks, whose mean the value is.
- `config`: another sweep than the paper's.
- `value`: that of the paper.
- `ours`: that of a run of these cells; without it, the row says what a run needs.

`embedded` names policies of a table of docs/guide/sweep.md, which has the same comparison on the embedded model; a
paper may have none.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from kvpolicy_eval.common.table import Grid, Option, Section, Table
from kvpolicy_eval.sweep.config import load
from kvpolicy_eval.sweep.estimate import CARDS, Card, Estimate, estimate
from kvpolicy_eval.sweep.plan import needed

CARD = "a100-80gb"
COLUMNS = ["in the paper", "model and task", "policy", "the paper's value", "ours"]
SWEEP_PAGE = Path("docs") / "guide" / "sweep.md"
"""The page with the tables of the embedded model, relative to the root of the source tree."""


@cache
def papers() -> dict[str, Any]:
    """The content of `papers.yaml`, by paper."""
    return yaml.safe_load((files("kvpolicy_eval.tables") / "papers.yaml").read_text(encoding="utf-8"))


def values(paper: Mapping[str, Any], card: Card) -> Section:
    """The table of a paper's values.

    Args:
        paper: Its entry of `papers.yaml`.
        card: On which a run is estimated.

    Raises:
        ValueError: If a sweep has no cell of a row.
    """
    rows = [
        [
            row.get("place", ""),
            row["what"],
            f"`{row['policy']}`",
            row["value"],
            row.get("ours") or f"not run: needs {needed(_estimates(row, paper['config'], card))}",
        ]
        for row in paper["rows"]
    ]
    note = f"Hours and memory are those that `kvpolicy-eval sweep ... --plan --card {card.name}` estimates."
    return Section("values", [Grid(COLUMNS, rows)], note)


def _estimates(row: Mapping[str, Any], config_name: str, card: Card) -> Sequence[Estimate]:
    config = load(row.get("config", config_name))
    cells = [
        cell
        for cell in config.cells()
        if (cell.model, cell.policy) == (row["model"], row["policy"]) and row.get("task", cell.task) == cell.task
    ]
    if not cells:
        raise ValueError(f"The sweep {config.name} must have cells of {row['policy']} for {row['model']}, got none.")
    found = [estimate(config, cell, card) for cell in cells]
    if all(one.memory for one in found):
        return found
    # What cannot be planned, since its calibration is missing, is prefilled like the full cache at least.
    full = next(cell for cell in config.cells() if cell.model == row["model"] and cell.policy == "full")
    memory = estimate(config, full, card).memory
    return [Estimate(cell=one.cell, hours=one.hours, memory=one.memory or memory) for one in found]


def embedded(chosen: Mapping[str, Any], page: str) -> Section:
    """The rows of a table of the page of sweeps that compare what the paper compares.

    Args:
        chosen: `source`, the name of the table; `column`; and `policies`, in their order.
        page: Text of the page.

    Raises:
        ValueError: If the page lacks the table, the column or a policy.
    """
    source = chosen["source"]
    column = chosen["column"]
    place = re.search(rf"<!-- table:{re.escape(source)} -->\n(.*?)<!-- /table -->", page, re.DOTALL)
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in place[1].splitlines()] if place else []
    if not lines or column not in lines[0]:
        raise ValueError(f"{SWEEP_PAGE} must have the table {source} with the column {column!r}; see papers.yaml.")
    number = lines[0].index(column)
    by_policy = {line[0].strip("`*"): line for line in lines[2:]}
    missing = [policy for policy in chosen["policies"] if policy not in by_policy]
    if missing:
        raise ValueError(f"The table {source} of {SWEEP_PAGE} must have {missing[0]}; see papers.yaml.")
    rows = [
        # A policy without a budget has its value in another column.
        [f"`{policy}`", (by_policy[policy][number] or by_policy[policy][-2]).strip("*")]
        for policy in chosen["policies"]
    ]
    return Section("embedded", [Grid(["policy", f"accuracy {column}, with its 95 % interval"], rows)])


def measure(args: argparse.Namespace) -> Iterator[Section]:
    """Values of the paper, and the comparison on the embedded model."""
    paper = papers()[args.paper]
    yield values(paper, CARDS[args.card])._replace(place=f"{args.paper}-values")
    if "embedded" not in paper:
        return
    found = embedded(paper["embedded"], SWEEP_PAGE.read_text(encoding="utf-8"))
    yield found._replace(place=f"{args.paper}-embedded")


TABLE = Table(
    measure=measure,
    places={
        f"{name}-{part}": ["docs/reproduce/index.md"]
        for name, paper in papers().items()
        for part in ("values", "embedded")
        if part == "values" or part in paper
    },
    options=[
        Option("paper", choices=sorted(papers()), help="the paper"),
        Option("--card", choices=sorted(CARDS), default=CARD, help="the GPU of the estimate"),
    ],
    needs=f"{SWEEP_PAGE}",
)
