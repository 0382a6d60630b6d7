"""`kvpolicy plan`: what a model and its cache take on each rank, and how many rows fit beside them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from kvpolicy.cli.layers import layer_facts, layer_table
from kvpolicy.cli.models import dtype_of
from kvpolicy.cli.printing import as_json, paragraph, size, table
from kvpolicy.cli.words import POLICY, TINY, Batch, Config, Json, New, Policy, Prompt
from kvpolicy.planning.result import NOT_MEASURED
from kvpolicy.spec.errors import KVPolicyError

NOT_COUNTED = "Not counted: activations, and a prompt's own cache before it is compressed."


def plan(
    model: Config = TINY,
    policy: Policy = POLICY,
    batch: Batch = 1,
    prompt: Prompt = 4096,
    new: New = 1024,
    dtype: Annotated[str, typer.Option(metavar="DTYPE", help="Of weights, keys and values.")] = "bfloat16",
    tp: Annotated[
        int, typer.Option("--tp", min=1, max=2**16, metavar="RANKS", help="Ranks of tensor parallelism.")
    ] = 1,
    backend: Annotated[str, typer.Option(help="Who divides the model: deepspeed or hf.")] = "deepspeed",
    memory: Annotated[str, typer.Option(help="Of each rank, as 80GB (10^9 bytes) or 80GiB (2^30).")] = "80GB",
    json: Json = False,
) -> None:
    """Say what a model and its cache take, with nothing loaded."""
    from kvpolicy.hf.embedded import config_of
    from kvpolicy.hf.model_spec import describe
    from kvpolicy.hf.plan import plan as plan_cache

    kind, room = dtype_of(dtype), _memory(memory)
    _check_order(model, policy)
    config = config_of(model)
    sizes = {"batch": batch, "prompt": prompt, "new": new}
    planned = plan_cache(config, policy, **sizes, dtype=kind, tp=tp, backend=backend)
    facts = {"model": model, "policy": str(planned.policy), "dtype": dtype, "tp": tp}
    whole = facts | {"backend": backend, **sizes, "memory": room} | figures(planned, room)
    full = describe(config, kind, tp).token_bytes() * batch * (prompt + new)
    print(as_json("plan", whole) if json else render(whole, full))


def _memory(text: str) -> int:
    from kvpolicy.spec.budget import bytes_of

    try:
        return bytes_of(text)
    except ValueError:
        raise KVPolicyError(f"The memory {text} is not understood: give bytes such as 80GB or 80GiB.") from None


def _check_order(model: str, policy: str) -> None:
    """Say so where a policy stands in the model's place."""
    from kvpolicy.cli.words import shipped
    from kvpolicy.policy import Policy

    if model in shipped() or Path(model).exists():
        return
    try:
        Policy.parse(model)
    except ValueError:
        return
    raise KVPolicyError(f"{model} is a policy and stands in the model's place: write kvpolicy plan MODEL {model}.")


def figures(planned: Any, memory: int) -> dict[str, Any]:
    """Bytes of each rank and layer, and the largest batches in its memory, as JSON."""
    weights = planned.weights
    return {
        "weights": {"replicated": weights.replicated, "sharded": weights.sharded, "total": weights.nbytes},
        "calibrated": planned.resident_nbytes,
        "cache": planned.by_kind() | {"total": planned.nbytes},
        "full_cache": planned.full_nbytes,
        "largest_batch": {
            "policy": planned.largest_batch(memory),
            "full": planned.full_largest_batch(memory),
        },
        "measured": planned.measured,
        "note": planned.note,
        "layers": layer_facts(planned),
    }


def render(whole: dict[str, Any], full: int) -> str:
    """The same as text.

    Args:
        whole: What `plan --json` prints.
        full: Bytes of one layer of the full cache.
    """
    ranks = f"on each of {whole['tp']} ranks, {whole['backend']}" if whole["tp"] > 1 else "on one rank"
    sizes = f"{whole['batch']:,} row(s), each of {whole['prompt']:,} prompt and {whole['new']:,} new tokens"
    model = f"{whole['model']} in {whole['dtype']}, {ranks}"
    lines = [model, f"policy {whole['policy']}", paragraph(sizes), ""]
    lines += [layer_table(whole["layers"], full), ""]
    for told in remarked(whole):
        lines += [paragraph(told), ""]
    lines += [table(_totals(whole)), "", paragraph(f"1 GB is 10^9 bytes, 1 MB is 10^6. {NOT_COUNTED}")]
    return "\n".join(lines)


def remarked(whole: dict[str, Any]) -> list[str]:
    """What a reader of the table must know, in sentences."""
    told = [NOT_MEASURED] * (not whole["measured"]) + [whole["note"]] * bool(whole["note"])
    return [f"{text[:1].upper()}{text[1:]}." for text in told]


def _totals(whole: dict[str, Any]) -> list[tuple[str, str, str]]:
    weights, cache, most = whole["weights"], dict(whole["cache"]), whole["largest_batch"]
    held = cache.pop("total")
    rows = [("", "policy", "full cache")]
    if whole["tp"] > 1:
        rows += [("weights, on every rank", size(weights["replicated"]), "")]
        rows += [("weights, divided", size(weights["sharded"]), "")]
    rows += [("weights", size(weights["total"]), size(weights["total"]))]
    if whole["calibrated"]:
        rows += [("calibrated tensors", size(whole["calibrated"]), "")]
    rows += [(f"cache, {kind}", size(taken), "") for kind, taken in cache.items() if taken]
    rows += [("cache", size(held), size(whole["full_cache"]))]
    rows += [("cache, of the full one", f"{held / whole['full_cache']:.3f}", f"{1:.3f}")]
    return [*rows, (f"largest batch in {size(whole['memory'])}", f"{most['policy']:,} rows", f"{most['full']:,} rows")]
