"""What the commands' arguments and options are called, and what they may be."""

from __future__ import annotations

from typing import Annotated

import typer

from kvpolicy.cli.completion import complete_model, complete_policy
from kvpolicy.spec.errors import KVPolicyError

POLICY = "squeeze+kvcrush"
"""The policy of a command that is given none."""


_MODEL_HELP = "A shipped name, a folder, a config.json or a hub name."

Policy = Annotated[
    str, typer.Argument(metavar="POLICY", help="Such as snapkv+kivi:bits=4@0.2.", autocompletion=complete_policy)
]
"""A policy's words, as an argument; give the parameter the default `POLICY`."""

Policies = Annotated[
    list[str] | None, typer.Argument(metavar="POLICY", help="Such as h2o@0.2.", autocompletion=complete_policy)
]
"""Any number of policies."""

Config = Annotated[str, typer.Argument(metavar="MODEL", help=_MODEL_HELP, autocompletion=complete_model)]
"""A model of which the config is enough, as an argument; give the parameter the default `TINY`."""

Model = Annotated[
    str, typer.Option("--model", metavar="MODEL", help="tiny, a folder or a hub name.", autocompletion=complete_model)
]
"""A model that is loaded, as an option; give the parameter the default `TINY`, and hand it to `models.load`."""

Dtype = Annotated[
    str, typer.Option("--dtype", metavar="DTYPE", help="Of the weights: auto, float32, bfloat16, float16.")
]
"""Of weights; the default `auto` is as they are stored, and float32 for the embedded model."""

Device = Annotated[str, typer.Option("--device", metavar="DEVICE", help="Such as cuda; by default an accelerator.")]
"""Where to; the default, empty, is an accelerator if there is one."""

Json = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]
"""Whether to print JSON; give the parameter the default False, and print by `printing.as_json`."""

Batch = Annotated[int, typer.Option("--batch", min=1, max=2**16, metavar="ROWS", help="Rows of the batch.")]
Prompt = Annotated[
    int, typer.Option("--prompt", min=1, max=2**40, metavar="TOKENS", help="Tokens of each row's prompt.")
]
New = Annotated[int, typer.Option("--new", min=0, max=2**40, metavar="TOKENS", help="Tokens to be generated.")]


def names(text: str) -> tuple[str, ...]:
    """Read names with commas between."""
    return tuple(part.strip() for part in text.split(","))


def numbers(option: str, text: str) -> tuple[int, ...]:
    """Read whole numbers with commas between.

    Raises:
        KVPolicyError: Where they are none; it names the option.

    >>> numbers("--sn", "1,2,4")
    (1, 2, 4)
    """
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise KVPolicyError(
            f"{option} is {text!r}, which is no list of whole numbers: give some such as 1,2,4."
        ) from None
