"""The loop of the server: waiting prompts are read one at a time, and each step adds a token to every row.

Rows are the answers in flight. A prompt is read when a row is free, in order of arrival; of a request with several
prompts, one is taken at a time. While rows are in flight, the reading of a prompt pauses for their steps.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from kvpolicy.serving.interruptible import BrokenOff, Interruptible

log = logging.getLogger("kvpolicy.serving")


class Answer(Protocol):
    """One answer, as the loop sees it."""

    text: list[int]
    """Token ids of the prompt, and of the answer so far."""

    @property
    def client(self) -> Any:
        """What the answers of one request have in common."""
        ...

    @property
    def is_cancelled(self) -> bool:
        """Whether nobody waits for the answer anymore."""
        ...

    def take(self, logits: Tensor, best: int) -> bool:
        """Add the next token to the text, by logits [V] of which `best` is the largest; returns whether it is the last.

        An error ends this answer alone.
        """
        ...

    def end(self, usage: Any, error: Exception | None) -> None:
        """End the answer: with what its cache held, or with an error; with neither if it was cancelled."""
        ...


class Forwards(Protocol):
    """The forwards of a model, with a cache for each row."""

    count: int
    """The number of rows."""

    def read(self, answer: Any) -> tuple[Any, Tensor]:
        """Run the text of an answer: a cache of one row, and logits [V] of the next token."""
        ...

    def copy(self, cache: Any) -> Any:
        """A copy of a cache that `read` has made."""
        ...

    def put(self, row: int, cache: Any) -> None:
        """Let a row go on from a cache of one row."""
        ...

    def drop(self, row: int) -> None:
        """Free a row."""
        ...

    def step(self, tokens: list[int]) -> Tensor:
        """Run a token of each row, any one where a row is free: logits [rows, V] of the next ones."""
        ...

    def usage(self, row: int) -> Any:
        """What the cache of a row holds."""
        ...

    def must_read_again(self, length: int) -> bool:
        """Whether a text must be read as a whole for its token number `length`, since the angles of its keys change."""
        ...

    def restart(self) -> None:
        """Begin with empty rows, after a step that was broken off."""
        ...


class _Read(NamedTuple):
    """A prompt that was read, for further answers of its request, whose sampling and length are the same."""

    client: Any
    text: list[int]
    cache: Any
    logits: Tensor


class Scheduler:
    """Answers in rows.

    Args:
        forwards: The model.
        reading: Runs the prompts.
        share: The part of the time that a prompt may take while rows are in flight; 1 to read it without a pause.

    Attributes:
        rows: The answer of each row; None where a row is free.
    """

    def __init__(self, forwards: Forwards, reading: Interruptible | None = None, share: float = 0.5) -> None:
        """Nothing waits."""
        self.rows: list[Answer | None] = [None] * forwards.count
        self._forwards = forwards
        self._reading = reading or Interruptible()
        self._share = share
        self._lock = threading.Lock()
        self._changed = threading.Event()
        self._waiting: OrderedDict[Any, deque[Answer]] = OrderedDict()
        self._reader: Answer | None = None
        self._read: _Read | None = None
        self._step_seconds = 0.0
        self._closed: Exception | None = None
        self._stopped: Exception | None = None
        self._has_ended = False
        self._thread = threading.Thread(target=self._run, name="kvpolicy-rows", daemon=True)

    # from any thread

    def start(self) -> None:
        """Work in a thread from now on."""
        self._thread.start()

    def submit(self, answers: Sequence[Answer]) -> None:
        """Let answers of one request wait for rows."""
        with self._lock:
            if not self._has_ended:
                for answer in answers:
                    self._waiting.setdefault(answer.client, deque()).append(answer)
                self.wake()
                return
        for answer in answers:  # prepared so late that nobody would end it
            answer.end(None, self._stopped)

    def wake(self) -> None:
        """Look for what has changed, such as an answer that was cancelled."""
        self._changed.set()

    def close(self, reason: Exception) -> None:
        """Refuse what waits, and what is submitted later; what is in flight goes on."""
        self._closed = reason
        self.wake()

    def stop(self, reason: Exception) -> None:
        """End everything, what is in flight too, and the thread."""
        self._closed = self._stopped = reason
        self.wake()

    def join(self) -> None:
        """Wait for the end of the thread."""
        if self._thread.ident is not None:
            self._thread.join()

    @property
    def waiting(self) -> int:
        """Answers that wait for a row."""
        with self._lock:
            return sum(map(len, self._waiting.values()))

    @property
    def running(self) -> int:
        """Answers that have a row, or whose prompt is being read."""
        return sum(row is not None for row in self.rows) + (self._reader is not None)

    # in the thread

    def _run(self) -> None:
        while self._stopped is None:
            self._changed.wait()
            self._changed.clear()
            while self.turn():
                pass
        while not self._end_thread():  # what was submitted meanwhile
            self.turn()

    def _end_thread(self) -> bool:
        """Take nothing more, unless something waits or runs."""
        with self._lock:
            self._has_ended = not (self.running or self._waiting)
            return self._has_ended

    def turn(self) -> bool:
        """Read a part of a prompt, and add a token to each row; returns whether there is more to do."""
        try:
            self._end_early()
            self._read_prompts()
            self._step()
            self._forget()
        except Exception as error:  # of the server itself: nothing is known of the rows
            log.error("The rows failed.", exc_info=error)
            self._end_all(error)
        return bool(self.running or self._waiting)

    def _end_early(self) -> None:
        """End what nobody waits for, and what is not to go on at the end of the server."""
        for row, answer in enumerate(self.rows):
            if answer is not None and self._is_over(answer):
                self._end(row, self._stopped)
        with self._lock:
            every = [each for queue in self._waiting.values() for each in queue]
            gone = [each for each in every if each.is_cancelled or self._closed is not None]
            for answer in gone:
                self._waiting[answer.client].remove(answer)
                if not self._waiting[answer.client]:
                    del self._waiting[answer.client]
        for answer in gone:
            answer.end(None, None if answer.is_cancelled else self._closed)

    def _is_over(self, answer: Answer) -> bool:
        return answer.is_cancelled or self._stopped is not None

    # prompts

    def _read_prompts(self) -> None:
        """Go on with a prompt, and begin with others, while a row is free and there is time for it."""
        while None in self.rows:
            if self._reader is None and not self._begin():
                return
            if self._read is None and not self._reading.resume(self._seconds()):
                return
            self._seat()

    def _begin(self) -> bool:
        """Begin with the next prompt; returns whether one has begun."""
        with self._lock:
            if not self._waiting:
                return False
            client, queue = next(iter(self._waiting.items()))
            answer = self._reader = queue.popleft()
            if not queue:
                del self._waiting[client]
            elif queue[0].text != answer.text:
                self._waiting.move_to_end(client)  # another prompt of this request waits for those of others
        if not self._is_for(self._read, answer):
            self._read = None
        if self._read is None:
            try:
                self._reading.start(lambda: self._forwards.read(answer), lambda: self._is_over(answer))
            except RuntimeError as error:  # the system has no further thread
                self._reader = None
                answer.end(None, error)
                return False
        return True

    def _seconds(self) -> float | None:
        """Seconds that a prompt may take before the next step; None if no row waits, or without a limit."""
        if self._share >= 1 or all(row is None for row in self.rows):
            return None
        return self._step_seconds * self._share / (1 - self._share)

    def _seat(self) -> None:
        """Give the answer whose prompt was read a row, and its next token."""
        answer = self._reader
        assert answer is not None
        row = self.rows.index(None)
        try:
            read = self._read or _Read(answer.client, [*answer.text], *self._reading.result())
            cache, logits = read.cache, read.logits
            self._read = None
            if self._is_for(read, self._next()):
                self._read = read
                cache = self._forwards.copy(cache)
            self.rows[row] = answer
            self._forwards.put(row, cache)
        except BrokenOff:
            answer.end(None, self._stopped)
        except Exception as error:
            if self.rows[row] is not None:
                self._end(row, error)
            else:
                answer.end(None, error)
        else:
            self._take([row], logits[None])
        finally:
            self._reader = None

    def _next(self) -> Answer | None:
        """The answer whose prompt is next."""
        with self._lock:
            queue = next(iter(self._waiting.values()), None)
            return queue[0] if queue else None

    @staticmethod
    def _is_for(read: _Read | None, answer: Answer | None) -> bool:
        """Whether a prompt that was read is that of an answer."""
        if read is None or answer is None:
            return False
        return read.client is answer.client and read.text == answer.text

    def _forget(self) -> None:
        """Free a prompt whose other answers were cancelled."""
        if self._reader is None and not self._is_for(self._read, self._next()):
            self._read = None

    # steps

    def _step(self) -> None:
        """Add a token to each row."""
        for row, answer in enumerate(self.rows):
            if answer is not None and self._forwards.must_read_again(len(answer.text)):
                self._read_again(row, answer)
        taken = [row for row, answer in enumerate(self.rows) if answer is not None]
        if not taken:
            return
        begun = time.monotonic()
        try:
            logits = self._forwards.step([0 if answer is None else answer.text[-1] for answer in self.rows])
        except Exception as error:  # of whichever row
            self._end_all(error)
            return
        self._take(taken, logits[taken])
        self._step_seconds = time.monotonic() - begun

    def _read_again(self, row: int, answer: Answer) -> None:
        """Let a row wait until its whole text was read."""
        self._forwards.drop(row)
        self.rows[row] = None
        with self._lock:
            self._waiting.setdefault(answer.client, deque()).appendleft(answer)
            self._waiting.move_to_end(answer.client, last=False)

    def _take(self, rows: list[int], logits: Tensor) -> None:
        """Add the next token to rows by their logits [R, V], and end those of which it is the last."""
        # One transfer from the device for all rows.
        best, is_broken = torch.stack([logits.argmax(-1), logits.isnan().any(-1)]).tolist()
        for index, row in enumerate(rows):
            answer = self.rows[row]
            assert answer is not None
            try:
                if is_broken[index]:
                    raise ArithmeticError("The model's logits are not numbers.")
                is_last = answer.take(logits[index], best[index])
            except Exception as error:
                self._end(row, error)
            else:
                if is_last:
                    self._end(row)

    def _end(self, row: int, error: Exception | None = None) -> None:
        """End the answer of a row, and free the row."""
        answer = self.rows[row]
        assert answer is not None
        usage = None
        try:
            if error is None and not self._is_over(answer):
                usage = self._forwards.usage(row)
        except Exception as found:
            error = found
        self._forwards.drop(row)
        self.rows[row] = None
        answer.end(usage, error)

    def _end_all(self, error: Exception) -> None:
        """End the answers of all rows, whose cache a forward may have left in the middle of a step."""
        ended = [answer for answer in self.rows if answer is not None]
        self.rows = [None] * len(self.rows)
        try:
            self._forwards.restart()
        except Exception as found:  # such as a rank that is gone: nothing can be answered anymore
            log.error("The rows cannot be used anymore.", exc_info=found)
            self._closed = self._stopped = found
        for answer in ended:
            answer.end(None, error)
