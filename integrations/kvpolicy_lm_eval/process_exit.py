"""Exit of a rank: immediately, with its own exit code, and without waiting for other ranks.

Threads of a process group can outlive the interpreter, which then aborts at the end of about one run in forty, and the
destruction of a process group can wait for ranks that have already exited. Under lm_eval we do not control shutdown, so
an atexit hook ends the process. Other scripts use `kvpolicy_deepspeed.ranks` instead.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
from typing import Any, NoReturn

_codes: list[Any] = []
"""The arguments of the calls of `sys.exit`."""

_registered: list[str] = []


def end_process_at_exit() -> None:
    """Register a hook that ends this process before threads and process groups are destroyed."""
    if _registered:
        return
    _registered.append("atexit")
    atexit.register(_end_process)
    if _is_command_line():
        original = sys.exit

        def recording_exit(code: Any = None) -> NoReturn:
            _codes.append(code)  # atexit hooks cannot see the exit code
            original(code)

        sys.exit = recording_exit


def exit_code() -> int | None:
    """Return the exit code that Python is about to use, or None if it is unknown."""
    error = getattr(sys, "last_value", None)  # set before the traceback of an uncaught exception is printed
    if error is not None:
        return 130 if isinstance(error, KeyboardInterrupt) else 1
    if not _is_command_line():
        return None  # a script may have raised SystemExit itself, which leaves no trace
    code = _codes[-1] if _codes else None
    return code if isinstance(code, int) else int(code is not None)


def _is_command_line() -> bool:
    """Return whether lm-eval's command line runs. It ends by returning or by `sys.exit`."""
    return "lm_eval._cli" in sys.modules


def _end_process() -> None:
    code = exit_code()
    if code is None:
        return
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)
