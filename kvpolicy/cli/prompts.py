"""The prompt of a command: where it comes from, and whether the model can take it."""

from __future__ import annotations

import sys
from importlib.resources import files
from pathlib import Path
from typing import Any

from kvpolicy.cli.words import TINY
from kvpolicy.spec.errors import KVPolicyError

TRAINED = 1024
"""Tokens that the embedded model was trained on at most."""


def sample() -> str:
    """The prompt for who brings none: sixty records and a question, which the embedded model can answer.

    >>> sample().endswith("?iron=")
    True
    """
    text = (files("kvpolicy") / "assets" / "sample.txt").read_text(encoding="utf-8")
    return text.removesuffix("\n")


def read_prompt(prompt: str | None, file: str | None, model: str) -> tuple[str, bool]:
    """Find the prompt in the argument, a file or standard input; one newline at the end of these is left out.

    Args:
        prompt: The argument, `-` for standard input.
        file: Path of the file, `-` for standard input.
        model: The embedded one gets the sample where nothing else is given.

    Returns:
        The prompt, and whether it is the sample.

    Raises:
        KVPolicyError: Where there is none, two are given, or it is empty or no UTF-8.
    """
    if prompt is not None and file is not None:
        raise KVPolicyError("The prompt is given twice, as an argument and by --file: leave one out.")
    asked = prompt if file is None else file
    if asked == "-":
        text = _standard_input()
    elif file is not None:
        text = _text(_file(file), file)
    elif prompt is not None:
        text = _argument(prompt)
    else:
        text = "" if sys.stdin is None or sys.stdin.isatty() else _standard_input()
        if not text and model == TINY:
            return sample(), True
        if not text:
            raise KVPolicyError("There is no prompt: give one as an argument, by --file, or on standard input.")
    if not text.strip():
        raise KVPolicyError("The prompt is empty: give some text.")
    return text, False


def _file(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        reason = (error.strerror or type(error).__name__).lower()
        raise KVPolicyError(f"The file {path} cannot be read ({reason}): give a text file.") from error


def _standard_input() -> str:
    raw: Any = getattr(sys.stdin, "buffer", sys.stdin).read()
    return raw.removesuffix("\n") if isinstance(raw, str) else _text(raw, "standard input")


def _text(raw: bytes, where: str) -> str:
    try:
        return raw.decode("utf-8").removeprefix("\ufeff").replace("\r\n", "\n").removesuffix("\n")
    except UnicodeDecodeError as error:
        raise KVPolicyError(f"The text of {where} is not UTF-8 (byte {error.start:,}): convert it first.") from error


def _argument(text: str) -> str:
    """An argument as it is; bytes that are no UTF-8 come as surrogates, which no tokenizer takes."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise KVPolicyError(
            f"The text of the argument is not UTF-8 (character {error.start:,}): convert it first."
        ) from error
    return text


def encode(tokenizer: Any, text: str, chat: bool = False) -> Any:
    """Token ids of a prompt, [1, P] int64; as a user's message where the model is to chat.

    Raises:
        KVPolicyError: Where the tokenizer has no chat template, or makes no token.
    """
    if chat and not getattr(tokenizer, "chat_template", None):
        raise KVPolicyError("The tokenizer has no chat template: leave --chat out.")
    if chat:
        messages = [{"role": "user", "content": text}]
        given: Any = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    else:
        given = tokenizer(text, return_tensors="pt", verbose=False)
    if not given["input_ids"].numel():
        raise KVPolicyError("The prompt has no tokens: give some text.")
    return given["input_ids"]


def check_length(model: Any, tokens: int, new: int) -> None:
    """Raise KVPolicyError unless the prompt and what is to come fit into the model's positions."""
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if isinstance(limit, int) and 0 < limit < tokens + new:
        raise KVPolicyError(
            f"The prompt has {tokens:,} tokens and {new:,} are to come, but the model has {limit:,} positions: "
            "shorten the prompt, or give a smaller --new."
        )


def remarks(model: str, tokens: int, is_sample: bool) -> list[str]:
    """What a person should know of a prompt before the answer, a sentence each."""
    found: list[str] = []
    if is_sample:
        asked = sample().rpartition("?")[2]
        record = next(line for line in sample().splitlines() if line.startswith(asked))
        found.append(f"No prompt given: this is the built-in sample, sixty records such as {record}, then ?{asked}")
    if model == TINY and tokens > TRAINED:
        found.append(f"The embedded model was trained on at most {TRAINED:,} tokens; this prompt has {tokens:,}.")
    return found
