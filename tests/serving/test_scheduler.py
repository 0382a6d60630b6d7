"""The loop of the server, with a model that counts: rows, order, cancellation, errors, and the end."""

from __future__ import annotations

import gc
import random
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kvpolicy.serving.interruptible import Interruptible
from kvpolicy.serving.scheduler import Scheduler
from tests.serving.servers import wait_for

VOCABULARY = 50


def logits_of(token: int) -> Tensor:
    """The model counts: after a token comes the next one."""
    return torch.nn.functional.one_hot(torch.tensor((token + 1) % VOCABULARY), VOCABULARY).float()


class Counting:
    """A model whose caches are lists of tokens, with the methods of `Forwards`."""

    def __init__(self, count: int, pause: Callable[[], None] = lambda: None) -> None:
        self.count = count
        self.caches: list[list[int] | None] = [None] * count
        self.events: list[str] = []
        self.reads: list[list[int]] = []
        self.again = 0
        self.broken_step: Exception | None = None
        self.nan_after = -1
        self._pause = pause

    def read(self, answer: Any) -> tuple[list[int], Tensor]:
        self.reads.append([*answer.text])
        for _ in range(3):
            self.events.append("tile")
            self._pause()
        if answer.text[0] == 13:
            raise ValueError("unlucky")
        return [*answer.text], logits_of(answer.text[-1])

    def copy(self, cache: list[int]) -> list[int]:
        return [*cache]

    def put(self, row: int, cache: list[int]) -> None:
        assert self.caches[row] is None
        self.caches[row] = cache

    def drop(self, row: int) -> None:
        self.caches[row] = None

    def step(self, tokens: list[int]) -> Tensor:
        self.events.append("step")
        if self.broken_step is not None:
            raise self.broken_step
        for cache, token in zip(self.caches, tokens, strict=True):
            if cache is not None:
                cache.append(token)
        out = torch.stack([logits_of(token) for token in tokens])
        out[[token == self.nan_after for token in tokens]] = torch.nan
        return out

    def usage(self, row: int) -> list[int]:
        found = self.caches[row]
        assert found is not None
        return [*found]

    def must_read_again(self, length: int) -> bool:
        return length == self.again

    def restart(self) -> None:
        self.caches = [None] * self.count


class Asked:
    """An answer of `new` tokens."""

    def __init__(self, text: list[int], new: int, client: Any = None) -> None:
        self.text = [*text]
        self.client = client or self
        self.is_cancelled = False
        self.usage: Any = None
        self.error: Exception | None = None
        self.ended = 0
        self.breaks_after = -1
        self.cancels_after = -1
        self._last = len(text) + new

    def take(self, logits: Tensor, best: int) -> bool:
        assert int(logits.argmax()) == best
        self.text.append(best)
        if best == self.breaks_after:
            raise ValueError("a row of its own")
        self.is_cancelled = best == self.cancels_after
        return len(self.text) == self._last

    def end(self, usage: Any, error: Exception | None) -> None:
        self.usage, self.error = usage, error
        self.ended += 1


def submitted(scheduler: Scheduler, asked: list[Asked]) -> Scheduler:
    """The scheduler, with answers of a request each."""
    for answer in asked:
        scheduler.submit([answer])
    return scheduler


def run(scheduler: Scheduler) -> int:
    """Turns until nothing is left."""
    turns = 1
    while scheduler.turn():
        turns += 1
        assert turns < 1000
    return turns


def test_the_last_answer_is_forgotten() -> None:
    """Although no other one comes."""
    scheduler = Scheduler(Counting(2))
    for text in ([20], [13]):  # whole, and with an error
        asked = Asked(text, 3)
        scheduler.submit([asked])
        run(scheduler)
        gone = weakref.ref(asked)
        assert asked.ended == 1
        del asked
        gc.collect()
        assert gone() is None


def test_a_prompt_that_cannot_be_started_ends_alone() -> None:
    """As where the system allows no further thread."""

    class NoThread(Interruptible):
        refuses = True

        def start(self, *args: Any, **kwargs: Any) -> None:
            if self.refuses:
                self.refuses = False
                raise RuntimeError("can't start new thread")
            super().start(*args, **kwargs)

    asked = [Asked([20], 3), Asked([30], 3)]
    scheduler = submitted(Scheduler(Counting(2), NoThread()), asked)
    run(scheduler)
    assert str(asked[0].error) == "can't start new thread" and asked[0].ended == 1
    assert asked[1].text == counted([30], 3) and asked[1].error is None
    assert (scheduler.waiting, scheduler.running) == (0, 0)


def counted(text: list[int], new: int) -> list[int]:
    return [*text, *((text[-1] + 1 + i) % VOCABULARY for i in range(new))]


