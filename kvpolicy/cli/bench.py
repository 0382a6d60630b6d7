"""`kvpolicy bench`: does it work on this machine, and what does it cost? In under a minute."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from kvpolicy.cli.models import load
from kvpolicy.cli.printing import as_json, paragraph, size, table, width
from kvpolicy.cli.words import TINY, Device, Dtype, Json, Model, Policies

DEFAULT = ["full", "window@0.2", "h2o@0.2", "squeeze+kvcrush@0.2", "snapkv+kivi:bits=4@0.2"]
"""The policies that are tried where none is named."""

Length = Annotated[int, typer.Option("--length", min=64, max=2**17, metavar="TOKENS", help="Tokens of the prompt.")]
Steps = Annotated[int, typer.Option("--steps", min=1, max=1024, metavar="TOKENS", help="Tokens decoded behind it.")]
Rounds = Annotated[int, typer.Option("--rounds", min=1, max=100, help="Times that each is measured.")]
Threads = Annotated[int, typer.Option("--threads", min=0, max=1024, help="Of PyTorch on the CPU; 0 for its own.")]


def bench(
    policies: Policies = None,
    model: Model = TINY,
    length: Length = 2000,
    steps: Steps = 16,
    rounds: Rounds = 3,
    threads: Threads = 0,
    dtype: Dtype = "auto",
    device: Device = "",
    json: Json = False,
) -> None:
    """Try policies on this machine: time, bytes and two checks.

    Times and bytes stand beside those of the same model with its stock cache.
    """
    import torch

    from kvpolicy.cli.measuring import checks, compared, machine
    from kvpolicy.policy import Policy

    parsed = [Policy.parse(words) for words in policies or DEFAULT]
    torch.set_num_threads(threads or torch.get_num_threads())
    loaded, _ = load(model, dtype, device, text=False)
    facts: dict[str, Any] = machine(loaded) | {"model": model, "length": length, "steps": steps, "rounds": rounds}
    facts |= compared(loaded, parsed, length, steps, rounds) | {"checks": checks(loaded, parsed)}
    print(as_json("bench", facts) if json else render(facts))
    if not all(check["passed"] for check in facts["checks"]):
        raise typer.Exit(1)


def render(facts: dict[str, Any]) -> str:
    """The same as text."""
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    stock = facts["stock"]
    lines = [
        paragraph(f"{versions}; {facts['device']}, {facts['threads']} thread(s), {facts['dtype']}"),
        paragraph(
            f"{facts['model']}: a prompt of {facts['length']:,} random tokens, then {facts['steps']:,} more, "
            f"{facts['rounds']} round(s). The stock cache: prompt {stock['prefill_seconds']:.3f} s, "
            f"token {1000 * stock['step_seconds']:.2f} ms, {size(stock['bytes'])}."
        ),
        "",
        _table([("policy", "prompt", "token", "bytes", "of full"), *map(_row, facts["policies"])]),
        "",
        paragraph(
            "prompt, token: median time over the stock cache's, less is better. bytes: what the cache holds at the end."
        ),
        "",
    ]
    return "\n".join([*lines, *map(_check, facts["checks"])])


def _table(rows: list[tuple[str, ...]]) -> str:
    """Rows with aligned columns; where they are too wide for the terminal, each policy above its numbers."""
    whole = table(rows)
    if max(map(len, whole.splitlines())) <= width():
        return whole
    numbers = table([("", *row[1:]) for row in rows]).splitlines()
    return "\n".join([numbers[0], *(f"{row[0]}\n{line}" for row, line in zip(rows[1:], numbers[1:], strict=True))])


def _row(found: dict[str, Any]) -> tuple[str, ...]:
    ratios = (f"{found['prefill_ratio']:.2f}x", f"{found['step_ratio']:.2f}x")
    return (found["policy"], *ratios, size(found["bytes"]), f"{found['bytes'] / found['full_bytes']:.3f}")


def _check(check: dict[str, Any]) -> str:
    verdict = "ok" if check["passed"] else "FAILED"
    return paragraph(
        f"{verdict}: {check['what']} (differ by {check['difference']:.1e} of {check['allowed']:.0e}).", 0, 4
    )
