"""The entry point of the `kvpolicy` command: its subcommands, error messages and exit codes."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import cache as cached
from typing import Annotated, Any

import typer
from typer.main import get_command

from kvpolicy.cli.commands import cache, calibrate
from kvpolicy.cli.commands.bench import bench
from kvpolicy.cli.commands.compare import compare
from kvpolicy.cli.commands.explain import explain
from kvpolicy.cli.commands.generate import generate
from kvpolicy.cli.commands.inspect import inspect
from kvpolicy.cli.commands.list import list_
from kvpolicy.cli.commands.plan import plan
from kvpolicy.cli.commands.serve import serve
from kvpolicy.cli.commands.tiny import tiny
from kvpolicy.cli.commands.tune import tune
from kvpolicy.cli.formatting import CONTEXT, Group
from kvpolicy.text.errors import KVPolicyWarning, is_out_of_memory

EXTRAS = {
    **dict.fromkeys(("accelerate", "huggingface_hub", "safetensors", "tokenizers", "transformers"), "hf"),
    **dict.fromkeys(("sklearn", "tqdm"), "calib"),
    **dict.fromkeys(("fastapi", "openai", "starlette", "uvicorn"), "serve"),
    **{"deepspeed": "deepspeed", "gguf": "gguf", "llguidance": "grammar", "lm_eval": "lm-eval", "matplotlib": "plots"},
}
"""The extra of the package that installs each optional module."""


def sentence(error: Exception) -> str:
    """Return the message to print for an error, on one line; an empty string for an internal error.

    The class of the error decides. A `KVPolicyError` is a `ValueError`; so are the errors by which transformers and
    PyTorch reject an argument. An `OSError` is about a file, an `ImportError` of an optional module about an extra. A
    `RuntimeError` is reported only if memory ran out, since PyTorch has no class of its own for it on the CPU.

    >>> sentence(ValueError("two  words"))
    'two words'
    >>> sentence(ModuleNotFoundError("No module named 'sklearn'", name="sklearn"))
    "No module named 'sklearn': pip install 'kvpolicy[calib]'."
    >>> sentence(TypeError("an internal error"))
    ''
    """
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, ValueError):
        return text
    if isinstance(error, OSError):
        return _file_message(error) or text
    if isinstance(error, ImportError):
        extra = EXTRAS.get((error.name or "").partition(".")[0])
        if extra is None:
            return ""
        return text if "pip install" in text else f"{text}: pip install 'kvpolicy[{extra}]'."
    if is_out_of_memory(error):
        return f"There is not enough memory: use fewer rows or tokens ({text[:200]})."
    return ""


def _file_message(error: OSError) -> str:
    """Return the message of an error of the operating system without its number; empty for other `OSError`s."""
    if not error.strerror:
        return ""
    place = f"{error.filename}: " if error.filename else ""
    return f"{place}{error.strerror}."


COMMANDS: dict[str, Callable[..., None]] = {
    "list": list_,
    "explain": explain,
    "plan": plan,
    "generate": generate,
    "inspect": inspect,
    "compare": compare,
    "tune": tune,
    "bench": bench,
    "serve": serve,
    "tiny": tiny,
}
"""The subcommands without groups, in the order of the help. Their modules import PyTorch only when a command runs."""

USAGE: type[Exception] = typer.BadParameter.__mro__[2]
"""The class of errors of the command line in every version of Typer, which has no public name for it."""

app = typer.Typer(cls=Group, context_settings=CONTEXT, rich_markup_mode=None)
for _name, _command in COMMANDS.items():
    app.command(_name)(_command)
app.add_typer(cache.app, name="cache")
app.add_typer(calibrate.app, name="calibrate")


def _print_version(requested: bool) -> None:
    if requested:
        from kvpolicy import __version__

        print(f"kvpolicy {__version__}")
        raise typer.Exit


@app.callback(
    epilog="All commands except calibrate, compare and tune use the embedded model by default. Set "
    "KVPOLICY_TRACEBACK=1 to print the traceback of an error."
)
def _top(  # pyright: ignore[reportUnusedFunction]
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Compress the KV cache of Hugging Face language models."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: The arguments; those of the process by default.

    Returns:
        The exit code: 0 for success; 1 if a check failed or the reader of the output closed it; 2 for an error that
        the user can fix, which is printed in one sentence; 130 after Ctrl-C.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    null = next((word for word in arguments if "\0" in word), None)
    if null is not None:  # of a caller in Python: no shell passes one
        return _print_error(f"An argument must be without null bytes, got {null!r}; try another one.")
    # PyTorch warns about missing NumPy, which only the optional extras install.
    warnings.filterwarnings("ignore", "Failed to initialize NumPy")
    _replace_unencodable()
    try:
        with _warnings_on_one_line():
            code = _run(arguments or ["--help"])
        if sys.stdout is not None:  # it is None if the shell closed it
            sys.stdout.flush()
    except BrokenPipeError:
        _redirect_to_devnull()
        return 1
    except KeyboardInterrupt:
        return 130
    except USAGE as error:
        return _print_error(_usage_message(error, arguments))
    except Exception as error:
        message = sentence(error)
        if not message or os.environ.get("KVPOLICY_TRACEBACK"):
            raise
        _flush_or_discard()
        return _print_error(message)
    # Without arguments the help is printed and the code is 2, unless a shell asks for completions.
    return code if arguments or os.environ.get("_KVPOLICY_COMPLETE") else 2


@contextmanager
def _warnings_on_one_line() -> Generator[None, None, None]:
    """Print warnings of kvpolicy as its errors, without the line of code that raised them."""
    usual = warnings.formatwarning

    def one_line(message: Any, category: type[Warning], *place: Any, **line: Any) -> str:
        return (
            f"kvpolicy: {message}\n"
            if issubclass(category, KVPolicyWarning)
            else usual(message, category, *place, **line)
        )

    warnings.formatwarning = one_line
    try:
        yield
    finally:
        warnings.formatwarning = usual


def _replace_unencodable() -> None:
    """Print a question mark for a character that standard output cannot encode, as of a text or of a file's name."""
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="replace")


