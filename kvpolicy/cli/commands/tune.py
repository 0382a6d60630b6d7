"""`kvpolicy tune`: measure what candidates do to each layer of a model, and find a policy by layer for a budget."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from kvpolicy.cli import arguments
from kvpolicy.cli.formatting import as_json, counted, duration, paragraph, table, telling_of_unfinished_work
from kvpolicy.cli.formatting import size as format_size
from kvpolicy.text.errors import KVPolicyError
from kvpolicy.text.output import check_output


def tune(
    model: arguments.ModelName,
    text: arguments.AnswersFile,
    out: Annotated[str, typer.Option("--out", metavar="FILE", help="JSON file to write.")],
    budget: Annotated[
        str, typer.Option(metavar="BUDGET", help="Fraction of the full cache's bytes, tokens, or bytes, such as 0.1.")
    ] = "0.1",
    measure: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="joint: KL of the predictions, corrected for how layers act together; kl: of one layer alone; "
            "output: error of its attention output, weighted.",
        ),
    ] = "joint",
    policies: Annotated[
        list[str] | None,
        typer.Option("--policy", metavar="POLICY", help="Parts to choose from; repeat it. By default a small grid."),
    ] = None,
    shares: Annotated[str, typer.Option(metavar="FLOATS", help="Fractions of the prompt to measure each at.")] = "",
    prompt: arguments.PromptTokens = 0,
    answer: arguments.AnswerTokens = 0,
    windows: arguments.Windows = 64,
    held_out: Annotated[
        float,
        typer.Option(metavar="FLOAT", help="Share of the texts that is held out to compare with ordinary policies."),
    ] = 0.25,
    rivals: Annotated[
        list[str] | None,
        typer.Option("--rival", metavar="POLICY", help="Ordinary policies to compare with; repeat it. By default 28."),
    ] = None,
    no_evidence: Annotated[bool, typer.Option("--no-evidence", help="Do not compare with ordinary policies.")] = False,
    margin: arguments.Margin = arguments.MARGIN,
    tile: arguments.Tile = "auto",
    dtype: Annotated[
        str, typer.Option(metavar="DTYPE", help="Dtype of the weights: auto is float32 on a CPU.")
    ] = "auto",
    device: arguments.Device = "",
    seed: arguments.TextSeed = 0,
    quiet: Annotated[bool, typer.Option("--quiet", help="Disable progress bars.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace a file for another model, text or options.")] = False,
    json: arguments.Json = False,
) -> None:
    """Find a policy for each layer by its effect on the predictions for your text.

    To resume an interrupted run, or to compare at another budget, run the same command again. The file serves any
    budget: tuned:file=FILE@BUDGET.
    """
    from kvpolicy.cli.model_loading import check_longest, load
    from kvpolicy.planning.curves import MEASURES, load_tuned
    from kvpolicy.policy import Policy, TunedPolicy
    from kvpolicy.policy.tuned import TunedFile
    from kvpolicy.text.budget import parse_budget
    from kvpolicy.text.model_file import SAME
    from kvpolicy.tuning.grid import PARTS, SHARES, make_grid
    from kvpolicy.tuning.ordinary import rivals as ordinary_policies
    from kvpolicy.tuning.proof import as_share, check_held_out, prove
    from kvpolicy.tuning.rivals import estimate_rivals
    from kvpolicy.tuning.tune import check_budget, estimate
    from kvpolicy.tuning.tune import tune as run
    from kvpolicy.tuning.verdict import check_margin
    from kvpolicy.tuning.windows import read_windows, split

    out = os.path.expanduser(out)
    wanted = parse_budget(budget)
    check_margin(margin)
    check_output(out, SAME.format("tuning"), inputs=[text, model], is_own=load_tuned, force=force)
    tile_size = arguments.tile_of(tile)
    grid = make_grid(policies or PARTS, arguments.parse_fractions("--shares", shares) if shares else SHARES)
    if measure not in MEASURES:
        raise KVPolicyError(f"--measure must be one of {', '.join(MEASURES)}, got {measure!r}; try joint.")
    if no_evidence and rivals:
        raise KVPolicyError(
            f"--rival must be given without --no-evidence, which compares with none, got {rivals[0]}; try one of them."
        )
    for spec in rivals or ():
        Policy.parse(spec)  # an invalid one raises an error before anything is measured
    for option, specs, budgets in (("--policy", policies, "--shares"), ("--rival", rivals, "--budget")):
        for spec in specs or ():
            if "@" in spec:
                raise KVPolicyError(
                    f"{option} must be without a budget, got {spec}; try {spec.partition('@')[0]} with {budgets}."
                )
    loaded, tokenizer = load(model, dtype, device)
    if dtype == "auto" and next(loaded.parameters()).device.type == "cpu":
        loaded = loaded.float()
    found = read_windows(tokenizer, text, prompt=prompt or None, answer=answer or None, limit=windows, seed=seed)
    check_longest(loaded, found)
    tuning, others = (found, []) if no_evidence else split(found, held_out, seed)
    if not no_evidence:  # what the comparison would refuse, before anything is measured
        check_held_out(others)
        as_share(loaded, tuning, wanted)
    check_budget(loaded, tuning, grid, wanted)
    if not quiet and not Path(out).exists():
        compared = [] if no_evidence else [Policy.parse(spec) for spec in rivals or ordinary_policies()]
        _print_peak(loaded, [*grid, *compared], found, tile_size)
        seconds = estimate(loaded, tuning, grid, measure, tile_size)  # pyright: ignore[reportArgumentType]
        if not no_evidence:
            seconds += estimate_rivals(loaded, tuning, len(others), rivals, tile_size)
        what = f"{counted(len(grid), 'candidate')} in each layer on {counted(len(tuning), 'text')}"
        # To standard error, so that standard output has the result alone.
        print(f"Measuring {what}: about {duration(seconds)}.", file=sys.stderr, flush=True)
    measured: dict[str, Any] = {"measure": measure, "force": force, "tile": tile_size}
    bar = None if quiet else _Bar()
    with telling_of_unfinished_work(f"{out}.unfinished", out):
        curves = run(loaded, tuning, out, candidates=grid, progress=bar, **measured)
        spec = str(TunedPolicy(TunedFile(file=out), wanted))
        evidence: dict[str, Any] | None = None
        if not no_evidence:
            how: dict[str, Any] = {"specs": rivals, "margin": margin, "progress": not quiet, "tile": tile_size}
            evidence = prove(loaded, out, wanted, tuning, others, **how)
    facts = {
        "file": out,
        "policy": spec,
        "texts": {"tuned": len(tuning), "held_out": len(others)},
        "candidates": len(curves.candidates),
        "measure": measure,
        "evidence": evidence,
    }
    print(as_json("tune", facts) if json else _render(facts))


def _print_peak(model: Any, policies: list[Any], windows: list[Any], tile: Any) -> None:
    """Print what measuring takes on the device, before anything is measured."""
    from kvpolicy.hf.model_spec import describe
    from kvpolicy.tuning.peak import tuning_peak

    weights = sum(part.nbytes for part in model.parameters())
    prompt = max(len(window.prompt) for window in windows)
    answer = max(len(window.follow) for window in windows)
    shape = describe(model.config, model.dtype)
    peak = tuning_peak(shape, weights, policies, prompt, answer, tile if isinstance(tile, int) else None)
    print(f"At most {format_size(peak)} are in use on the device, weights included.", file=sys.stderr, flush=True)


def _render(facts: dict[str, Any]) -> str:
    lines = [paragraph(f"Wrote {facts['file']}. Use it with {facts['policy']}, or any other budget.")]
    evidence = facts["evidence"]
    if evidence is not None:
        rows = [("", "answered", "same token", "KL", "bytes")]
        for name, key in (("tuned", "tuned"), (evidence["rival"], "ordinary")):
            found = evidence[key]
            correct, same = (f"{found[measure]:.1%}" for measure in ("correct", "top1"))
            rows.append((name, correct, same, f"{found['kl']:.4f}", f"{found['nbytes']:,.0f}"))
        lines += [
            "",
            paragraph(
                f"On {counted(evidence['windows'], 'text')} that were held out, beside the best of "
                f"{evidence['rivals']} ordinary policies at the same bytes on the texts that were tuned on:"
            ),
            "",
            table(rows),
            "",
            paragraph(evidence["verdict"]),
        ]
    return "\n".join(lines)


class _Bar:
    """A progress bar over texts."""

    def __init__(self) -> None:
        self._bar: Any = None

    def __call__(self, done: int, total: int) -> None:
        from tqdm.auto import tqdm

        if self._bar is None:
            self._bar = tqdm(total=total, desc="measuring")
        self._bar.update(done - self._bar.n)
        if done == total:
            self._bar.close()
