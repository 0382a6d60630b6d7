"""The layers of a plan as JSON and as a table, in which layers with equal cells share one line.

Its last columns may be the time that a decode step takes to copy keys and values from host memory, from rates that the
user states.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from kvpolicy.cli.formatting import size
from kvpolicy.text.errors import KVPolicyError
from kvpolicy.text.tables import text_layer_table


def layer_facts(planned: Any) -> list[dict[str, Any]]:
    """Return each layer of a `CachePlan` as a dictionary for JSON, ordered by index."""
    managed: list[dict[str, Any]] = [
        {
            "layer": layer.layer_idx,
            "tokens": layer.tokens,
            "exact_slots": layer.layout.exact,
            "coded_slots": list(layer.layout.coded),
            "bytes": dict(layer.nbytes) | {"total": sum(layer.nbytes.values())},
        }
        for layer in planned.layers
    ]
    unmanaged = [
        {"layer": index, "unmanaged": True, "bytes": {"total": nbytes}} for index, nbytes in planned.unmanaged.items()
    ]
    return sorted([*managed, *unmanaged], key=lambda layer: layer["layer"])


def layer_table(layers: Sequence[dict[str, Any]], full: int) -> str:
    """Format the tokens, slots and bytes of the layers.

    Args:
        layers: The result of `layer_facts`.
        full: Bytes of the full cache of one managed layer.
    """
    head = ("layers", "tokens", "exact", "coded", "bytes", "of full")
    sizes = {layer["layer"]: layer["bytes"]["total"] for layer in layers}
    return text_layer_table(head, [(layer["layer"], _cells(layer, full)) for layer in layers], nbytes=sizes)


def _cells(layer: dict[str, Any], full: int) -> tuple[str, ...]:
    nbytes: int = layer["bytes"]["total"]
    if "tokens" not in layer:  # an unmanaged layer holds its stock cache, which has no ratio to show
        return ("unmanaged", "", "", size(nbytes), "")
    ratio = f"{nbytes / full:.3f}" if full else ""
    coded = "+".join(f"{slots:,}" for slots in layer["coded_slots"]) or "0"
    return (f"{layer['tokens']:,}", f"{layer['exact_slots']:,}", coded, size(nbytes), ratio)


_RATE = re.compile(r"(.+?)\s*/\s*s")

Link = Annotated[
    str | None,
    typer.Option(
        "--link",
        metavar="RATE",
        help="Rate of copies from host memory, such as 25GB/s, for readers with host=true. Prints the time of a step's "
        "copies.",
    ),
]

Bandwidth = Annotated[
    str | None,
    typer.Option(
        "--bandwidth",
        metavar="RATE",
        help="Rate of reads of the device's memory, such as 3.35TB/s. With --link, compares a step's copies with its "
        "reads of weights and cache.",
    ),
]


def parse_rate(option: str, text: str) -> int:
    """Read the value of an option, bytes per second.

    >>> parse_rate("--link", "25GB/s"), parse_rate("--link", "1 GiB/s")
    (25000000000, 1073741824)
    """
    from kvpolicy.text.budget import bytes_of  # imports PyTorch, which help does without

    match = _RATE.fullmatch(text.strip())
    try:
        rate = bytes_of(match[1]) if match else 0
    except KVPolicyError:
        rate = 0
    if rate < 1:
        raise KVPolicyError(f"{option} must be bytes per second with a unit, got {text!r}; try 25GB/s.")
    return rate


def transfer_facts(planned: Any, link: str | None, bandwidth: str | None, weights: int = 0) -> dict[str, Any] | None:
    """The bytes and seconds of a step's copies, for JSON; None without a link.

    Args:
        planned: A `CachePlan`.
        link: The rate of copies, as text.
        bandwidth: The rate of reads of the device's memory, as text, or None.
        weights: Bytes of the weights that a step reads.

    Raises:
        KVPolicyError: If a rate is no rate, or says nothing about the plan.
    """
    if link is None:
        if bandwidth is not None:
            raise KVPolicyError(f"--bandwidth must be given together with --link, got {bandwidth!r} alone; try 25GB/s.")
        return None
    if not planned.host_nbytes:
        raise KVPolicyError(
            f"--link must be given for a policy with keys and values in host memory, got {planned.policy}; try "
            "full+quest:host=true."
        )
    rate = parse_rate("--link", link)
    read = weights + planned.moved
    fast = None if bandwidth is None else parse_rate("--bandwidth", bandwidth)
    return {
        "rate": rate,
        "loaded": planned.loaded,
        "stored": planned.stored,
        "seconds": (planned.loaded + planned.stored) / rate,
        "bandwidth": fast,
        "weights": weights,
        "read": read,
        "read_seconds": None if fast is None else read / fast,
    }


def transfer_text(facts: dict[str, Any]) -> str:
    """The result of `transfer_facts` in sentences."""
    copied = size(facts["loaded"] + facts["stored"])
    text = (
        f"At {_rate(facts['rate'])}, the copies of a step, {copied}, take {_time(facts['seconds'])}. They do not "
        "overlap with computation: a step waits for its copies."
    )
    if facts["read_seconds"] is None:
        return text
    read = "all weights and the cache" if facts["weights"] else "the cache"
    more = "longer" if facts["seconds"] > facts["read_seconds"] else "no longer"
    return (
        f"{text} That is {more} than reading {read}, {size(facts['read'])}, which takes at least "
        f"{_time(facts['read_seconds'])} at {_rate(facts['bandwidth'])}."
    )


def _time(seconds: float) -> str:
    """A time with three significant digits.

    >>> _time(0.00123456), _time(2e-5), _time(1.5)
    ('1.23 ms', '0.02 ms', '1.5 s')
    """
    return f"{seconds:,.3g} s" if seconds >= 1 else f"{1000 * seconds:,.3g} ms"


def _rate(rate: int) -> str:
    """A rate in decimal units, as data sheets state it.

    >>> _rate(25 * 10**9), _rate(3_350 * 10**9), _rate(900)
    ('25 GB/s', '3.35 TB/s', '900 B/s')
    """
    for power, unit in ((12, "TB"), (9, "GB"), (6, "MB"), (3, "KB")):
        if rate >= 10**power:
            return f"{rate / 10**power:,.4g} {unit}/s"
    return f"{rate} B/s"