@cached
def _click_command() -> Any:
    """The command of Click, which is built from the signatures of all commands."""
    return get_command(app)


def _run(arguments: list[str]) -> int:
    try:
        result: Any = _click_command().main(args=arguments, prog_name="kvpolicy", standalone_mode=False)
    except SystemExit as ended:  # raised for shell completion, and by Click for a broken pipe
        if isinstance(ended.__context__, BrokenPipeError):
            raise ended.__context__ from None
        result = ended.code
    return result if isinstance(result, int) else 0


def _usage_message(error: Any, arguments: Sequence[str]) -> str:
    """Return Click's message with a reference to the help of the subcommand."""
    message = " ".join(error.format_message().split()).rstrip(".")
    message += "" if message.endswith("?") else "."
    context = getattr(error, "ctx", None)
    path = _path_of(arguments) if context is None else context.command_path
    return f"{message} Try {path} --help."


def _path_of(arguments: Sequence[str]) -> str:
    """The command that arguments begin with: an error of Click's parser does not know it."""
    path = ["kvpolicy"]
    command = _click_command()
    for word in arguments:
        command = getattr(command, "commands", {}).get(word)
        if command is None:
            break
        path.append(word)
    return " ".join(path)


def _print_error(message: str) -> int:
    print(f"kvpolicy: {message}", file=sys.stderr)
    return 2


def _flush_or_discard() -> None:
    """Write what standard output still buffers; discard it where this fails, such as on a full disk."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        _redirect_to_devnull()


def _redirect_to_devnull() -> None:
    """Redirect standard output, so that Python's flush at exit does not raise the same error again."""
    sys.stdout = sys.__stdout__
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
