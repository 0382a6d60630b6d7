"""Arguments and options that several subcommands share, their shell completion, and the names of shipped models.

Models, policy specs and parts are completed without importing PyTorch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from kvpolicy.text.embedded_names import EMBEDDED
from kvpolicy.text.errors import KVPolicyError
from kvpolicy.text.limits import LEAST_TOKENS

TINY = "tiny"
"""The name of the embedded model that is the default."""


def shipped() -> list[str]:
    """Return the embedded models and the models whose configs ship with the package.

    >>> shipped()[-2:]
    ['tiny', 'tiny-4k']
    """
    configs = files("kvpolicy") / "assets" / "configs"
    return sorted([*(path.name.removesuffix(".json") for path in configs.iterdir()), *EMBEDDED])


def check_order(command: str, model: str) -> None:
    """Raise KVPolicyError if a policy was given in the place of the model.

    Args:
        command: The name of the command.
        model: The argument MODEL.
    """
    from kvpolicy.policy import Policy

    if model in shipped() or Path(model).exists():
        return
    try:
        Policy.parse(model)
    except ValueError:
        return
    raise KVPolicyError(f"MODEL must be a model, got the policy {model!r}; try kvpolicy {command} MODEL {model}.")


def complete_model(incomplete: str) -> list[str]:
    """Complete the name of a shipped model; the shell completes folders and files."""
    return [name for name in shipped() if name.startswith(incomplete)]


def complete_policy(incomplete: str) -> Iterator[str]:
    """Complete the last name of a policy spec with the strategies that are allowed at this position.

    >>> list(complete_policy("squeeze+kvcrush/sn")), list(complete_policy("squeeze+p"))
    (['squeeze+kvcrush/snapkv'], ['squeeze+plain', 'squeeze+probe'])
    """
    from kvpolicy.registry import WHOLE, Kind, kinds, names

    if "@" in incomplete:  # the budget follows, which has no names
        return
    start = max(incomplete.rfind(separator) for separator in "+/") + 1
    given = [re.split("[:/]", part)[0] for part in incomplete[:start].split("+") if part]
    used: list[Kind] = [kind for kind in kinds() if set(given) & set(names(kind))]
    allowed: list[Kind] = [kind for kind in kinds() if kind not in used]
    if incomplete[:start].endswith("/"):  # a wrapped strategy has the kind of its wrapper, but for head allocators
        allowed = [kind for kind in used if given[-1] in names(kind)]
        allowed = ["head_allocator"] if allowed == ["allocator"] else allowed
    candidates = sorted(name for kind in allowed for name in names(kind)) + ([] if start else ["none", *WHOLE])
    yield from (incomplete[:start] + name for name in candidates if name.startswith(incomplete[start:]))


def complete_part(incomplete: str) -> list[str]:
    """Complete the plural of a kind, such as `codecs`, or the name of a strategy."""
    from kvpolicy.registry import BUILT_IN, WHOLE, names

    candidates = [*(f"{kind}s" for kind in BUILT_IN), *names(), *WHOLE]
    return [word for word in candidates if word.startswith(incomplete)]


POLICY = "squeeze+kvcrush"
"""The default policy."""

MARGIN = 0.01
"""The default of `Margin`, that of `kvpolicy.tuning.verdict`, which is not imported for the help."""

DEFAULT_PROMPT = 4096
"""The default prompt length, for models that were trained for it."""

Policy = Annotated[
    str,
    typer.Argument(
        metavar="POLICY", help="Policy spec, such as snapkv+kivi:bits=4@0.2.", autocompletion=complete_policy
    ),
]
"""A policy spec, as an argument. The default of the parameter is `POLICY`."""

PolicyOption = Annotated[
    str,
    typer.Option("--policy", metavar="POLICY", help="The same as the argument POLICY.", autocompletion=complete_policy),
]
"""A policy spec, as an option beside the argument. The default of the parameter is empty; `policy_of` reads both."""


def policy_of(argument: str, option: str) -> str:
    """The policy spec that was given as an argument or as an option.

    Raises:
        KVPolicyError: If both were given.
    """
    if option and argument != POLICY:
        raise KVPolicyError(f"The policy must be given once, got {argument} and --policy {option}; try one of them.")
    return option or argument


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
        help="Shipped model, folder, config.json, GGUF file, or model name on the Hub. Only the config is read.",
        autocompletion=complete_model,
    ),
]
"""A model, or only its config, as an argument. The default of the parameter is `TINY`."""

ModelName = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="tiny, a folder, a GGUF file, or a model name on the Hub.", autocompletion=complete_model
    ),
]
"""A model to load, as an argument."""

Model = Annotated[
    str,
    typer.Option(
        "--model",
        "--gguf",
        metavar="MODEL",
        help="tiny, a folder, a GGUF file (--gguf FILE is the same), or a model name on the Hub.",
        autocompletion=complete_model,
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

AnswersFile = Annotated[
    str, typer.Option("--text", metavar="FILE", help="JSONL with prompt and answer in each line, or plain text.")
]


def _seed_option(what: str) -> Any:
    """An option for a seed that PyTorch takes."""
    return typer.Option("--seed", min=-(2**63), max=2**64 - 1, metavar="INT", help=what)


Seed = Annotated[int, _seed_option("Random seed.")]
TextSeed = Annotated[int, _seed_option("Random seed of the choice of texts.")]

PromptTokens = Annotated[
    int, typer.Option("--prompt", min=0, metavar="TOKENS", help="For plain text: length of a prompt; 0 for 1024.")
]
AnswerTokens = Annotated[
    int, typer.Option("--answer", min=0, metavar="TOKENS", help="For plain text: length of the answer; 0 for 64.")
]
Windows = Annotated[
    int, typer.Option("--windows", min=1, metavar="INT", help="Maximum number of texts, drawn at random.")
]
"""How plain text is cut into prompts with answers. The defaults are 0, 0 and 64."""

Margin = Annotated[
    float,
    typer.Option(
        "--margin",
        metavar="FLOAT",
        help="Least difference that matters to a verdict: 0.01 is one right answer in a hundred, or 0.01 nats of KL.",
    ),
]
"""For `kvpolicy.tuning.verdict.decide`. The default of the parameter is `MARGIN`."""

Force = Annotated[
    bool, typer.Option("--force", help="Replace a file that kvpolicy did not write; never an input of the command.")
]
"""For `check_output`. The default of the parameter is False."""

Json = Annotated[bool, typer.Option("--json", help="Print only JSON.")]
"""Whether to print JSON with `formatting.as_json`. The default of the parameter is False."""

_TOKENS = re.compile(r"([0-9]{1,3}(?:[,_][0-9]{3})+|[0-9]{1,13})\s*([kKmM]?)")
_SUFFIXES = {"": 1, "k": 2**10, "m": 2**20}
MOST_TOKENS = 2**40
"""More tokens than this are a mistake."""


def parse_tokens(text: str, least: int = 0) -> int:
    """Read a number of tokens; a suffix k or m is that of context lengths, 1,024 or 1,048,576 tokens.

    Args:
        text: Such as `4096`, `4,096` or `128k`.
        least: The smallest number that is allowed.

    Raises:
        BadParameter: If it is no such number.

    >>> parse_tokens("4096"), parse_tokens("131,072"), parse_tokens("128k"), parse_tokens("1M")
    (4096, 131072, 131072, 1048576)
    """
    match = _TOKENS.fullmatch(text.strip())
    number = -1 if match is None else int(re.sub("[,_]", "", match[1])) * _SUFFIXES[match[2].lower()]
    if not least <= number <= MOST_TOKENS:
        raise typer.BadParameter(f"must be a number of tokens from {least}, such as 4096 or 128k, got {text!r}.")
    return number


def _tokens(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        return parse_tokens(str(text), least)  # Typer passes defaults through, too

    return parse


def least_option(otherwise: str) -> Any:
    """The option `--least` of a command for prompts of any length; its default is None.

    Args:
        otherwise: Where the default number is 0.
    """
    return typer.Option(
        "--least",
        parser=_tokens(0),
        metavar="TOKENS",
        help="Tokens that a budget such as 0.2 keeps of a short prompt at least; 0 for none. A policy may have its "
        f"own, as in @0.2:least=512. By default {LEAST_TOKENS:,}, or 0 {otherwise}.",
        show_default=False,
    )


Batch = Annotated[int, typer.Option("--batch", min=1, max=2**16, metavar="ROWS", help="Batch size.")]
Prompt = Annotated[
    int | None,
    typer.Option(
        "--prompt",
        parser=_tokens(1),
        metavar="TOKENS",
        help="Prompt length of each row, such as 4096 or 128k (k is 1,024). By default 4,096, or what the model was "
        "trained for without the new tokens if that is less.",
    ),
]
"""The default of the parameter is None, which `prompt_length` replaces."""

New = Annotated[
    int,
    typer.Option("--new", parser=_tokens(0), metavar="TOKENS", help="Number of tokens to generate, such as 256 or 1k."),
]

Chunk = Annotated[
    int | None,
    typer.Option(
        "--chunk",
        parser=_tokens(1),
        metavar="TOKENS",
        help="Tokens of a prompt that are prefilled at a time, as prefill_chunk_size of generate. By default all.",
    ),
]


TileTokens = Annotated[
    int | None,
    typer.Option(
        "--tile",
        parser=_tokens(1),
        metavar="TOKENS",
        help="Tokens of a prompt that a layer processes at a time, as tile of kvpolicy.attach. By default all.",
    ),
]
"""Of a plan, which knows no device."""

HoldCodes = Annotated[
    bool,
    typer.Option(
        "--hold-codes",
        help="Hold a prompt as codes until its replay or its last chunk, instead of in full precision.",
    ),
]

Tile = Annotated[
    str,
    typer.Option(
        "--tile",
        metavar="TOKENS",
        help="Tokens of a prompt that a layer processes at a time: a number, auto to choose by the free memory of the "
        "device, or none for all.",
    ),
]
"""The default of the parameter is `auto`; `tile_of` reads the value."""


Compile = Annotated[
    bool,
    typer.Option(
        "--compile",
        help="Compile decode steps on a CPU too, as compile=True of kvpolicy.attach. A GPU does by default.",
    ),
]
"""The default of the parameter is False, for which `compile_of` leaves it to transformers."""


def compile_of(compile: bool) -> bool | None:
    """Whether steps are compiled, as `compile` of `kvpolicy.attach`."""
    return True if compile else None


def hold_of(hold_codes: bool) -> Literal["plain", "codes"]:
    """How a prompt is held that waits, as `hold` of `kvpolicy.attach`."""
    return "codes" if hold_codes else "plain"


def tile_of(text: str) -> Any:
    """Read a tile size, as `kvpolicy.attach` takes it.

    Raises:
        KVPolicyError: If it is no number of tokens, `auto` or `none`.

    >>> tile_of("4k"), tile_of("auto"), tile_of("none")
    (4096, 'auto', None)
    """
    if text in ("auto", "none"):
        return None if text == "none" else text
    try:
        return parse_tokens(text, 1)
    except typer.BadParameter:
        raise KVPolicyError(f"--tile must be a number of tokens, auto or none, got {text!r}; try 4096.") from None


def prompt_length(given: int | None, new: int, trained: int | None) -> int:
    """The prompt length to plan for: the given one, or what fits with `new` tokens into the positions trained for.

    >>> prompt_length(None, 1024, 131072), prompt_length(None, 1024, 2048), prompt_length(9, 1024, 2048)
    (4096, 1024, 9)
    """
    if given is not None:
        return given
    room = DEFAULT_PROMPT if trained is None else trained - new
    return min(DEFAULT_PROMPT, room) if room > 0 else DEFAULT_PROMPT


def parse_names(text: str) -> tuple[str, ...]:
    """Parse a list of names separated by commas."""
    return tuple(part.strip() for part in text.split(","))


def parse_fractions(option: str, text: str) -> tuple[float, ...]:
    """Parse the value of an option, a list of fractions separated by commas.

    >>> parse_fractions("--shares", "0.05,1.0")
    (0.05, 1.0)
    """
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise KVPolicyError(f"{option} must be fractions, got {text!r}; try 0.05,0.1,0.2.") from None


def parse_integers(option: str, text: str) -> tuple[int, ...]:
    """Parse the value of an option, a list of integers separated by commas.

    >>> parse_integers("--value-chunks", "1,2,4")
    (1, 2, 4)
    """
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise KVPolicyError(f"{option} must be a list of integers, got {text!r}; try 1,2,4.") from None
