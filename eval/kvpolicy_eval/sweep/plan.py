"""The text of `sweep --plan`: the cells with their state, what they need by model, and what was assumed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from textwrap import fill

from kvpolicy.text.tables import count, format_bytes
from kvpolicy_eval.sweep.cells import Cell
from kvpolicy_eval.sweep.config import Config
from kvpolicy_eval.sweep.estimate import (
    BANDWIDTH,
    CARDS,
    COMPUTE,
    LAYER_SECONDS,
    Card,
    Estimate,
    estimate,
    most_memory,
    total_hours,
)
from kvpolicy_eval.sweep.sizes import TOKENS_PER_WORD, TOKENS_PER_WORD_OF_CODE

COLUMNS = ("state", "model", "policy", "task", "examples", "prompt", "new", "cache", "of full", "hours")
TEXT_COLUMNS = 4
"""The first columns are text, and the others numbers."""


def lines(config: Config, states: Mapping[Cell, str], card: str) -> Iterator[str]:
    """The lines of a plan.

    Args:
        config: Of the sweep.
        states: The state of each cell.
        card: Name of the card of the estimate.

    Raises:
        ValueError: If there is no such card.
    """
    if card not in CARDS:
        raise ValueError(f"--card must be one of {', '.join(CARDS)}, got {card!r}.")
    chosen = CARDS[card]
    estimates = [estimate(config, cell, chosen) for cell in states]
    yield from _aligned([COLUMNS, *(_cells(found, states[found.cell]) for found in estimates)])
    yield ""
    for model in config.models:
        yield _model_line(config, model, [found for found in estimates if found.cell.model == model], states, chosen)
    problems = dict.fromkeys(found.problem for found in estimates if found.problem)
    if problems:
        yield ""
        yield from (f"not known: {problem}" for problem in problems)
    idle = [found.cell for found in estimates if found.cell.budget and (found.share or 0) >= 1]
    if idle:
        yield ""
        yield f"{count(len(idle), 'cell')} with a budget that keeps every token of a mean prompt."
    yield ""
    yield fill(_assumptions(chosen), 100)


def needed(estimates: Sequence[Estimate]) -> str:
    """Hours and memory of cells, in words.

    Examples:
        >>> cell = Cell(model="m", task="t", method="h2o", budget="0.2")
        >>> needed([Estimate(cell=cell, hours=1.25, memory=17 * 10**9)])
        '1.2 h on a card with 16 GiB'
    """
    return f"{format_hours(total_hours(estimates))} on a card with {_gibibytes(most_memory(estimates))}"


def format_hours(hours: float) -> str:
    """Hours with at most two digits after the point.

    Examples:
        >>> format_hours(0.004), format_hours(0.26), format_hours(3.14), format_hours(1234.5)
        ('0.01 h', '0.26 h', '3.1 h', '1,234 h')
    """
    if hours >= 100:
        return f"{hours:,.0f} h"
    return f"{hours:.1f} h" if hours >= 1 else f"{max(hours, 0.01):.2f} h"


def _model_line(
    config: Config, model: str, estimates: Sequence[Estimate], states: Mapping[Cell, str], card: Card
) -> str:
    pending = [found for found in estimates if states[found.cell] != "done"]
    ranks = config.models[model].get("tp", 1)
    cards = card.name if ranks == 1 else f"{ranks} x {card.name}"
    memory = most_memory(estimates)
    fits = "" if not memory else ", which fits" if memory <= card.memory else ", which does not fit"
    each = "" if ranks == 1 else " each"
    held = f"; at most {_gibibytes(memory)}{each} with the longest prompts{fits}" if memory else ""
    return f"{model}: {count(len(pending), 'cell')} to run, {_time(pending)} on {cards}{held}"


def _time(estimates: Sequence[Estimate]) -> str:
    known = sum(found.hours is not None for found in estimates)
    if estimates and not known:
        return "unknown time"
    hours = format_hours(total_hours(estimates)) if estimates else "0 h"
    return hours if known == len(estimates) else f"{hours} for {known} of them"


def _cells(found: Estimate, state: str) -> tuple[str, ...]:
    size = found.size
    sizes = ("?",) * 3 if size is None else (f"{size.examples:,}", f"{size.tokens:,}", f"{size.new:,}")
    return (
        state,
        found.cell.model,
        found.cell.policy,
        found.cell.task,
        *sizes,
        "?" if found.nbytes is None else format_bytes(found.nbytes),
        "?" if found.share is None else f"{found.share:.3f}",
        "?" if found.hours is None else format_hours(found.hours).removesuffix(" h"),
    )


def _aligned(rows: Iterable[Sequence[str]]) -> Iterator[str]:
    table = list(rows)
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        text = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)][:TEXT_COLUMNS]
        numbers = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)][TEXT_COLUMNS:]
        yield "  ".join([*text, *numbers])


def _gibibytes(nbytes: int) -> str:
    return f"{-(-nbytes // 2**30)} GiB"


def _assumptions(card: Card) -> str:
    return (
        f"Estimated, not measured: prefill at {COMPUTE:.0%} of {card.flops / 1e12:.0f} TFLOP/s; decode steps at "
        f"{BANDWIDTH:.0%} of {card.bandwidth / 1e12:.2f} TB/s for the weights and what is read of the cache, and at "
        f"least {LAYER_SECONDS * 1000:.0f} ms for each layer; answers of the greatest length; {TOKENS_PER_WORD} tokens "
        f"per word, {TOKENS_PER_WORD_OF_CODE} in code. Without the time of the policy itself. Bytes of caches are "
        "those of kvpolicy.plan after the answer to a prompt of mean length."
    )
