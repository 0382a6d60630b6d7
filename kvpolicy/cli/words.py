"""What the commands' arguments and options are called, and what they may be."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.resources import files
from typing import Annotated

import typer

from kvpolicy.spec.errors import KVPolicyError

TINY = "tiny"
"""The model's name that stands for the embedded one."""

POLICY = "squeeze+kvcrush"
"""The policy of a command that is given none."""


def shipped() -> list[str]:
    """Names of the models whose configs ship with the package, found without PyTorch.

    >>> shipped()
    ['llama-2-70b', 'llama-3-70b', 'mixtral-8x7b', 'tiny']
    """
    configs = files("kvpolicy") / "assets" / "configs"
    return sorted([*(path.name.removesuffix(".json") for path in configs.iterdir()), TINY])


def complete_model(incomplete: str) -> list[str]:
    """Shipped names that begin so; a folder or a file is completed by the shell."""
    return [name for name in shipped() if name.startswith(incomplete)]


def complete_policy(incomplete: str) -> Iterator[str]:
    """Policies that go on with a name that may stand there; nothing heavy is imported for it.

    >>> list(complete_policy("squeeze+kvcrush/s")), list(complete_policy("squeeze+p"))
    (['squeeze+kvcrush/snapkv', 'squeeze+kvcrush/streaming'], ['squeeze+plain', 'squeeze+probe'])
    """
    from kvpolicy.registry import Kind, kinds, names

    if "@" in incomplete:
        return
    start = max(incomplete.rfind(sign) for sign in "+/") + 1
    before = [re.split("[:/]", part)[0] for part in incomplete[:start].split("+") if part]
    taken: list[Kind] = [kind for kind in kinds() if set(before) & set(names(kind))]
    free: list[Kind] = [kind for kind in kinds() if kind not in taken]
    if incomplete[:start].endswith("/"):  # what is wrapped is of the wrapper's kind
        free = [kind for kind in taken if before[-1] in names(kind)]
    known = sorted(name for kind in free for name in names(kind)) + ([] if start else ["none"])
    yield from (incomplete[:start] + name for name in known if name.startswith(incomplete[start:]))


def complete_part(incomplete: str) -> list[str]:
    """Kinds of parts, and names of parts, that begin so."""
    from kvpolicy.registry import kinds, names

    known = [*(f"{kind}s" for kind in kinds()), *names()]
    return [word for word in known if word.startswith(incomplete)]


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