@pytest.mark.parametrize("rows", [1, 2, 8])
def test_every_answer_is_the_one_it_has_alone(rows: int) -> None:
    draw = random.Random(rows)
    asked = [
        Asked([draw.randrange(14, VOCABULARY) for _ in range(draw.randrange(1, 9))], draw.randrange(1, 12))
        for _ in range(30)
    ]
    wanted = [counted(answer.text, answer._last - len(answer.text)) for answer in asked]  # pyright: ignore[reportPrivateUsage]
    model = Counting(rows)
    scheduler = Scheduler(model)
    for answer in asked:
        scheduler.submit([answer])
        if draw.random() < 0.5:
            scheduler.turn()
    run(scheduler)
    assert [answer.text for answer in asked] == wanted
    assert [answer.usage for answer in asked] == [text[:-1] for text in wanted]  # the last one is no input
    assert all(answer.ended == 1 and answer.error is None for answer in asked)
    assert model.caches == [None] * rows and (scheduler.waiting, scheduler.running) == (0, 0)


def test_rows_are_taken_as_they_become_free() -> None:
    """Answers of 9, 2 and 9 tokens in two rows."""
    model = Counting(2)
    asked = [Asked([20], new) for new in (9, 2, 9)]
    scheduler = submitted(Scheduler(model), asked)
    assert scheduler.waiting == 3
    scheduler.turn()  # two prompts, each with a token, and a step
    assert (scheduler.waiting, scheduler.running, asked[1].ended) == (1, 1, 1)
    scheduler.turn()
    assert (scheduler.waiting, scheduler.running) == (0, 2)
    assert 2 + run(scheduler) == 9  # one answer after the other would take 17 steps


def test_requests_take_turns() -> None:
    """A request with many prompts does not keep the next one waiting, and its prompts keep their order."""
    scheduler = Scheduler(Counting(1))
    order: list[int] = []

    class Noted(Asked):
        def end(self, usage: Any, error: Exception | None) -> None:
            order.append(self.text[0])

    scheduler.submit([Noted([20 + i], 1, "many") for i in range(4)])
    scheduler.submit([Noted([30], 1, "one")])
    scheduler.submit([Noted([40], 1, "other")])
    run(scheduler)
    assert order == [20, 30, 40, 21, 22, 23]


def test_choices_of_a_prompt_share_its_reading() -> None:
    """But not requests with the same prompt: their sampling and their length, for which it prepares, may differ."""
    model = Counting(2)
    scheduler = Scheduler(model)
    asked = [Asked([20, 21], new, client) for new, client in ((3, "n"), (4, "n"), (5, "n"), (3, "other"))]
    scheduler.submit(asked[:3])
    scheduler.submit(asked[3:])
    run(scheduler)
    assert model.reads == [[20, 21], [20, 21]]
    assert [each.text for each in asked] == [counted([20, 21], new) for new in (3, 4, 5, 3)]
    assert [each.usage for each in asked] == [each.text[:-1] for each in asked]  # each has a cache of its own


def test_a_prompt_that_was_read_for_cancelled_choices_is_forgotten() -> None:
    model = Counting(1)
    scheduler = Scheduler(model)
    choices = [Asked([20, 21], 3, "n") for _ in range(2)]
    scheduler.submit(choices)
    scheduler.turn()
    assert scheduler._read is not None  # pyright: ignore[reportPrivateUsage]
    choices[1].is_cancelled = True
    scheduler.turn()
    assert scheduler._read is None  # pyright: ignore[reportPrivateUsage]
    run(scheduler)
    assert (choices[0].ended, choices[1].ended, choices[1].usage) == (1, 1, None)


def test_cancelled_answers_leave() -> None:
    """In a row, while waiting, and at the moment of their last token."""
    model = Counting(2)
    asked = [Asked([20 + i], 6) for i in range(4)]
    asked[0].cancels_after = 22
    asked[1].cancels_after = 27
    scheduler = submitted(Scheduler(model), asked)
    asked[2].is_cancelled = True
    run(scheduler)
    assert [answer.ended for answer in asked] == [1, 1, 1, 1]
    assert [answer.usage is None and answer.error is None for answer in asked] == [True, True, True, False]
    assert asked[0].text == [20, 21, 22] and asked[2].text == [22]


@pytest.mark.parametrize("where", ["prompt", "row", "logits"])
def test_an_error_in_one_row_ends_that_row_alone(where: str) -> None:
    model = Counting(3)
    asked = [Asked([30], 8), Asked([13 if where == "prompt" else 20], 8), Asked([40], 8)]
    asked[1].breaks_after = 24 if where == "row" else -1
    model.nan_after = 24 if where == "logits" else -1
    run(submitted(Scheduler(model), asked))
    assert type(asked[1].error) is (ArithmeticError if where == "logits" else ValueError)
    for answer in (asked[0], asked[2]):
        assert answer.error is None and answer.text == counted([answer.text[0]], 8)
    assert model.caches == [None] * 3


