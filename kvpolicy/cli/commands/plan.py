"""`kvpolicy plan`: the memory of a model and its cache on each rank, and the largest batch that fits."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

import kvpolicy
from kvpolicy.cli.arguments import POLICY, Batch, Config, Json, New, Policy, Prompt
from kvpolicy.cli.formatting import as_json, input_size, paragraph, size, table, terms
from kvpolicy.cli.layer_table import layer_facts, layer_table
from kvpolicy.cli.model_loading import dtype_of
from kvpolicy.cli.model_names import TINY, shipped
from kvpolicy.spec.errors import KVPolicyError

FOOTER = "Not included: activations, and the uncompressed cache during prefill."

HINT = "kvpolicy tune finds a policy for each layer within such bytes, from what it does to your text."
"""Where a plan leads to."""


def plan(
    model: Config = TINY,
    policy: Policy = POLICY,
    batch: Batch = 1,
    prompt: Prompt = 4096,
    new: New = 1024,
    dtype: Annotated[str, typer.Option(metavar="DTYPE", help="Dtype of weights, keys and values.")] = "bfloat16",
    tp: Annotated[
        int, typer.Option("--tp", min=1, max=2**16, metavar="RANKS", help="Number of tensor-parallel ranks.")
    ] = 1,
    backend: Annotated[
        str, typer.Option(metavar="BACKEND", help="Library that shards the model: deepspeed or hf.")
    ] = "deepspeed",
    memory: Annotated[
        str, typer.Option(metavar="BYTES", help="Memory of each rank, such as 80GiB (2^30 bytes) or 80GB (10^9 bytes).")
    ] = "80GiB",
    json: Json = False,
) -> None:
    """Compute the memory of a model and its cache.

    Only the config of the model is read. With several ranks, all numbers are those of the rank that holds the most.
    """
    from kvpolicy.hf.embedded import config_of
    from kvpolicy.hf.model_spec import describe

    cache_dtype = dtype_of(dtype)
    capacity = _bytes(memory)
    _check_order(model, policy)
    config = config_of(model)
    sizes = {"batch": batch, "prompt": prompt, "new": new}
    planned = kvpolicy.plan(config, policy, **sizes, dtype=cache_dtype, tp=tp, backend=backend)
    facts = {"model": model, "policy": str(planned.policy), "dtype": dtype, "tp": tp}
    facts |= {"backend": backend, **sizes, "memory": capacity} | figures(planned, capacity)
    full = describe(config, cache_dtype, tp).token_bytes() * batch * (prompt + new)
    print(as_json("plan", facts) if json else render(facts, full))


def _bytes(memory: str) -> int:
    from kvpolicy.spec.budget import bytes_of

    try:
        return bytes_of(memory)
    except ValueError:
        raise KVPolicyError(
            f"--memory must be a number of bytes with a unit, got {memory!r}; try 80GiB or 80GB."
        ) from None


def _check_order(model: str, policy: str) -> None:
    """Raise KVPolicyError if a policy was given in the place of the model."""
    from kvpolicy.policy import Policy

    if model in shipped() or Path(model).exists():
        return
    try:
        Policy.parse(model)
    except ValueError:
        return
    raise KVPolicyError(f"MODEL must be a model, got the policy {model!r}; try kvpolicy plan MODEL {model}.")


def figures(planned: Any, memory: int) -> dict[str, Any]:
    """Return the bytes of weights, cache and layers, and the largest batches, as a dictionary for JSON.

    Args:
        planned: A `CachePlan` with weights.
        memory: Bytes of each rank.
    """
    weights = planned.weights
    return {
        "weights": {"replicated": weights.replicated, "sharded": weights.sharded, "total": weights.nbytes},
        "calibrated": planned.resident_nbytes,
        "cache": planned.by_kind() | {"total": planned.nbytes},
        "full_cache": planned.full_nbytes,
        "moved": {"step": planned.moved, "all": sum(layer.all_moved for layer in planned.layers)},
        "largest_batch": {
            "policy": planned.largest_batch(memory),
            "full": planned.full_largest_batch(memory),
        },
        "measured": planned.measured,
        "note": planned.note,
        "layers": layer_facts(planned),
    }


def render(facts: dict[str, Any], full: int) -> str:
    """Format a plan as text.

    Args:
        facts: The output of `plan --json`.
        full: Bytes of the full cache of one layer.
    """
    ranks = f"on each of {facts['tp']} ranks ({facts['backend']})" if facts["tp"] > 1 else "on one rank"
    head = [
        ("model", f"{facts['model']} in {facts['dtype']}, {ranks}"),
        ("policy", facts["policy"]),
        ("input", input_size(facts["batch"], facts["prompt"], facts["new"])),
    ]
    lines = [terms(head, 0), "", layer_table(facts["layers"], full), ""]
    for note in notes(facts):
        lines += [paragraph(note), ""]
    lines += [table(_totals(facts)), "", paragraph(f"{FOOTER} {HINT}")]
    return "\n".join(lines)


def notes(facts: dict[str, Any]) -> list[str]:
    """Return the notes of a plan as sentences."""
    from kvpolicy.planning.result import NOT_MEASURED

    texts: list[str] = []
    if not facts["measured"]:
        texts.append(NOT_MEASURED)
    if facts["note"]:
        texts.append(facts["note"])
    return [f"{text[:1].upper()}{text[1:]}." for text in texts]


def _totals(facts: dict[str, Any]) -> list[tuple[str, str, str]]:
    weights = facts["weights"]
    cache = dict(facts["cache"])
    total = cache.pop("total")
    full = facts["full_cache"]
    largest = facts["largest_batch"]
    rows = [("", "policy", "full cache")]
    if facts["tp"] > 1:
        rows.append(("weights, replicated", size(weights["replicated"]), ""))
        rows.append(("weights, sharded", size(weights["sharded"]), ""))
    rows.append(("weights", size(weights["total"]), size(weights["total"])))
    if facts["calibrated"]:
        rows.append(("calibrated tensors", size(facts["calibrated"]), ""))
    rows += [(f"cache, {kind}", size(taken), "") for kind, taken in cache.items() if taken]
    rows.append(("cache", size(total), size(full)))
    if facts["moved"]["step"] != facts["moved"]["all"]:  # the policy has a reader
        moved = facts["moved"]
        rows.append(("moved per step", size(moved["step"]), ""))
        rows.append(("moved per step, if all were read", size(moved["all"]), ""))
    rows.append(("cache, fraction of full", f"{total / full:.3f}", f"{1:.3f}"))
    rows.append(
        (f"largest batch in {size(facts['memory'])}", f"{largest['policy']:,} rows", f"{largest['full']:,} rows")
    )
    return rows
