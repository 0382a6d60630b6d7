"""A function in a thread of its own that runs only while its caller waits for it, and pauses in between."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any


class BrokenOff(Exception):
    """Raised by `Interruptible.pause` in a function that is not to go on."""


class Interruptible:
    """Runs a function in parts, such as the forward of a long prompt, with steps of other rows in between.

    Two threads take turns, and never run at the same time. The function's thread ends with it, so that nothing of the
    thread outlives a function that was broken off.

    Args:
        settle: Waits until the device has done what was asked of it; called where the time of a part is measured.

    Examples:
        >>> parts = Interruptible()
        >>> def function():
        ...     parts.pause()
        ...     return "done"
        >>> parts.start(function)
        >>> parts.resume(0.0), parts.resume(0.0), parts.result()
        (False, True, 'done')
    """

    def __init__(self, settle: Callable[[], None] = lambda: None) -> None:
        """Nothing runs."""
        self._settle = settle
        self._resume = threading.Semaphore(0)
        self._paused = threading.Semaphore(0)
        self._thread: threading.Thread | None = None
        self._deadline: float | None = None
        self._is_over: Callable[[], bool] = bool
        self._runs = False
        self._result: Any = None
        self._error: BaseException | None = None

    def start(self, function: Callable[[], Any], is_over: Callable[[], bool] = bool) -> None:
        """Begin with a function, which runs from the first `resume` on.

        Args:
            function: The function.
            is_over: Whether it is to be broken off; asked in each pause.
        """
        self._is_over = is_over
        self._runs = True
        self._thread = threading.Thread(target=self._work, args=(function,), name="kvpolicy-prompt", daemon=True)
        self._thread.start()

    def resume(self, seconds: float | None = None) -> bool:
        """Let the function run until its first pause after `seconds`, or to its end; returns whether it ended."""
        self._deadline = None if seconds is None else time.monotonic() + seconds
        self._resume.release()
        self._paused.acquire()
        if self._runs:
            return False
        if self._thread is not None:
            self._thread.join()
        self._thread = None
        self._is_over = bool  # which holds whatever it asks
        return True

    def result(self) -> Any:
        """What the function returned, which is not kept.

        Raises:
            BaseException: What the function raised.
        """
        result, self._result = self._result, None
        error, self._error = self._error, None
        if error is None:
            return result
        try:
            raise error
        finally:
            del error  # or it would hold itself by this frame, and all that the function had

    def pause(self) -> None:
        """Called by the function where it may pause; elsewhere, it does nothing.

        Raises:
            BrokenOff: If the function is not to go on.
        """
        if threading.current_thread() is not self._thread:
            return
        if self._is_over():
            raise BrokenOff
        if self._deadline is None:
            return
        self._settle()
        if time.monotonic() >= self._deadline:
            self._paused.release()
            self._resume.acquire()
            if self._is_over():
                raise BrokenOff

    def _work(self, function: Callable[[], Any]) -> None:
        self._resume.acquire()
        try:
            self._result = function()
        except BaseException as error:  # the caller's to handle
            self._error = error
        self._runs = False
        self._paused.release()
