"""Cost of head budgets, mergers, readers and a replay over a base policy.

Steps are of one layer with random tokens, compiled; prompts are of a whole model. Both sides run alternately.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

import kvpolicy
from kvpolicy_eval.bench.models import llama, tokens
from kvpolicy_eval.bench.steps import Layer
from kvpolicy_eval.bench.timing import Ratio, Row, compare
from kvpolicy_eval.common.table import (
    Grid,
    Option,
    Section,
    Table,
    collect,
    parts,
    rounds,
    threads,
    torch_note,
    without_equal,
)

COLUMNS = ["policy", "over", "time, median (quartiles)", "target"]
LAYERS = 4
PROMPT = 4096
STEPS = 8


class Case(NamedTuple):
    """A policy and its base.

    Attributes:
        ours: Spec without the budget.
        base: The same of the policy that it is compared with; empty for the stock model.
        limit: Largest time ratio that passes; None if there is no limit.
        sizes: Slots of a layer, for steps.
        prompt: Tokens of the prompt for each slot, for steps: 1 if nothing has to be dropped.
    """

    ours: str
    base: str
    limit: float | None = None
    sizes: tuple[int, ...] = (4096,)
    prompt: int = 2


def _reading(reader: str, limit: float | None = None) -> Case:
    return Case(f"window+{reader}:read=0.05:dense=0", "window", limit, (16384, 65536), 1)


STEP_CASES = {
    "heads": [
        Case("uniform/even+window", "window", 1.2, (4096, 16384)),
        Case("uniform/adakv+h2o", "h2o", 1.4, (4096, 8192)),
        Case("uniform/adakv+snapkv", "snapkv", 1.4, (8192,)),
    ],
    "selectors": [
        *(Case(name, "snapkv", 1.15) for name in ("knorm", "lagkv", "cur", "defensive", "dropkv", "compactor", "rkv")),
        *(Case(f"{name}/snapkv", "snapkv", 1.15) for name in ("critical", "caote", "chunk")),
        *(Case(name, "h2o", 1.15) for name in ("a2sf", "keyformer", "critical/h2o", "caote/h2o")),
    ],
    "mergers": [
        Case("h2o+merge", "h2o", 1.3),
        *(Case(f"h2o+{name}", "h2o") for name in ("d2o", "compensate", "elastic", "zsmerge", "keepkv")),
    ],
    "readers": [_reading("quest", 0.25), _reading("labels", 0.35), _reading("exact")],
}
"""Steps of one layer."""

PROMPT_CASES = [
    Case("uniform/adakv+snapkv", "snapkv", 1.03),
    Case("expected", "window", 1.03),
    Case("keydiff", "window", 1.03),
    Case("scissorhands", "h2o"),
    *(Case(name, "window", 1.05) for name in ("knorm", "lagkv", "cur", "defensive", "dropkv")),
    Case("compactor", "window", 1.35),
    Case("a2sf", "window", 1.35),
    Case("rkv", "window", 1.35),
    Case("keyformer", "h2o", 1.35),
    *(Case(f"{name}/snapkv", "snapkv", 1.05) for name in ("critical", "caote", "chunk")),
    Case("snapkv+merge", "snapkv", 1.15),
    *(Case(f"snapkv+{name}", "snapkv") for name in ("regress", "blend", "elastic", "zsmerge", "kvmerger", "keepkv")),
    Case("kvzip", "", 3.0),
    Case("kvcompose+kvzip", "", 3.0),
    Case("global/adakv+kvzip", "", 3.0),
]
"""Prompts."""


def measure_step(case: Case, slots: int, rounds: int, backend: str) -> Row:
    """Time compiled steps of a layer under a policy and its base."""
    torch.compiler.reset()
    base, ours = (Layer(policy, slots, backend, case.prompt * slots) for policy in (case.base, case.ours))
    with torch.no_grad():
        ratio = compare(lambda: _steps(base), lambda: _steps(ours), rounds)
    per_step = ratio._replace(base=ratio.base / STEPS, ours=ratio.ours / STEPS)
    return Row(f"{slots:,}", case.ours, per_step, case.limit)


def _steps(layer: Layer) -> None:
    for _ in range(STEPS):
        layer.compiled()
        layer.store.count_step()


def measure_prompt(case: Case, length: int, rounds: int) -> Row:
    """Time a prompt under a policy and its base."""
    base = llama(LAYERS)
    ours = llama(LAYERS)
    ids = tokens(length)
    with torch.inference_mode(), kvpolicy.attach(ours, f"{case.ours}@0.2"):
        if not case.base:
            ratio = _prompts(base, ours, ids, rounds)
        else:
            with kvpolicy.attach(base, f"{case.base}@0.2"):
                ratio = _prompts(base, ours, ids, rounds)
    return Row(f"{length:,}", case.ours, ratio, case.limit)


def _prompts(base: Any, ours: Any, ids: torch.Tensor, rounds: int) -> Ratio:
    return compare(lambda: base(ids, logits_to_keep=1), lambda: ours(ids, logits_to_keep=1), rounds)


def line(row: Row, base: str) -> list[str]:
    """One row of the table."""
    over = f"`{base}`" if base else "the stock model"
    return [row.what, f"`{row.policy}`", over, str(row.ratio), row.judged]


def lines(rounds: int, backend: str, quick: bool) -> dict[str, Callable[[], Iterator[list[str]]]]:
    """Measures the rows of each part of the table."""

    def steps(cases: list[Case]) -> Iterator[list[str]]:
        for case in cases:
            for slots in (256,) if quick else case.sizes:
                yield line(measure_step(case, slots, rounds, backend), case.base)

    def prompts() -> Iterator[list[str]]:
        for case in PROMPT_CASES:
            yield line(measure_prompt(case, 256 if quick else PROMPT, rounds), case.base)

    return {name: lambda cases=cases: steps(cases) for name, cases in STEP_CASES.items()} | {"prompts": prompts}


def measure(args: argparse.Namespace) -> Iterator[Section]:
    """A table for each part."""
    measures = lines(2 if args.quick else args.rounds, args.backend, args.quick)
    for name in args.parts or measures:
        columns = ["tokens" if name == "prompts" else "slots", *COLUMNS]
        grid, equal = without_equal(Grid(columns, collect(measures[name]())))
        yield Section(f"parts-{name}", [grid], f"{equal}{torch_note()}.")


PARTS = [*STEP_CASES, "prompts"]
TABLE = Table(
    measure=measure,
    places={f"parts-{name}": ["docs/benchmarks.md"] for name in PARTS},
    options=[
        parts(PARTS),
        Option("--quick", action="store_true", help="few slots and rounds, to see that it runs"),
        rounds(15),
        Option("--backend", default="inductor", help="of torch.compile"),
        threads(),
    ],
)
