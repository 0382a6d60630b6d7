"""The text of generated tokens, decoded with the tokens before them.

A tokenizer may drop the space before the first token that it decodes, and a character may have several tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

CONTEXT = 4
"""Tokens of a prompt that are decoded with the first generated one."""

CHARACTER = 4
"""The most tokens of one character, whose UTF-8 sequence has at most as many bytes."""

LONGEST_WAIT = 32
"""Tokens after which text is returned even if the next token may change it, such as bytes that are no UTF-8."""

INCOMPLETE = "\ufffd"
"""The character that tokenizers decode an incomplete UTF-8 sequence to."""

CLEANED_STARTS = (" ", " '", " n", " n'", " 'v", " 'r")
"""Ends of a text from which `clean_up_tokenization_spaces` may remove the space, depending on what follows."""


class Detokenizer:
    """Decodes generated tokens, one after the other, as the text that they add to a prompt.

    The texts together are what the tokens add to the decoded prompt. The tokens since the last returned text are
    decoded with those of that text, so that the work for a token does not grow with the length of the answer.

    Args:
        tokenizer: A tokenizer of transformers.
        prompt: Token ids before the generated ones, without padding.
        skip_special_tokens: Whether special tokens have no text.

    Examples:
        >>> import kvpolicy
        >>> _, tokenizer = kvpolicy.tiny()
        >>> answer = Detokenizer(tokenizer, tokenizer("a=").input_ids)
        >>> [answer.add(token) for token in tokenizer("é!", add_special_tokens=False).input_ids], answer.flush()
        (['', 'é', '!'], '')
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int], *, skip_special_tokens: bool = True) -> None:
        """A decoder for one answer."""
        self._tokenizer = tokenizer
        special = special_ids(tokenizer)
        self._skipped = special if skip_special_tokens else frozenset[int]()
        self._cleans = bool(getattr(tokenizer, "clean_up_tokenization_spaces", False))
        self._context = self._end_of(prompt, special)
        self._before = self._decode(self._context)
        self._pending: list[int] = []

    def add(self, token: int) -> str:
        """Take a token, and return the text that is complete with it, which may be empty."""
        if token in self._skipped:
            return ""
        self._pending.append(token)
        text = self._text()
        if self._may_change(text) and len(self._pending) < LONGEST_WAIT:
            return ""
        return self._release(text)

    def skip_special_tokens(self) -> None:
        """Return no text of special tokens from now on."""
        self._skipped = special_ids(self._tokenizer)

    def text_of(self, token: int) -> str:
        """The text that a token would add now, be it complete or not; the token is not taken."""
        tokens = [*self._context, *self._pending, token]
        whole = self._decode(tokens)
        before = self._decode(tokens[:-1])
        return whole[len(before) :] if whole.startswith(before) else self._decode([token])

    def extend(self, tokens: Iterable[int]) -> None:
        """Take several tokens, whose text the next `add` or `flush` returns."""
        self._pending += [token for token in tokens if token not in self._skipped]

    def flush(self) -> str:
        """Return the rest of the text, after the last token."""
        return self._release(self._text())

    def _release(self, text: str) -> str:
        if text:  # what follows is decoded with these tokens
            self._context = self._pending
            self._before = self._decode(self._context)
        self._pending = []
        return text

    def _text(self) -> str:
        """The text of the tokens that are not yet returned."""
        whole = self._decode([*self._context, *self._pending])
        if whole.startswith(self._before):
            return whole[len(self._before) :]
        return self._decode(self._pending)  # these tokens change the text before them

    def _may_change(self, text: str) -> bool:
        if not text or text.endswith(INCOMPLETE):
            return True
        return self._cleans and self._decode([*self._context, *self._pending], False).endswith(CLEANED_STARTS)

    def _end_of(self, prompt: Sequence[int], special: frozenset[int]) -> list[int]:
        """The last tokens of a prompt, which begin with a whole character if possible. Special tokens are left out."""
        found: list[int] = []
        for token in reversed(prompt):
            if token in special:
                continue
            found.insert(0, token)
            size = len(found)
            if size >= CONTEXT and (size == CONTEXT + CHARACTER or not self._decode(found).startswith(INCOMPLETE)):
                break
        return found

    def _decode(self, tokens: list[int], cleans: bool | None = None) -> str:
        """The text of tokens, whose spaces are cleaned as the tokenizer does by default."""
        return self._tokenizer.decode(tokens, clean_up_tokenization_spaces=cleans) if tokens else ""


def text_behind(
    tokenizer: Any, prompt: Sequence[int], tokens: Iterable[int], *, skip_special_tokens: bool = True
) -> str:
    """Decode generated tokens as the text that they add to a prompt.

    Args:
        tokenizer: A tokenizer of transformers.
        prompt: Token ids before the generated ones, without padding.
        tokens: Generated token ids.
        skip_special_tokens: Whether special tokens have no text.

    Examples:
        >>> import kvpolicy
        >>> _, tokenizer = kvpolicy.tiny()
        >>> text_behind(tokenizer, tokenizer("?lima=").input_ids, tokenizer("12").input_ids)
        '12'
    """
    answer = Detokenizer(tokenizer, prompt, skip_special_tokens=skip_special_tokens)
    answer.extend(tokens)
    return answer.flush()


def special_ids(tokenizer: Any) -> frozenset[int]:
    """The tokens that `skip_special_tokens` of a tokenizer leaves out."""
    added: dict[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
    return frozenset(tokenizer.all_special_ids) | {token for token, content in added.items() if content.special}
