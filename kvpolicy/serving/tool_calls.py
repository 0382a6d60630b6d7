"""Calls of tools in an answer that has their format, as `tool_calls` of the OpenAI API."""

from __future__ import annotations

import json
import re
from typing import Any

_HEAD = re.compile(r'(?:\[|, )\{"name": ("(?:[^"\\]|\\.)*"), "arguments": ')
_DECODER = json.JSONDecoder(parse_int=str, parse_float=str)  # whose digits are not counted


class CallReader:
    """Reads calls from a text that arrives in pieces, and may end in the middle of a call.

    Args:
        key: What the ids of the calls begin with.

    Examples:
        >>> reader = CallReader("a")
        >>> reader.feed('[{"name": "f", "arguments": {"x"')
        [{'index': 0, 'id': 'a_tool_call_0', 'type': 'function', 'function': {'name': 'f', 'arguments': '{"x"'}}]
        >>> reader.feed(': 1}}]')
        [{'index': 0, 'function': {'arguments': ': 1}'}}]
    """

    def __init__(self, key: str) -> None:
        """A reader for one text."""
        self._key = key
        self._text = ""
        self._begin: int | None = None
        self._sent = 0
        self._count = 0

    def feed(self, piece: str) -> list[dict[str, Any]]:
        """Take a piece, and return what it adds to the calls: entries of `tool_calls` of a stream."""
        self._text += piece
        found: list[dict[str, Any]] = []
        while True:
            opened = {} if self._begin is not None else self._open()
            if self._begin is None:
                return found
            end = self._end_of_arguments() if "}" in piece else None
            arguments = self._text[self._sent : end]
            if arguments or opened:
                function = {**opened.pop("function", {}), "arguments": arguments}
                found.append({"index": self._count - 1, **opened, "function": function})
            self._sent = len(self._text) if end is None else end + 1  # behind the brace of the call
            if end is None:
                return found
            self._begin = None

    def _open(self) -> dict[str, Any]:
        """Begin with the next call, if its name is there: what is sent of it besides the arguments."""
        head = _HEAD.match(self._text, self._sent)
        if head is None:
            return {}
        self._begin = self._sent = head.end()
        self._count += 1
        key = f"{self._key}_tool_call_{self._count - 1}"
        return {"id": key, "type": "function", "function": {"name": json.loads(head[1])}}

    def _end_of_arguments(self) -> int | None:
        assert self._begin is not None
        try:
            return _DECODER.raw_decode(self._text, self._begin)[1]
        except (ValueError, RecursionError):  # not yet, or too deep to tell
            return None


def read_calls(text: str, key: str) -> list[dict[str, Any]]:
    """The calls of a whole text; the arguments of the last one may be incomplete.

    Args:
        text: The text.
        key: What the ids of the calls begin with.

    Examples:
        >>> [call["function"] for call in read_calls('[{"name": "f", "arguments": {}}]', "a")]
        [{'name': 'f', 'arguments': '{}'}]
    """
    return [{name: call[name] for name in ("id", "type", "function")} for call in CallReader(key).feed(text)]
