"""The prompt of a command: where it is read from, how it is tokenized, whether it fits; files that a policy reads."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvpolicy.cli.completion import TINY
from kvpolicy.text.embedded_names import EMBEDDED
from kvpolicy.text.errors import KVPolicyError
from kvpolicy.text.formats import reason_of

if TYPE_CHECKING:
    from kvpolicy.policy import Policy


TRAINED_LENGTH = 1024
"""The longest prompt that the embedded model was trained on, in tokens."""


def sample() -> str:
    """Return the default prompt: sixty records and a question that the embedded model can answer.

    >>> sample().endswith("?iron=")
    True
    """
    text = (files("kvpolicy") / "assets" / "sample.txt").read_text(encoding="utf-8")
    return text.removesuffix("\n")


def read_prompt(prompt: str | None, file: str | None, model: str, *, whole: bool = False) -> tuple[str, bool]:
    """Read the prompt from the argument, a file or standard input.

    One newline at the end of a file or of standard input is removed, unless `whole` is true.

    Args:
        prompt: The argument; `-` for standard input.
        file: The path of the file; `-` for standard input.
        model: The name of the model. The embedded model has a default prompt.
        whole: Whether to keep the text as it is, since more text will follow it.

    Returns:
        The prompt, and whether it is the default prompt.

    Raises:
        KVPolicyError: If there is no prompt or more than one, or it is empty or not UTF-8.
    """
    if prompt is not None and file is not None:
        raise KVPolicyError("The prompt must be given once, got both an argument and --file; try one of them.")
    source = prompt if file is None else file
    if prompt is not None and prompt != "-":
        text = _check_argument(prompt)
    else:
        text = _read(source)
        if not whole:
            text = text.removesuffix("\n")
    if not text and source is None:
        if model in EMBEDDED:
            return sample(), True
        raise KVPolicyError("The prompt must be an argument, a file or standard input, got no prompt; try --file FILE.")
    if not text.strip():
        raise KVPolicyError("The prompt must contain text, got an empty one; try a prompt of at least one word.")
    return text, False


def _read(source: str | None) -> str:
    """The text of a file, of standard input (`-`), or, without a source, of standard input that is no terminal."""
    if source is None:
        return "" if sys.stdin is None or sys.stdin.isatty() else _standard_input()
    return _standard_input() if source == "-" else _decode(_read_file(source), source)


def _read_file(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise KVPolicyError(f"The file {path} cannot be read ({reason_of(error)}); try a text file.") from error


def _standard_input() -> str:
    raw: Any = getattr(sys.stdin, "buffer", sys.stdin).read()
    return raw if isinstance(raw, str) else _decode(raw, "standard input")


def _decode(raw: bytes, source: str) -> str:
    try:
        return raw.decode("utf-8").removeprefix("\ufeff").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise KVPolicyError(
            f"The text of {source} must be UTF-8, got {reason_of(error)}; try converting it."
        ) from error


def _check_argument(text: str) -> str:
    """Raise KVPolicyError if the argument was not UTF-8.

    Python passes such bytes as surrogates, which no tokenizer accepts.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise KVPolicyError(
            f"The text of the argument must be UTF-8, got an invalid character at position {error.start:,}; try "
            "converting it."
        ) from error
    return text


def encode(tokenizer: Any, text: str, chat: bool = False, *, answer: bool = True) -> Any:
    """Tokenize a prompt.

    Args:
        tokenizer: The tokenizer.
        text: The prompt.
        chat: Whether to format it as a message of the user with the chat template.
        answer: Whether the template begins an answer behind the message.

    Returns:
        Token ids, [1, P] int64.

    Raises:
        KVPolicyError: If the tokenizer has no chat template, or returns no tokens.
    """
    if chat and not getattr(tokenizer, "chat_template", None):
        raise KVPolicyError(
            "The tokenizer must have a chat template for --chat, got one without; try the command without --chat."
        )
    if chat:
        messages = [{"role": "user", "content": text}]
        encoded: Any = tokenizer.apply_chat_template(
            messages, add_generation_prompt=answer, return_tensors="pt", return_dict=True
        )
    else:
        encoded = tokenizer(text, return_tensors="pt", verbose=False)
    if not encoded["input_ids"].numel():
        raise KVPolicyError("The prompt must have at least one token, got none; try a longer prompt.")
    return encoded["input_ids"]


def check_length(model: Any, tokens: int, new: int) -> None:
    """Raise KVPolicyError if the prompt and the new tokens exceed the context length of the model."""
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if isinstance(limit, int) and 0 < limit < tokens + new:
        raise KVPolicyError(
            f"The prompt and the new tokens must fit into {limit:,} positions, got {tokens:,} and {new:,}; try a "
            f"shorter prompt{' or a smaller --new' if new else ''}."
        )


def prompt_notes(model: str, tokens: int, is_sample: bool) -> list[str]:
    """Return what a user should know about the prompt, one sentence each."""
    notes: list[str] = []
    if is_sample:
        key = sample().rpartition("?")[2]
        record = next(line for line in sample().splitlines() if line.startswith(key))
        notes.append(f"No prompt was given. The built-in sample has 60 records, such as {record}, and asks for ?{key}")
    if model == TINY and tokens > TRAINED_LENGTH:
        notes.append(
            f"The embedded model was trained on prompts of at most {TRAINED_LENGTH:,} tokens; this prompt has "
            f"{tokens:,}."
        )
    return notes


def files_of(policy: Policy) -> list[str]:
    """The files and folders that the parts of a policy name, of those that exist.

    >>> from kvpolicy import Policy
    >>> files_of(Policy.parse("squeeze+kvcrush/h2o+kivi@0.2"))
    []
    """
    return [name for name in _strings(policy.to_dict()) if name and _exists(name)]


def _strings(value: Any) -> Iterator[str]:
    """All strings in nested values."""
    if isinstance(value, str):
        yield value
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from _strings(getattr(value, field.name))
    elif isinstance(value, dict | list | tuple):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _strings(each)


def _exists(name: str) -> bool:
    try:
        return Path(name).exists()
    except (OSError, ValueError):  # no path
        return False
