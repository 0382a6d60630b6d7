"""The streamer of an answer: the text of its tokens, put into the queue of the handler, and the end at stop strings."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from kvpolicy.reporting.detokenizer import Detokenizer, text_behind
from kvpolicy.serving import handlers


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


class StopStrings:
    """Says when the text of an answer has a stop string.

    Transformers' own criterion compares every string with every token of the vocabulary before the first step, which
    takes seconds for 150,000 tokens.

    Args:
        tokenizer: The tokenizer.
        stop: The strings.
        prompt: Token ids before the answer.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str], prompt: Sequence[int]) -> None:
        """No token was generated."""
        self._text = Detokenizer(tokenizer, prompt, skip_special_tokens=False)  # one may be a stop string
        self._filter = StopFilter(stop)

    def add(self, token: int) -> bool:
        """Take a token, and return whether the text has had a stop string."""
        self._filter.feed(self._text.add(token))
        return self._filter.has_ended


class AnswerStreamer:
    """Puts the text of an answer into a queue, token by token.

    Unlike transformers' streamer, it decodes tokens with those before them.

    Args:
        tokenizer: The tokenizer.
        queue: The queue of the handler.
        post: Calls a function in the event loop of the queue.
        cancel: Ends the generation; the handler calls it if the client is gone.
        parser: Transformers' parser of reasoning and tool calls, or None.

    Attributes:
        total_tokens: Generated tokens.
    """

    def __init__(
        self,
        tokenizer: Any,
        queue: asyncio.Queue[Any],
        post: Callable[..., None],
        cancel: Callable[[], None],
        parser: Any = None,
    ) -> None:
        """A streamer for one answer."""
        self.total_tokens = 0
        self.cancel = cancel
        self._tokenizer = tokenizer
        self._queue = queue
        self._post = post
        self._parser = parser
        self._unread = ""  # text of which the parser has made nothing yet
        self._text: Detokenizer | None = None
        if parser is not None:
            self._put(handlers.response_items(parser.initial_events))

    def begin(self, prompt: Sequence[int]) -> None:
        """Take the prompt."""
        # The parser looks for special tokens, such as the one before a tool call.
        self._text = Detokenizer(self._tokenizer, prompt, skip_special_tokens=self._parser is None)

    def add(self, token: int) -> None:
        """Take a generated token."""
        assert self._text is not None
        self.total_tokens += 1
        self._put_text(self._text.add(token))

    def end(self, failure: Exception | None = None, *, is_whole: bool = True) -> None:
        """Put the rest of the text, if it is whole, or an error, and the mark of the end."""
        if failure is not None:
            self._post(self._queue.put_nowait, handlers.stream_error(str(failure)))
            return
        if is_whole and self._text is not None:
            self._put_text(self._text.flush())
            if self._parser is not None:
                self._put(self._read(lambda parser: handlers.last_events(parser)))
        self._post(self._queue.put_nowait, None)

    def _put_text(self, text: str) -> None:
        if not text:
            return
        self._unread += text
        self._put([text] if self._parser is None else self._read(lambda parser: parser.feed(text)))

    def _read(self, events: Callable[[Any], list[Any]]) -> list[Any]:
        """What the parser makes of a text; a malformed call is text, and so is all that follows it."""
        try:
            items = handlers.response_items(events(self._parser))
        except handlers.MALFORMED:
            self._parser = None
            if self._text is not None:
                self._text.skip_special_tokens()
            return [self._unread]
        if items:
            self._unread = ""
        return items

    def _put(self, items: list[Any]) -> None:
        for item in items:
            self._post(self._queue.put_nowait, item)


class AnswerTokens(list[int]):
    """Generated tokens with their text, which transformers' handler would decode without the prompt.

    Args:
        tokenizer: The tokenizer.
        prompt: Tokens of the prompt.
        tokens: Generated tokens.

    Attributes:
        text: The text of the tokens without special tokens.
        whole_text: The text of the tokens with special tokens, in which transformers looks for tool calls.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int], tokens: Sequence[int]) -> None:
        """Decode the tokens."""
        super().__init__(tokens)
        self.text = text_behind(tokenizer, prompt, tokens)
        self.whole_text = text_behind(tokenizer, prompt, tokens, skip_special_tokens=False)
