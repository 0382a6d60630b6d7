"""`kvpolicy plan`: the memory of a model and its cache on each rank, and the largest batch that fits."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, Any

import typer

import kvpolicy
from kvpolicy.cli import arguments
from kvpolicy.cli.arguments import TINY, check_order
from kvpolicy.cli.formatting import as_json, counted, input_size, paragraph, size, table, terms
from kvpolicy.cli.layer_table import Bandwidth, Link, layer_facts, layer_table, transfer_facts, transfer_text
from kvpolicy.cli.model_loading import dtype_of
from kvpolicy.text.errors import KVPolicyError

FOOTER = (
    "The peak has weights, cache and the largest activations of generate. The headroom is for the rest: the context of "
    "the device, workspaces of its libraries, and gaps between allocations."
)

HEADROOM = "1GiB"
"""The default of what a plan leaves free on each rank.

An assumption, not a measurement: contexts of CUDA take some hundred MiB, and workspaces and gaps of the allocator grow
with the model.
"""

SIZES = (16384, 8192, 4096, 2048, 1024, 512)
"""Tiles, then chunks, that are tried where a whole prompt does not fit."""

_MEMORY = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,9})?)\s*(|[bB]|[kKmMgGtT](?:[iI]?[bB])?)")
MOST_GIB = 10**6
"""A memory of so many GiB is a mistake."""

HINT = "{} finds a policy for each layer within such bytes, from what it does to your text."
"""Where a plan leads to, if it fits: `tune_command`."""


def plan(
    model: arguments.Config = TINY,
    policy: arguments.Policy = arguments.POLICY,
    batch: arguments.Batch = 1,
    prompt: arguments.Prompt = None,
    new: arguments.New = 1024,
    chunk: arguments.Chunk = None,
    tile: arguments.TileTokens = None,
    hold: Annotated[
        bool, typer.Option("--hold", help="Hold chunks until the last one, as chunks='hold' of kvpolicy.attach.")
    ] = False,
    hold_codes: arguments.HoldCodes = False,
    dtype: Annotated[str, typer.Option(metavar="DTYPE", help="Dtype of weights, keys and values.")] = "bfloat16",
    tp: Annotated[
        int, typer.Option("--tp", min=1, max=2**16, metavar="RANKS", help="Number of tensor-parallel ranks.")
    ] = 1,
    backend: Annotated[
        str, typer.Option(metavar="BACKEND", help="Library that shards the model: deepspeed or hf.")
    ] = "deepspeed",
    memory: Annotated[
        str,
        typer.Option(
            metavar="BYTES",
            help="Memory of each rank, such as 80GiB (2^30 bytes) or 80GB (10^9 bytes); 80 means 80GiB.",
        ),
    ] = "80GiB",
    headroom: Annotated[
        str, typer.Option(metavar="BYTES", help="Memory of each rank that is left free for what no plan counts.")
    ] = HEADROOM,
    link: Link = None,
    bandwidth: Bandwidth = None,
    json: arguments.Json = False,
) -> None:
    """Compute the memory of a model and its cache.

    Only the config of the model is read. With several ranks, all numbers are those of the rank that holds the most.
    """
    from kvpolicy.hf.embedded import as_config
    from kvpolicy.hf.model_spec import describe
    from kvpolicy.hf.rotary_lookup import trained_positions

    # Refuse options before the config is looked up, which may download it.
    cache_dtype = dtype_of(dtype)
    capacity = parse_memory(memory)
    free = parse_memory(headroom, "--headroom", HEADROOM)
    if free >= capacity:
        raise KVPolicyError(f"--headroom must be less than --memory, got {headroom} of {memory}; try {HEADROOM}.")
    usable = capacity - free
    check_order("plan", model)
    config = as_config(model)
    prompt = arguments.prompt_length(prompt, new, trained_positions(config))
    sizes = {"batch": batch, "prompt": prompt, "new": new}

    def plan_for(chunk: int | None, tile: int | None, hold: bool = hold) -> Any:
        how: dict[str, Any] = {"dtype": cache_dtype, "tp": tp, "backend": backend}
        how |= {"chunk": chunk, "tile": tile, "chunks": "hold" if hold else "select"}
        how |= {"hold": arguments.hold_of(hold_codes)}
        return kvpolicy.plan(config, policy, **sizes, **how)  # pyright: ignore[reportArgumentType]

    # The facts are the JSON of the command, from which the text is made too.
    planned = plan_for(chunk, tile)
    facts: dict[str, Any] = {"model": model, "policy": str(planned.policy), "tp": tp}
    facts |= {"dtype": str(cache_dtype).removeprefix("torch."), "backend": backend, **sizes}
    facts |= {"chunk": chunk, "tile": tile, "hold": hold, "hold_codes": hold_codes}
    facts |= {"memory": capacity, "headroom": free}
    facts |= figures(planned, usable)
    facts["link"] = transfer_facts(planned, link, bandwidth, planned.weights.nbytes)
    facts["tune"] = tune_command(describe(config, cache_dtype), planned.weights.nbytes, prompt, usable, tp)
    # Whoever divides a prompt wants to know what the other ways of dividing it would hold.
    parts = chunk or tile
    if parts:
        ways = {
            "one piece": plan_for(None, None),
            f"tiles of {parts:,}": plan_for(None, parts),
            f"chunks of {parts:,}, held": plan_for(parts, None, hold=True),
            f"chunks of {parts:,}, selecting": plan_for(parts, None, hold=False),
        }
        facts["peaks"] = {way: found.prefill_nbytes for way, found in ways.items()}
    shape = describe(config, cache_dtype, tp, follows_plan=backend == "hf")
    full = shape.token_bytes() * batch * (prompt + new)
    if json:
        print(as_json("plan", facts))
        return
    print(render(facts, full, lambda *tried: figures(plan_for(*tried), usable)))


def parse_memory(text: str, option: str = "--memory", example: str = "80GiB or 80GB") -> int:
    """Read the bytes of a device; a number alone is in GiB.

    Args:
        text: The value.
        option: The name of the option, for the message; a headroom alone may be 0.
        example: A value that is right.

    Raises:
        KVPolicyError: If it is no amount of memory.

    >>> parse_memory("80"), parse_memory("24gb"), parse_memory("24 GiB"), parse_memory("80G")
    (85899345920, 24000000000, 25769803776, 80000000000)
    """
    from kvpolicy.text.budget import bytes_of

    match = _MEMORY.fullmatch(text.strip())
    # A larger number without a unit is one of bytes, or a mistake.
    is_none = match is not None and not float(match[1])
    if match is None or (is_none and option == "--memory") or (not match[2] and float(match[1]) >= MOST_GIB):
        raise KVPolicyError(f"{option} must be a number of bytes with a unit, got {text!r}; try {example}.")
    if is_none:
        return 0
    unit = match[2] or "GiB"
    prefix = unit[0].upper()
    binary = "i" in unit.lower()
    prefix = "" if prefix == "B" else prefix
    return bytes_of(f"{match[1]}{prefix}{'i' * binary}B")


def figures(planned: Any, memory: int) -> dict[str, Any]:
    """Return the bytes of a plan with weights, and the largest batches in `memory` bytes of each rank, for JSON."""
    weights = planned.weights
    prefill = {"policy": planned.prefill_nbytes, "full": planned.full_prefill_nbytes}
    return {
        "weights": {"replicated": weights.replicated, "sharded": weights.sharded, "total": weights.nbytes},
        "calibrated": planned.resident_nbytes,
        "cache": planned.by_kind() | {"total": planned.nbytes},
        "full_cache": planned.full_nbytes,
        "activations": planned.activation_nbytes,
        "peak": {"prefill": prefill},
        "places": {"device": planned.device_nbytes, "host": planned.host_nbytes},
        "moved": {
            "step": planned.moved,
            "all": sum(layer.all_moved for layer in planned.layers),
            "loaded": planned.loaded,
            "stored": planned.stored,
        },
        "largest_batch": {
            "policy": planned.largest_batch(memory),
            "full": planned.full_largest_batch(memory),
        },
        "measured": planned.measured,
        "note": planned.note,
        "layers": layer_facts(planned),
    }


def render(facts: dict[str, Any], full: int, tried: Callable[[int | None, int | None], dict[str, Any]]) -> str:
    """Format a plan as text.

    Args:
        facts: The output of `plan --json`.
        full: Bytes of the full cache of one layer.
        tried: The figures of the same plan with chunks and tiles of other sizes.
    """
    ranks = f"on each of {facts['tp']} ranks ({facts['backend']})" if facts["tp"] > 1 else "on one rank"
    head = [
        ("model", f"{facts['model']} in {facts['dtype']}, {ranks}"),
        ("policy", facts["policy"]),
        ("input", input_size(facts["batch"], facts["prompt"], facts["new"]) + _in_parts(facts)),
    ]
    lines = [terms(head, 0), "", layer_table(facts["layers"], full), ""]
    for note in notes(facts):
        lines += [paragraph(note), ""]
    lines += [table(_totals(facts)), ""]
    if facts["link"]:
        lines += [paragraph(transfer_text(facts["link"])), ""]
    if "peaks" in facts:
        peaks = [(way, size(peak)) for way, peak in facts["peaks"].items()]
        lines += [table([("the prompt", "peak while prefilling"), *peaks]), ""]
    if not facts["largest_batch"]["policy"]:
        lines += [paragraph(_why_none(facts, tried)), ""]
    hint = f" {HINT.format(facts['tune'])}" if facts["tune"] else ""
    return "\n".join([*lines, paragraph(f"{FOOTER}{hint}")])


def tune_command(model: Any, weights: int, prompt: int, memory: int, ranks: int) -> str:
    """The command that tunes a policy on prompts of this length, with tiles if it needs them.

    Empty if it does not fit, and for models that cannot be tuned.

    Args:
        model: The shape of the model's cache.
        weights: Bytes of its weights.
        prompt: Tokens of a prompt.
        memory: Bytes of the device, without the headroom.
        ranks: Ranks over which the model is sharded, which cannot tune.
    """
    if ranks > 1 or model.shape.value_dim is not None:
        return ""
    from kvpolicy.policy import Policy
    from kvpolicy.tuning.grid import PARTS
    from kvpolicy.tuning.ordinary import rivals
    from kvpolicy.tuning.peak import ANSWER, tuning_peak

    policies = [Policy.parse(spec) for spec in dict.fromkeys([*PARTS, *rivals()])]  # the peak depends on no budget
    for tile in (None, *(each for each in SIZES if each < prompt)):
        if tuning_peak(model, weights, policies, prompt, ANSWER, tile) <= memory:
            return "kvpolicy tune" + (f" --tile {tile}" if tile else "")
    return ""


def _in_parts(facts: dict[str, Any]) -> str:
    held = " and held" if facts["hold"] else ""
    chunk = f", prefilled {facts['chunk']:,} tokens at a time{held}" if facts["chunk"] else ""
    tile = f", in tiles of {facts['tile']:,}" if facts["tile"] else ""
    return chunk + tile + (", waiting in codes" if facts["hold_codes"] else "")


def _why_none(facts: dict[str, Any], tried: Callable[[int | None, int | None], dict[str, Any]]) -> str:
    """Say why not one row fits, and what would help."""
    memory = facts["memory"] - facts["headroom"]
    within = size(facts["memory"])
    if facts["headroom"]:
        within += f" with a headroom of {size(facts['headroom'])}"
    weights = facts["weights"]["total"]
    fixed = weights + facts["calibrated"]
    if fixed >= memory:
        more = "use more ranks (--tp) or more memory."
        return f"No row fits in {within}: the weights alone take {size(weights)}; {more}"
    cache = facts["cache"]["total"] // facts["batch"]
    if fixed + cache > memory:
        why = f"the weights take {size(weights)}, and the cache of a row {size(cache)}; try a smaller budget."
        return f"No row fits in {within}: {why}"
    text = f"No row fits in {within} while its prompt is prefilled"
    for option, note in (("tile", ""), ("chunk", " Chunks may keep other tokens.")):
        longest = min(facts["prompt"], facts[option] or facts["prompt"])
        for tokens in filter(lambda each: each < longest, SIZES):
            found = tried(facts["chunk"], tokens) if option == "tile" else tried(tokens, facts["tile"])
            if found["largest_batch"]["policy"]:
                peak = size(found["peak"]["prefill"]["policy"])
                return f"{text}; with --{option} {tokens}, the peak is {peak}.{note}"
    return f"{text}, in any tiles or chunks; use a shorter prompt, more ranks (--tp) or more memory."


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
    if facts["places"]["host"]:
        rows.append(("cache on the device", size(facts["places"]["device"]), ""))
        rows.append(("cache in host memory", size(facts["places"]["host"]), ""))
    if facts["moved"]["step"] != facts["moved"]["all"]:  # the policy has a reader
        moved = facts["moved"]
        rows.append(("moved per step", size(moved["step"]), ""))
        rows.append(("moved per step, if all were read", size(moved["all"]), ""))
        if moved["loaded"]:
            rows.append(("copied per step, from host memory", size(moved["loaded"]), ""))
            rows.append(("copied per step, to host memory", size(moved["stored"]), ""))
    rows.append(("cache, fraction of full", f"{total / full:.3f}", f"{1:.3f}"))
    rows.append(("activations, at most", size(facts["activations"]), ""))
    peak = facts["peak"]["prefill"]
    rows.append(("peak while prefilling", size(peak["policy"]), size(peak["full"])))
    rows.append(("headroom", size(facts["headroom"]), size(facts["headroom"])))
    own, stock = (counted(largest[cache], "row") for cache in ("policy", "full"))
    return [*rows, (f"largest batch in {size(facts['memory'])}", own, stock)]
