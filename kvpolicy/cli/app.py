"""The command `kvpolicy`: look at policies, plan memory, try them, and calibrate codecs."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer
from typer.main import get_command

from kvpolicy.cli import calibrate
from kvpolicy.cli.bench import bench
from kvpolicy.cli.errors import sentence
from kvpolicy.cli.explain import explain
from kvpolicy.cli.generate import generate
from kvpolicy.cli.inspect import inspect
from kvpolicy.cli.list import list_
from kvpolicy.cli.plan import plan
from kvpolicy.cli.tiny import tiny

COMMANDS: dict[str, Callable[..., None]] = {
    "list": list_,
    "explain": explain,
    "plan": plan,
    "generate": generate,
    "inspect": inspect,
    "bench": bench,
    "tiny": tiny,
}
"""Every command and its function, in the order of the help; no module imports anything heavy before it runs."""

USAGE: type[Exception] = typer.BadParameter.__mro__[2]
"""What a wrong command line raises, in every version of Typer: it has no public name."""

app = typer.Typer(context_settings={"help_option_names": ["-h", "--help"]}, rich_markup_mode=None)
for _name, _run in COMMANDS.items():
    app.command(_name)(_run)
app.add_typer(calibrate.app, name="calibrate")


def _show_version(wanted: bool) -> None:
    if wanted:
        from kvpolicy import __version__

        print(f"kvpolicy {__version__}")
        raise typer.Exit


@app.callback(
    epilog="Where no model is named, a command takes the embedded one. KVPOLICY_TRACEBACK=1 shows tracebacks."
)
def _top(  # pyright: ignore[reportUnusedFunction]
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Keep the KV cache of language models small."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: Its words; by default those of the process.

    Returns:
        The exit code: 0; 1 where a check has failed or nobody reads what is printed; 2 where something was given that
        the user can put right, which is told in one sentence; 130 after Ctrl-C.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    warnings.filterwarnings("ignore", "Failed to initialize NumPy")  # PyTorch's, where only extras bring NumPy
    try:
        code = _run_words(words or ["--help"])
        if sys.stdout is not None:  # a shell may have closed it
            sys.stdout.flush()
    except BrokenPipeError:
        _close_quietly()
        return 1
    except KeyboardInterrupt:
        return 130
    except USAGE as error:
        return _tell(_usage(error))
    except Exception as error:
        told = sentence(error)
        if not told or os.environ.get("KVPOLICY_TRACEBACK"):
            raise
        return _tell(told)
    return code if words or os.environ.get("_KVPOLICY_COMPLETE") else 2


def _run_words(words: list[str]) -> int:
    try:
        result: Any = get_command(app).main(args=words, prog_name="kvpolicy", standalone_mode=False)
    except SystemExit as ended:  # of a shell that asks for completions, or of a pipe that broke
        if isinstance(ended.__context__, BrokenPipeError):
            raise ended.__context__ from None
        result = ended.code
    return result if isinstance(result, int) else 0


def _usage(error: Any) -> str:
    """Click's message, and where the help is."""
    message = " ".join(error.format_message().split()).rstrip(".")
    message += "" if message.endswith("?") else "."
    path = error.ctx.command_path if getattr(error, "ctx", None) is not None else "kvpolicy"
    return f"{message} Try {path} --help."


def _tell(message: str) -> int:
    print(f"kvpolicy: {message}", file=sys.stderr)
    return 2


def _close_quietly() -> None:
    """Let nothing be flushed into the broken pipe when Python ends."""
    sys.stdout = sys.__stdout__
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
