"""How a rank ends: at once, with its own exit code, and without waiting for the others.

Threads of a process group may outlive the interpreter, which then aborts when all is done, about once in forty runs;
and what takes a group down may wait for ranks that are gone. Who is started by `lm_eval` does not own the end of its
process, so that it is brought about when Python exits. A script of one's own has `kvpolicy_deepspeed.ranks` for it.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
from typing import Any, NoReturn

_codes: list[Any] = []
_hooked: list[str] = []


def leave_at_exit() -> None:
    """End this process when Python exits, before threads and process groups are taken down."""
    if _hooked:
        return
    _hooked.append("atexit")
    atexit.register(_leave)
    if _command_line():
        plain = sys.exit

        def noted(code: Any = None) -> NoReturn:
            _codes.append(code)  # Python does not tell exit functions what it is about to exit with
            plain(code)

        sys.exit = noted


def exit_code() -> int | None:
    """What Python is about to exit with; None where that cannot be known."""
    error = getattr(sys, "last_value", None)  # set before an exception is printed that nobody caught
    if error is not None:
        return 130 if isinstance(error, KeyboardInterrupt) else 1
    if not _command_line():
        return None  # a script may `raise SystemExit(3)`, which leaves no trace
    code = _codes[-1] if _codes else None
    return code if isinstance(code, int) else int(code is not None)


def _command_line() -> bool:
    """Whether lm-eval's command line runs, which ends by itself or by `sys.exit`."""
    return "lm_eval._cli" in sys.modules


def _leave() -> None:
    code = exit_code()
    if code is None:
        return
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)
