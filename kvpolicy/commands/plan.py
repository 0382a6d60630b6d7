"""`kvpolicy plan`: what a model and its cache take on each rank, and how many rows fit beside them."""

from __future__ import annotations

import argparse
import json
from typing import Any

from kvpolicy.commands.words import count

NOT_COUNTED = "Not counted: activations, and a prompt's own cache before it is compressed."


def add(commands: Any) -> None:
    """Add the command to a parser's commands."""
    words = {
        "help": "say what a model and its cache will take, before anything is loaded",
        "description": "Say what a model's weights and its cache take on each rank. Nothing is loaded or allocated.",
        "epilog": "Ships with configs of llama-2-70b, llama-3-70b, mixtral-8x7b and tiny.",
    }
    parser = commands.add_parser("plan", formatter_class=argparse.ArgumentDefaultsHelpFormatter, **words)
    parser.set_defaults(run=run)
    parser.add_argument("model", metavar="MODEL", help="a shipped name, a folder, a config.json or a hub name")
    parser.add_argument("policy", metavar="POLICY", help="such as snapkv+kivi:bits=4@0.2, or full")
    parser.add_argument("--batch", type=count, default=1, help="rows")
    parser.add_argument("--prompt", type=count, default=4096, help="tokens of each row's prompt")
    parser.add_argument("--new", type=int, default=1024, help="tokens to be generated")
    parser.add_argument("--dtype", default="bfloat16", help="of weights, keys and values")
    parser.add_argument("--tp", type=count, default=1, help="ranks of tensor parallelism")
    parser.add_argument("--backend", default="deepspeed", help="who divides the model: deepspeed or hf")
    parser.add_argument("--memory", default="80GB", help="of each rank, such as 80GB (10^9 bytes) or 80GiB (2^30)")
    parser.add_argument("--json", action="store_true", help="print JSON, in bytes")


def run(args: argparse.Namespace) -> None:
    """Plan, and print a table or JSON.

    Raises:
        ValueError: Where an argument cannot be understood, or the policy cannot keep this model's cache.
    """
    import torch

    from kvpolicy.budget import bytes_of
    from kvpolicy.embedded import config_of
    from kvpolicy.planning import plan

    dtype = getattr(torch, args.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"The dtype {args.dtype} is not known: give bfloat16, float16 or float32.")
    if args.new < 0:
        raise ValueError(f"There cannot be {args.new} new tokens: give 0 or more.")
    try:
        memory = bytes_of(args.memory)
    except ValueError:
        raise ValueError(f"The memory {args.memory} is not understood: give bytes such as 80GB or 80GiB.") from None
    config = config_of(args.model)
    sizes = {"batch": args.batch, "prompt": args.prompt, "new": args.new}
    planned = plan(config, args.policy, **sizes, dtype=dtype, tp=args.tp, backend=args.backend)
    facts = {"model": args.model, "policy": str(planned.policy), "dtype": args.dtype, "tp": args.tp}
    facts |= {"backend": args.backend, **sizes, "memory": memory}
    whole = facts | figures(planned, memory)
    print(json.dumps(whole, indent=2) if args.json else render(whole))


def figures(planned: Any, memory: int) -> dict[str, Any]:
    """Bytes of each rank, and the largest batches in its memory, as JSON."""
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
    }


def render(whole: dict[str, Any]) -> str:
    """The same as a table of 80 columns."""
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
    rows += [(f"largest batch in {size(whole['memory'])}", f"{most['policy']:,} rows", f"{most['full']:,} rows")]
    ranks = f"on each of {whole['tp']} ranks, {whole['backend']}" if whole["tp"] > 1 else "on one rank"
    lines = [
        f"{whole['model']} in {whole['dtype']}, {ranks}",
        f"policy {whole['policy']}",
        f"{whole['batch']:,} row(s), each of {whole['prompt']:,} prompt and {whole['new']:,} new tokens",
        "",
        *(f"{name:34}{policy:>18}{full:>18}".rstrip() for name, policy, full in rows),
        "",
        "1 GB is 10^9 bytes, 1 MB is 10^6.",
        NOT_COUNTED,
    ]
    return "\n".join(lines)


def size(nbytes: int) -> str:
    """Write bytes in the decimal unit that fits.

    >>> size(141_107_412_992), size(84_000), size(12)
    ('141.11 GB', '84.00 KB', '12 B')
    """
    for unit, scale in (("GB", 10**9), ("MB", 10**6), ("KB", 10**3)):
        if nbytes >= scale:
            return f"{nbytes / scale:,.2f} {unit}"
    return f"{nbytes} B"
