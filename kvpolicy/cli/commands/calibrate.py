"""`kvpolicy calibrate`: compute what a codec, a reader, a selector or a head allocator takes, from a model and text."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from dataclasses import Field, fields
from typing import Annotated, Any

import typer

from kvpolicy.calibration.calibrator import Calibrator
from kvpolicy.calibration.calibrators import CALIBRATORS, HeadCalibrator
from kvpolicy.cli.arguments import Device, Dtype, Model, Seed, parse_integers, parse_names
from kvpolicy.cli.formatting import Group, duration, telling_of_unfinished_work
from kvpolicy.cli.model_loading import check_length, load
from kvpolicy.cli.strategy_docs import attributes
from kvpolicy.text.embedded_names import EMBEDDED
from kvpolicy.text.errors import KVPolicyError

app = typer.Typer(cls=Group, help="Calibrate a codec, a reader, a selector or a head allocator.", rich_markup_mode=None)

Text = Annotated[list[str], typer.Option("--text", metavar="FILE", help="UTF-8 text file, or folder with .txt files.")]
ReachText = Annotated[
    list[str] | None,
    typer.Option("--text", metavar="FILE", help="With reach, UTF-8 text file, or folder with .txt files."),
]
More = Annotated[list[str] | None, typer.Argument(metavar="FILE", help="More text files or folders.")]
Length = Annotated[int, typer.Option("--length", min=1, metavar="TOKENS", help="Length of a window of text.")]
Windows = Annotated[
    int, typer.Option("--windows", min=1, metavar="INT", help="Maximum number of windows, drawn from the whole text.")
]
Force = Annotated[
    bool, typer.Option("--force", help="Replace a finished calibration for another model, text or options.")
]
Quiet = Annotated[bool, typer.Option("--quiet", help="Disable progress bars.")]

_TYPES: dict[str, tuple[Any, str]] = {
    "int": (int, "INT"),
    "int | None": (int | None, "INT"),
    "float": (float, "FLOAT"),
    "bool": (bool, ""),
    "tuple[int, ...]": (str, "INTS"),
    "tuple[str, ...]": (str, "NAMES"),
}
"""Of each type of a field, the type of its option, and how the help calls a value."""


def _command(kind: type[Calibrator]) -> Callable[..., None]:
    """The command of a calibrator, with an option for each of its fields."""
    place, metavar = ("File", "FILE") if ":" in kind.file else ("Folder", "DIR")
    out = typer.Option("--out", metavar=metavar, help=f"{place} to write the {kind.writes} to.")
    # Each field is an option, except the seed, which has the same place in the help of every command.
    own = {each.name: each for each in fields(kind) if not each.metadata.get("hidden")}  # pyright: ignore[reportArgumentType]
    own.pop("seed", None)
    told = attributes(kind)
    options = {name: _parameter(name, *_option(each, told[name])) for name, each in own.items()}
    tokens = [options.pop("tokens")] if "tokens" in options else []
    where = [_parameter("text", Text), _parameter("out", Annotated[str, out])]
    if kind is HeadCalibrator:  # its text is optional, and comes behind
        where = [where[1], _parameter("text", ReachText, None)]
    parameters = [
        _parameter("model", Model),
        *where,
        _parameter("more", More, None),
        _parameter("length", Length, kind.length),
        _parameter("windows", Windows, kind.windows),
        *tokens,
        _parameter("seed", Seed, 0),
        _parameter("device", Device, ""),
        _parameter("dtype", Dtype, "auto"),
        _parameter("quiet", Quiet, False),
        _parameter("force", Force, False),
        *options.values(),
    ]

    def run(**given: Any) -> None:
        parsed = {name: _parsed(each, given[name]) for name, each in own.items()}
        if "seed" in told:
            parsed["seed"] = given["seed"]
        _run(kind(**parsed), given)

    run.__doc__ = inspect.cleandoc(kind.__doc__ or "").partition("\n\nAttributes:")[0]
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    vars(run)["__signature__"] = inspect.Signature(parameters)
    return run


def _parameter(name: str, annotation: Any, default: Any = inspect.Parameter.empty) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)


def _option(each: Field[Any], told: str) -> tuple[Any, Any]:
    """The type and the default of the option of a field."""
    word = each.name.replace("_", "-")
    kind, value = _TYPES.get(str(each.type), (str, word.rpartition("-")[2].upper()))
    more: dict[str, Any] = {"min": each.metadata.get("least")} if kind in (int, int | None) else {}
    names = (f"--{word}", *each.metadata.get("names", ()))
    default = ",".join(map(str, each.default)) if isinstance(each.default, tuple) else each.default
    return Annotated[kind, typer.Option(*names, metavar=value or None, help=told, **more)], default


def _parsed(each: Field[Any], value: Any) -> Any:
    """The value of a field from that of its option."""
    if each.type == "tuple[str, ...]":
        return parse_names(value)
    if each.type == "tuple[int, ...]":
        return parse_integers(f"--{each.name.replace('_', '-')}", value) if value or each.default else ()
    return value


def _run(calibrator: Calibrator, given: dict[str, Any]) -> None:
    """Calibrate a part, and print what was found."""
    from kvpolicy.calibration import read_texts, token_windows
    from kvpolicy.calibration.driver import calibrate, kind_of
    from kvpolicy.text.grammar import quoted

    out = os.path.expanduser(given["out"])
    model: str = given["model"]
    paths = [*(given["text"] or ()), *(given["more"] or ())]
    if isinstance(calibrator, HeadCalibrator):
        calibrator.check_text(paths)
        for name in ("length", "windows") if calibrator.probe == "razor" else ():
            if given[name] != getattr(type(calibrator), name):
                raise KVPolicyError(
                    f"--{name} must not be given with --probe razor, which reads no text, got {given[name]}; remove it."
                )
    # What would be lost is refused before the model is loaded, and the texts are read.
    kind_of(calibrator).check_output(out, [model, *paths], force=given["force"])
    texts = read_texts(paths) if paths else []
    loaded, tokenizer = load(model, given["dtype"], given["device"])
    windows = token_windows(tokenizer, texts, given["length"], given["windows"], given["seed"])
    if windows:
        check_length(loaded, max(map(len, windows)), 0, "try a smaller --length")
    with telling_of_unfinished_work(os.path.join(out, "unfinished")):  # of CSR; others are faster
        content = calibrate(
            calibrator,
            loaded,
            windows,
            out,
            # Any other model has a name itself.
            name=model if model in EMBEDDED else None,
            progress=not given["quiet"],
            announce=lambda seconds: print(f"This takes up to {duration(seconds)}.", flush=True),
            force=given["force"],
        )
    for line in calibrator.report(content):
        print(line)
    print(f"Wrote {out}. Use it with {calibrator.spec(quoted(out))}")


for _name, _kind in CALIBRATORS.items():
    app.command(_name)(_command(_kind))
