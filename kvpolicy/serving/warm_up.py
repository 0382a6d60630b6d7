"""A prompt and some steps before the first request of a server, which would wait for all that is compiled."""

from __future__ import annotations

import copy
import logging
import threading
from typing import Any

from torch import Tensor

from kvpolicy.serving.prefix import Prefix
from kvpolicy.serving.prompt import Prompt
from kvpolicy.serving.requests import positions_of
from kvpolicy.serving.scheduler import Scheduler

LONGEST = 512
"""Tokens of the prompt, if there is room: enough that codecs encode some."""

STEPS = 3

log = logging.getLogger("kvpolicy.serving")


class WarmUp:
    """An answer that nobody asked for, as the scheduler sees it.

    Args:
        ids: Token ids of the prompt.
        config: The generation config of the model.

    Attributes:
        client: The same, for the scheduler.
        text: Token ids of the prompt, and of the answer so far.
        tokens: Begins with a token, as those of an answer that goes on: its prompt is counted nowhere.
        prompt: The prompt.
        cached: Tokens of the prompt that were not computed.
        is_cancelled: Never.
        ended: Set at the end.
        error: What ended it, or None.
    """

    def __init__(self, ids: list[int], config: Any) -> None:
        """Nothing was run."""
        config = copy.deepcopy(config)
        config.max_new_tokens = STEPS + 2
        self.client = self
        self.text = [*ids]
        self.tokens = [ids[-1]]
        self.prompt = Prompt(ids, config)
        self.cached = 0
        self.is_cancelled = False
        self.ended = threading.Event()
        self.error: Exception | None = None

    def take(self, logits: Tensor, best: int) -> bool:
        """Take the most probable token; the last one is that of the last step."""
        self.text.append(best)
        self.tokens.append(best)
        return len(self.tokens) > STEPS + 1

    def end(self, usage: Any, error: Exception | None) -> None:
        """Let the server begin."""
        self.error = error
        self.ended.set()


def warm_up(model: Any, scheduler: Scheduler, prefix: Prefix | None, length: int | None) -> None:
    """Read a prompt and run steps behind it, in the thread in which requests are answered.

    If it fails, the log says so, and the server begins: a request may do better.

    Args:
        model: The model.
        scheduler: The rows, none of which is taken.
        prefix: The cache that every request starts from, or None.
        length: The most tokens of a row; None if it is that of the model.
    """
    before = [] if prefix is None else [*prefix.ids]
    limits = [limit for limit in (length, positions_of(model)) if limit is not None]
    new = min(LONGEST, *(limit - STEPS - 2 - len(before) for limit in limits))
    if new < 1:
        return  # no room
    warm = WarmUp([*before, *[0] * new], model.generation_config)
    scheduler.submit([warm])
    warm.ended.wait()
    if warm.error is not None:
        log.warning("The warm-up failed.", exc_info=warm.error)