def test_a_step_that_fails_ends_the_rows_in_flight_and_no_others() -> None:
    model = Counting(2)
    asked = [Asked([20 + i], 4) for i in range(3)]
    scheduler = submitted(Scheduler(model), asked)
    scheduler.turn()
    model.broken_step = RuntimeError("out of order")
    scheduler.turn()
    model.broken_step = None
    assert [answer.error is model.broken_step for answer in asked] == [False, False, True]
    run(scheduler)
    assert asked[2].text == counted([22], 4) and asked[2].error is None


def test_a_text_is_read_again_where_angles_change() -> None:
    """The row waits for it before others do, and goes on with the next token."""
    model = Counting(1)
    model.again = 5
    asked = [Asked([20, 21], 6), Asked([30, 31], 1)]
    scheduler = submitted(Scheduler(model), asked)
    run(scheduler)
    assert asked[0].text == counted([20, 21], 6)
    assert model.reads == [[20, 21], [20, 21, 22, 23, 24], [30, 31]]


def test_the_end_of_the_server() -> None:
    """What has a row goes on after `close`, and ends with `stop`."""
    scheduler = Scheduler(Counting(1))
    asked = [Asked([20 + i], 9) for i in range(3)]
    scheduler.submit(asked[:1])
    scheduler.submit(asked[1:2])
    scheduler.turn()
    reason = RuntimeError("over")
    scheduler.close(reason)
    scheduler.submit(asked[2:])
    scheduler.turn()
    assert [answer.error for answer in asked] == [None, reason, reason] and asked[0].ended == 0
    scheduler.stop(reason)
    scheduler.turn()
    assert asked[0].error is reason and (scheduler.waiting, scheduler.running) == (0, 0)


def test_a_thread_answers_what_is_submitted() -> None:
    """What comes after its end, as a prompt that was prepared so late, ends at once."""
    scheduler = Scheduler(Counting(2))
    scheduler.start()
    asked = [Asked([20 + i], 5) for i in range(9)]
    submitted(scheduler, asked)
    wait_for(lambda: all(answer.ended for answer in asked))
    reason = RuntimeError("over")
    scheduler.stop(reason)
    scheduler.join()
    assert [answer.text for answer in asked] == [counted([20 + i], 5) for i in range(9)]
    late = Asked([20], 3)
    scheduler.submit([late])
    assert (late.ended, late.error, scheduler.waiting) == (1, reason, 0)


def test_a_prompt_pauses_for_steps() -> None:
    """With a share that leaves no time for more, a step follows each tile; with all of it, none."""
    for share, pauses in ((1e-9, True), (1.0, False)):
        reading = Interruptible()
        model = Counting(2, reading.pause)
        scheduler = Scheduler(model, reading, share)
        asked = [Asked([20], 9), Asked([30], 2)]
        scheduler.submit(asked[:1])
        scheduler.turn()
        scheduler.submit(asked[1:])
        run(scheduler)
        alone = ["tile", "tile", "tile", "step"]
        if pauses:
            assert model.events[:10] == [*alone, "tile", "step", "tile", "step", "tile", "step"]
        else:
            assert model.events[:8] == [*alone, *alone]
        assert asked[1].text == counted([30], 2)


def test_a_prompt_of_a_client_that_left_is_broken_off() -> None:
    reading = Interruptible()
    scheduler = Scheduler(Counting(2, reading.pause), reading, 1e-9)
    asked = [Asked([20], 9), Asked([30], 2)]
    for answer in asked:
        scheduler.submit([answer])
        scheduler.turn()
    asked[1].is_cancelled = True
    run(scheduler)
    assert asked[1].text == [30] and asked[1].ended == 1 and asked[1].error is None
    assert asked[0].text == counted([20], 9)
    assert not [thread for thread in threading.enumerate() if thread.name == "kvpolicy-prompt"]


def test_rows_that_cannot_begin_again_end_everything() -> None:
    model = Counting(1)
    asked = [Asked([20], 9), Asked([30], 9)]
    scheduler = submitted(Scheduler(model), asked)
    scheduler.turn()

    def restart() -> None:
        raise ConnectionError("another rank is gone")

    model.broken_step = ValueError("broken")
    model.restart = restart  # pyright: ignore[reportAttributeAccessIssue]
    run(scheduler)
    assert [answer.ended for answer in asked] == [1, 1]
    assert asked[0].error is model.broken_step and "another rank" in str(asked[1].error)
