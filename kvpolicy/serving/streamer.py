"""The streamer of an answer: the text of its tokens, put into the queue that transformers' handler reads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from kvpolicy.reporting.detokenizer import Detokenizer, text_behind
from kvpolicy.serving import handlers


class AnswerStreamer:
    """Puts the text of an answer into a queue, token by token, for `generate`.

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
        self._text: Detokenizer | None = None
        if parser is not None:
            self._put_events(parser.initial_events)

    def put(self, value: Any) -> None:
        """Take the prompt in the first call, and one token in each later call."""
        tokens: list[int] = value.flatten().tolist()
        if self._text is None:
            # The parser looks for special tokens, such as the one before a tool call.
            self._text = Detokenizer(self._tokenizer, tokens, skip_special_tokens=self._parser is None)
            return
        for token in tokens:
            self.total_tokens += 1
            self._put_text(self._text.add(token))

    def end(self) -> None:
        """Put the rest of the text, and the mark of its end."""
        if self._text is not None:
            self._put_text(self._text.flush())
        if self._parser is not None:
            self._put_events(handlers.last_events(self._parser))
        self._post(self._queue.put_nowait, None)

    def _put_text(self, text: str) -> None:
        if text and self._parser is not None:
            self._put_events(self._parser.feed(text))
        elif text:
            self._post(self._queue.put_nowait, text)

    def _put_events(self, events: list[Any]) -> None:
        for item in handlers.response_items(events):
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
