"""Arguments and options that several subcommands share."""

from __future__ import annotations

from typing import Annotated

import typer

from kvpolicy.cli.completion import complete_model, complete_policy
from kvpolicy.spec.errors import KVPolicyError

POLICY = "squeeze+kvcrush"
"""The default policy."""

Policy = Annotated[
    str,
    typer.Argument(
        metavar="POLICY", help="Policy spec, such as snapkv+kivi:bits=4@0.2.", autocompletion=complete_policy
    ),
]
"""A policy spec, as an argument. The default of the parameter is `POLICY`."""

Policies = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="POLICY",
        help="Policy specs, such as h2o@0.2. By default a selection of five.",
        autocompletion=complete_policy,
    ),
]
"""Any number of policy specs."""

Config = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="Shipped model, folder, config.json, or model name on the Hub. Only the config is read.",
        autocompletion=complete_model,
    ),
]
"""A model whose config is sufficient, as an argument. The default of the parameter is `TINY`."""

Model = Annotated[
    str,
    typer.Option(
        "--model", metavar="MODEL", help="tiny, a folder, or a model name on the Hub.", autocompletion=complete_model
    ),
]
"""A model to load, as an option. The default of the parameter is `TINY`; `model_loading.load` takes the value."""

Dtype = Annotated[
    str, typer.Option("--dtype", metavar="DTYPE", help="Dtype of the weights: auto, float32, bfloat16 or float16.")
]
"""The default `auto` is the dtype of the checkpoint, or float32 for the embedded model."""

Device = Annotated[
    str, typer.Option("--device", metavar="DEVICE", help="Device, such as cuda. By default an accelerator, if any.")
]
"""The default, an empty string, is an accelerator if one is available, or the CPU."""

Json = Annotated[bool, typer.Option("--json", help="Print only JSON.")]
"""Whether to print JSON with `formatting.as_json`. The default of the parameter is False."""

Batch = Annotated[int, typer.Option("--batch", min=1, max=2**16, metavar="ROWS", help="Batch size.")]
Prompt = Annotated[int, typer.Option("--prompt", min=1, max=2**40, metavar="TOKENS", help="Prompt length of each row.")]
New = Annotated[int, typer.Option("--new", min=0, max=2**40, metavar="TOKENS", help="Number of tokens to generate.")]


def parse_names(text: str) -> tuple[str, ...]:
    """Parse a list of names separated by commas."""
    return tuple(part.strip() for part in text.split(","))


def parse_fractions(option: str, text: str) -> tuple[float, ...]:
    """Parse a list of fractions separated by commas.

    Args:
        option: The name of the option, for the error message.
        text: Its value.

    Raises:
        KVPolicyError: If a part is not a number.

    >>> parse_fractions("--shares", "0.05,1.0")
    (0.05, 1.0)
    """
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise KVPolicyError(f"{option} must be fractions, got {text!r}; try 0.05,0.1,0.2.") from None


def parse_integers(option: str, text: str) -> tuple[int, ...]:
    """Parse a list of integers separated by commas.

    Args:
        option: The name of the option, for the error message.
        text: Its value.

    Raises:
        KVPolicyError: If a part is not an integer.

    >>> parse_integers("--sn", "1,2,4")
    (1, 2, 4)
    """
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise KVPolicyError(f"{option} must be a list of integers, got {text!r}; try 1,2,4.") from None
