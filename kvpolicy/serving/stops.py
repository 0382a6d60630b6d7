"""Stop strings: what ends the text of an answer, and what ends its generation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import StoppingCriteria

from kvpolicy.reporting.detokenizer import Detokenizer


class StopFilter:
    """Cuts a text that arrives in pieces before the first stop string.

    A piece that may be the beginning of a stop string is held back until the next one.

    Args:
        stop: The strings.

    Examples:
        >>> stop = StopFilter(["END"])
        >>> stop.feed("one E"), stop.feed("N"), stop.feed("D two"), stop.flush()
        ('one ', '', '', '')
    """

    def __init__(self, stop: Sequence[str]) -> None:
        """A filter for one text."""
        self._stop = stop
        self._held = ""
        self._ended = False

    @property
    def has_ended(self) -> bool:
        """Whether the text had a stop string."""
        return self._ended

    def feed(self, text: str) -> str:
        """Take a piece, and return what is certainly not part of a stop string."""
        if self._ended:
            return ""
        self._held += text
        places = [place for place in (self._held.find(stop) for stop in self._stop) if place >= 0]
        if places:
            self._ended = True
            return self._release(min(places))
        sizes = [size for stop in self._stop for size in range(1, len(stop)) if self._held.endswith(stop[:size])]
        return self._release(len(self._held) - max(sizes, default=0))

    def flush(self) -> str:
        """Return what was held back, at the end of the text."""
        return "" if self._ended else self._release(len(self._held))

    def _release(self, end: int) -> str:
        text, self._held = self._held[:end], self._held[end:]
        return text


class StopStrings(StoppingCriteria):
    """Ends `generate` once the text of one row has a stop string.

    Transformers' own criterion compares every string with every token of the vocabulary before the first step, which
    takes seconds for 150,000 tokens.

    Args:
        tokenizer: The tokenizer.
        stop: The strings.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str]) -> None:
        """A criterion for one `generate`."""
        self._tokenizer = tokenizer
        self._text: Detokenizer | None = None
        self._filter = StopFilter(stop)

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        """Take the last token, and return whether the row has ended."""
        if self._text is None:
            prompt: list[int] = input_ids[0, :-1].tolist()
            self._text = Detokenizer(self._tokenizer, prompt, skip_special_tokens=False)  # one may be a stop string
        self._filter.feed(self._text.add(int(input_ids[0, -1])))
        return torch.tensor([self._filter.has_ended], device=input_ids.device)
