"""`kvpolicy compare`: what policies do to the answers of a model to prompts of your own."""

from __future__ import annotations

import math
import sys
from typing import Annotated, Any

import typer

from kvpolicy.cli import arguments
from kvpolicy.cli.arguments import complete_policy
from kvpolicy.cli.formatting import as_json, counted, paragraph, size, table
from kvpolicy.text.errors import KVPolicyError

Z = 1.959964
"""Standard deviations of a 95 % interval."""

LEGEND = (
    "answered: texts of which greedy decoding gives every token of the answer, with a 95 % interval. same token, KL: "
    "how often the most probable token is the full cache's, and the divergence from its predictions in nats. bytes: of "
    "the cache after the prompt. peak: planned for the longest prompt, without weights. seconds: of a text."
)


def compare(
    model: arguments.ModelName,
    text: arguments.AnswersFile,
    policies: Annotated[
        list[str],
        typer.Option(
            "--policy",
            metavar="POLICY",
            help="Policy spec; repeat it. The others are compared with the first.",
            autocompletion=complete_policy,
        ),
    ],
    prompt: arguments.PromptTokens = 0,
    answer: arguments.AnswerTokens = 0,
    windows: arguments.Windows = 64,
    margin: arguments.Margin = arguments.MARGIN,
    compile: arguments.Compile = False,
    tile: arguments.Tile = "auto",
    dtype: arguments.Dtype = "auto",
    device: arguments.Device = "",
    seed: arguments.TextSeed = 0,
    quiet: Annotated[bool, typer.Option("--quiet", help="Do not print progress.")] = False,
    json: arguments.Json = False,
) -> None:
    """Compare policies on your own prompts: answers, divergence from the full cache, bytes, peak and time.

    Each line of a JSONL file has a `prompt` and its `answer`, and may have a `question`, which is given to the
    compressed cache before the answer. Without one, the first token of an answer does not depend on the policy. With
    --compile, the time of a text includes that of the compilation in the first one.
    """
    from kvpolicy.policy import Policy

    tile_size = arguments.tile_of(tile)
    parsed = [Policy.parse(policy) for policy in policies]
    if len({str(policy) for policy in parsed}) < len(parsed):
        raise KVPolicyError(f"--policy must name each policy once, got {', '.join(policies)}; try another budget.")
    from kvpolicy.cli.formatting import Progress
    from kvpolicy.cli.model_loading import check_longest, load
    from kvpolicy.hf.attach import attach
    from kvpolicy.hf.plan import plan
    from kvpolicy.tuning.comparison import compare as difference
    from kvpolicy.tuning.comparison import verdict_line
    from kvpolicy.tuning.evidence import reference_logits, score
    from kvpolicy.tuning.verdict import check_margin
    from kvpolicy.tuning.windows import read_windows

    check_margin(margin)
    loaded, tokenizer = load(model, dtype, device)
    found = read_windows(tokenizer, text, prompt=prompt or None, answer=answer or None, limit=windows, seed=seed)
    check_longest(loaded, found)
    lengths = {(len(window.prompt), len(window.follow)) for window in found}
    for policy in parsed:
        attach(loaded, policy, tile=tile_size, compile=compile).detach()
        for before, new in lengths:  # budgets too small for one of the texts
            plan(loaded, policy, prompt=before, new=new)
    # Whatever can be refused was: from here on, the model runs.
    progress = None if quiet or json else Progress(len(parsed) + 1, sys.stderr)
    reference = reference_logits(loaded, found, tile_size, progress and progress.part("full cache, for KL"))
    # The first policy is what the others are compared with, on the same windows.
    rows: list[dict[str, Any]] = []
    first = None
    for policy in parsed:
        bar = progress and progress.part(str(policy))
        scored = score(loaded, found, policy, reference=reference, tile=tile_size, compile=compile, progress=bar)
        first = scored if first is None else first
        rows.append(_facts(loaded, policy, found, scored, tile_size))
        if scored is not first and len(found) > 1:
            compared = difference(scored, first, margin=margin)
            said = {"verdict": compared.verdict, "sentence": verdict_line(compared, str(policy), str(parsed[0]))}
            rows[-1]["compared_with_the_first"] = compared._asdict() | said
    facts = {"model": model, "text": text, "texts": len(found), "policies": rows}
    print(as_json("compare", facts) if json else _render(facts))


def _facts(model: Any, policy: Any, windows: list[Any], scored: Any, tile: Any) -> dict[str, Any]:
    """Measurements of a policy, and its planned peak."""
    import kvpolicy

    longest = max(windows, key=lambda window: window.length)
    planned = tile if isinstance(tile, int) else None
    plan = kvpolicy.plan(model, policy, prompt=len(longest.prompt), new=len(longest.follow), tile=planned)
    right = int(scored.correct.sum())
    return {
        "policy": str(policy),
        "answered": right,
        "answered_interval": wilson(right, len(windows)),
        "same_token": float(scored.top1.mean()),
        "kl": float(scored.kl.mean()),
        "kl_interval": _mean_interval(scored.kl.tolist()),
        "bytes": scored.nbytes,
        "peak_bytes": plan.prefill_nbytes,
        "seconds": scored.seconds,
    }


def wilson(right: int, count: int) -> list[float]:
    """The Wilson interval of 95 % of a share.

    >>> [round(end, 3) for end in wilson(15, 16)]
    [0.717, 0.989]
    """
    share = right / count
    center = share + Z * Z / (2 * count)
    spread = Z * math.sqrt(share * (1 - share) / count + Z * Z / (4 * count * count))
    return [max((center - spread) / (1 + Z * Z / count), 0.0), min((center + spread) / (1 + Z * Z / count), 1.0)]


def _mean_interval(values: list[float]) -> list[float] | None:
    """The interval of 95 % of a mean; None of a single value."""
    if len(values) < 2:
        return None
    mean = math.fsum(values) / len(values)
    spread = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1) / len(values))
    return [mean - Z * spread, mean + Z * spread]


def _render(facts: dict[str, Any]) -> str:
    count = facts["texts"]
    rows = [("policy", "answered", "same token", "KL", "bytes", "peak", "seconds")]
    for found in facts["policies"]:
        low, high = found["answered_interval"]
        rows.append(
            (
                found["policy"],
                f"{found['answered']} of {count} ({low:.0%}-{high:.0%})",
                f"{found['same_token']:.1%}",
                f"{found['kl']:.4f}",
                size(int(found["bytes"])),
                size(found["peak_bytes"]),
                f"{found['seconds']:.2f}",
            )
        )
    lines = [paragraph(f"{facts['model']} on {counted(count, 'text')} of {facts['text']}."), "", table(rows), ""]
    for found in facts["policies"][1:]:
        compared = found.get("compared_with_the_first")
        if compared is not None:
            lines += [paragraph(compared["sentence"]), ""]
    return "\n".join([*lines, paragraph(LEGEND)])
