"""`kvpolicy bench`: a self-test of less than a minute that measures policies on this machine."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from kvpolicy.cli.arguments import TINY, Compile, Device, Dtype, Json, Model, Policies, Tile, tile_of
from kvpolicy.cli.formatting import as_json, counted, paragraph, size, table, width
from kvpolicy.cli.model_loading import check_length, load

DEFAULT = ["full", "window@0.2", "h2o@0.2", "squeeze+kvcrush@0.2", "snapkv+kivi:bits=4@0.2"]
"""The default policies."""

Length = Annotated[int, typer.Option("--length", min=64, max=2**17, metavar="TOKENS", help="Prompt length.")]
Steps = Annotated[int, typer.Option("--steps", min=1, max=1024, metavar="TOKENS", help="Number of decode steps.")]
Rounds = Annotated[
    int, typer.Option("--rounds", min=1, max=100, metavar="INT", help="Number of measurements of each policy.")
]
Threads = Annotated[
    int,
    typer.Option("--threads", min=0, max=1024, metavar="INT", help="CPU threads of PyTorch; 0 for PyTorch's default."),
]


def bench(
    policies: Policies = None,
    model: Model = TINY,
    length: Length = 2000,
    steps: Steps = 16,
    rounds: Rounds = 3,
    threads: Threads = 0,
    compile: Compile = False,
    tile: Tile = "auto",
    dtype: Dtype = "auto",
    device: Device = "",
    json: Json = False,
) -> None:
    """Measure time and memory of policies, and check logits.

    Times and bytes are compared to those of the same model with its stock cache: the dynamic one, or with --compile the
    static one, compiled as well. The exit code is 1 if a check fails.
    """
    import torch

    from kvpolicy.cli.measurement import CHECKED_STEPS, PADDED_LENGTH, checks, compare_to_stock, machine
    from kvpolicy.policy import Policy

    size_of_tile = tile_of(tile)
    parsed = [Policy.parse(spec) for spec in policies or DEFAULT]
    torch.set_num_threads(threads or torch.get_num_threads())
    loaded, _ = load(model, dtype, device, text=False)
    # One more step is for warm-up; with --compile, another one for the first token.
    check_length(loaded, length, steps + (2 if compile else 1), "try a smaller --length or --steps")
    check_length(loaded, PADDED_LENGTH, CHECKED_STEPS, "try a model with more positions")
    facts: dict[str, Any] = machine(loaded) | {"model": model, "length": length, "steps": steps, "rounds": rounds}
    facts |= {"compiled": compile, "checks": checks(loaded, parsed)}
    facts |= compare_to_stock(loaded, parsed, length, steps, rounds, size_of_tile, compile=compile)
    print(as_json("bench", facts) if json else render(facts))
    if not all(check["passed"] for check in facts["checks"]):
        raise typer.Exit(1)


def render(facts: dict[str, Any]) -> str:
    """Format the results as text."""
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    machine = f"{facts['device']}, {counted(facts['threads'], 'thread')}, {facts['dtype']}"
    stock = facts["stock"]
    stock_cache = "Static cache, compiled" if facts["compiled"] else "Stock cache"
    run = (
        f"{facts['model']}: prompt of {facts['length']:,} random tokens, {counted(facts['steps'], 'decode step')}, "
        f"{counted(facts['rounds'], 'round')}. {stock_cache}: prefill {stock['prefill_seconds']:.3f} s, decode "
        f"{1000 * stock['step_seconds']:.2f} ms per step, {size(stock['bytes'])}."
    )
    legend = (
        "prefill, decode: time relative to the stock cache, median over the rounds (lower is better). bytes: size of "
        "the cache at the end."
    )
    results = [("policy", "prefill", "decode", "bytes", "of full"), *map(_row, facts["policies"])]
    lines = [paragraph(f"{versions}; {machine}"), paragraph(run), "", _table(results), "", paragraph(legend), ""]
    return "\n".join([*lines, *map(_check, facts["checks"])])


def _table(rows: list[tuple[str, ...]]) -> str:
    """Format the results; if the table is too wide for the terminal, each policy has a line above its numbers."""
    whole = table(rows)
    if max(map(len, whole.splitlines())) <= width():
        return whole
    header, *numbers = table([("", *row[1:]) for row in rows]).splitlines()
    return "\n".join([header, *(f"{row[0]}\n{line}" for row, line in zip(rows[1:], numbers, strict=True))])


def _row(result: dict[str, Any]) -> tuple[str, ...]:
    return (
        result["policy"],
        f"{result['prefill_ratio']:.2f}x",
        f"{result['step_ratio']:.2f}x",
        size(result["bytes"]),
        f"{result['bytes'] / result['full_bytes']:.3f}",
    )


def _check(check: dict[str, Any]) -> str:
    verdict = "ok" if check["passed"] else "FAILED"
    numbers = f"relative difference {check['difference']:.1e}, tolerance {check['allowed']:.0e}"
    return paragraph(f"{verdict}: {check['what']} ({numbers}).", 0, 4)
