"""Texts to tune a policy on: a prompt, and the answer that a cache must still support."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvpolicy.calibration.corpus import token_windows
from kvpolicy.registry import suggest
from kvpolicy.text.errors import KVPolicyError
from kvpolicy.text.formats import reason_of
from kvpolicy.text.tables import shorten
from kvpolicy.text.validation import check_size
from kvpolicy.tuning.peak import ANSWER

PROMPT = 1024
"""Tokens of a prompt that is cut out of plain text."""

LIMIT = 64
"""The most windows that are read."""

_NOTHING = torch.empty(0, dtype=torch.int64, device="cpu")
_KEYS = ("prompt", "answer")

TEXTS = ("prompt", "question", "answer")
"""Keys of a line of JSONL that are read."""

KEYS = (*TEXTS, "id", "task")
"""All keys that a line may have; `id` and `task` are the user's."""

EXAMPLE = '{"prompt": "...", "answer": "..."}'


class Window(NamedTuple):
    """A text in two or three parts, tokenized.

    Attributes:
        prompt: Token ids that are in the cache when it is compressed, [N] int64 on the CPU.
        answer: Token ids that follow one by one, and that the model should predict, [M] int64 on the CPU.
        question: Token ids between the two, which a compressed cache is given at once, as in a second turn, [Q] int64
            on the CPU; empty if the question is in the prompt.
    """

    prompt: Tensor
    answer: Tensor
    question: Tensor = _NOTHING

    @property
    def follow(self) -> Tensor:
        """Everything behind the compressed prompt: question and answer, [Q + M] int64."""
        return torch.cat([self.question, self.answer])

    @property
    def length(self) -> int:
        """The number of all tokens."""
        return len(self.prompt) + len(self.question) + len(self.answer)


def read_windows(
    tokenizer: Any,
    path: str | Path,
    *,
    prompt: int | None = None,
    answer: int | None = None,
    limit: int = LIMIT,
    seed: int = 0,
) -> list[Window]:
    r"""Read windows from a file of prompts and answers, or cut them out of plain text.

    A file is JSONL if its name ends with `.jsonl`, or if its first line is an object with such keys. Every line is one
    window; a `question`, if it has one, is fed to the compressed cache before the answer. The keys `id` and `task` are
    not used; others are refused, since one may be misspelled. Texts are taken as they are, so that a chat template must
    be in them; what the tokenizer puts before a text, such as BOS, is put before the prompt unless the prompt begins
    with it.

    Args:
        tokenizer: A tokenizer of transformers.
        path: The file.
        prompt: Tokens of each prompt cut out of plain text, BOS included; 1,024 by default.
        answer: Tokens of each answer cut out of plain text; 64 by default.
        limit: The maximum number of windows; if there are more, the choice is random.
        seed: Seed of this choice.

    Raises:
        KVPolicyError: If the file cannot be read, a line is no window, or there is none; or if `prompt` or `answer` is
            given for JSONL.

    Examples:
        >>> import tempfile, kvpolicy
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     file = Path(folder) / "windows.jsonl"
        ...     _ = file.write_text('{"prompt": "lime=12\\n", "question": "?lime=", "answer": "12"}')
        ...     (window,) = read_windows(kvpolicy.tiny()[1], file)
        >>> [len(part) for part in window], window.follow.shape
        ([6, 2, 3], torch.Size([5]))
    """
    path = Path(path)
    limit = check_size("limit", limit, 1)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise KVPolicyError(
            f"The file {path} must be readable UTF-8 text, got {reason_of(error)}; try another file."
        ) from error
    if not text.strip():
        raise KVPolicyError(f"The file {path} must contain windows, got an empty file; try another one.")
    if path.suffix != ".jsonl" and not _looks_like_jsonl(text):
        return _cut(tokenizer, path, text, prompt, answer, limit, seed)
    for name, size in (("prompt", prompt), ("answer", answer)):
        if size is not None:
            raise KVPolicyError(
                f"The length {name} must be given only for plain text, got {name}={size} for {path}, whose lines say "
                "what is prompt and answer; try without it."
            )
    # Not splitlines, which also splits at characters that JSON allows inside a string.
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    found = [(f"Line {number} of {path}", _parse(f"Line {number} of {path}", line)) for number, line in lines]
    start = _before(tokenizer)
    return [_tokenize(tokenizer, start, *found[index]) for index in _some(len(found), limit, seed)]


def split(windows: Sequence[Window], held_out: float, seed: int = 0) -> tuple[list[Window], list[Window]]:
    """Divide windows into those to tune on and those to evaluate on; windows with the same prompt stay together.

    Args:
        windows: The windows.
        held_out: The share of the windows to evaluate on, in (0, 1); at least one prompt is on either side.
        seed: Seed of the random choice.

    Returns:
        The windows to tune on and those held out, each in their order.

    Raises:
        KVPolicyError: If there are fewer than two prompts, or the share is out of range.

    Examples:
        >>> made = [Window(torch.tensor([n]), torch.tensor([5])) for n in range(8)]
        >>> [len(part) for part in split(made, 0.25)]
        [6, 2]
    """
    if not 0 < held_out < 1:
        raise KVPolicyError(f"The share of held-out windows must be between 0 and 1, got {held_out}; try 0.25.")
    prompts = [window.prompt.numpy().tobytes() for window in windows]
    sizes = Counter(prompts)
    different = list(sizes)
    if len(different) < 2:
        raise KVPolicyError(
            f"There must be windows of at least two prompts, so that some can be held out, got {len(different)}; try "
            "a longer text."
        )
    order: list[int] = torch.randperm(
        len(different), generator=torch.Generator().manual_seed(seed), device="cpu"
    ).tolist()
    wanted = held_out * len(windows)
    chosen = set[bytes]()
    count = 0
    for index in order[:-1]:  # the last prompt is left to tune on
        prompt = different[index]
        if chosen and count + sizes[prompt] / 2 > wanted:  # nearer to the share without it
            break
        chosen.add(prompt)
        count += sizes[prompt]
    sides = [prompt in chosen for prompt in prompts]
    return (
        [window for window, out in zip(windows, sides, strict=True) if not out],
        [window for window, out in zip(windows, sides, strict=True) if out],
    )


def windows_sha256(windows: Sequence[Window]) -> str:
    """Hash of the windows' tokens, which identifies the text that a policy was tuned on."""
    found = hashlib.sha256()
    for part in (part for window in windows for part in window):
        # The length of each part counts too: the same tokens divided otherwise are another text.
        found.update(len(part).to_bytes(8, "little") + part.long().numpy().tobytes())
    return found.hexdigest()


def _cut(
    tokenizer: Any, path: Path, text: str, prompt: int | None, answer: int | None, limit: int, seed: int
) -> list[Window]:
    """Windows of plain text, of equal length."""
    prompt = PROMPT if prompt is None else check_size("prompt", prompt, 2)
    answer = ANSWER if answer is None else check_size("answer", answer, 1)
    length = prompt + answer
    found = [ids for ids in token_windows(tokenizer, [text], length, limit, seed) if len(ids) == length]
    if not found:
        raise KVPolicyError(
            f"The text {path} must have at least {length} tokens, {prompt} of a prompt and {answer} of its answer, got "
            "fewer; try a longer text, or shorter windows."
        )
    return [Window(ids[:prompt], ids[prompt:]) for ids in found]


def _looks_like_jsonl(text: str) -> bool:
    try:
        first = json.loads(text.lstrip().split("\n", 1)[0])
    except (ValueError, RecursionError):
        return False
    if not isinstance(first, dict):
        return False
    # With one key of ours, another one may be misspelled.
    one = (
        any(key in first for key in TEXTS) and len(first) > 1 and all(isinstance(text, str) for text in first.values())
    )
    return one or all(key in first for key in _KEYS)


def _parse(where: str, line: str) -> dict[str, str]:
    """The texts of a line."""
    try:
        content: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise KVPolicyError(f"{where} must be a JSON object, got {error}; try one object on each line.") from error
    if not isinstance(content, dict):
        raise KVPolicyError(f"{where} must be a JSON object, got {type(content).__name__}; try {EXAMPLE}.")
    for key in content:
        if key not in KEYS:
            raise KVPolicyError(
                f"{where} must have keys among {', '.join(KEYS)}, got {shorten(key)!r}{suggest(key, KEYS)}"
            )
    texts: dict[str, str] = {}
    for key in TEXTS:
        value: Any = content.get(key, "" if key == "question" else None)
        if not isinstance(value, str) or (not value and key in _KEYS):
            got = f"no {key}" if key not in content else "an empty text" if value == "" else type(value).__name__
            raise KVPolicyError(f"{where} must have a text as its {key}, got {got}; try {EXAMPLE}.")
        try:
            value.encode()
        except UnicodeEncodeError as error:  # half of a pair of escapes, which no tokenizer takes
            raise KVPolicyError(f"{where} must have Unicode text as its {key}, got {error}; try without it.") from error
        texts[key] = value
    return texts


def _tokenize(tokenizer: Any, start: list[int], where: str, texts: dict[str, str]) -> Window:
    prompt = _plain(tokenizer, texts["prompt"])
    if prompt[: len(start)] != start:
        prompt = start + prompt
    question = _following(tokenizer, texts["prompt"], texts["question"])
    answer = _following(tokenizer, texts["prompt"] + texts["question"], texts["answer"])
    if not prompt or not answer:
        raise KVPolicyError(f"{where} must have tokens in its prompt and its answer, got none; try other texts.")
    return Window(*(torch.tensor(ids, dtype=torch.int64, device="cpu") for ids in (prompt, answer, question)))


def _plain(tokenizer: Any, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False, verbose=False)


def _following(tokenizer: Any, before: str, text: str) -> list[int]:
    """The tokens of a text behind another one; tokenized alone if it changes the tokens before it."""
    if not text:
        return []
    first = _plain(tokenizer, before)
    both = _plain(tokenizer, before + text)
    return both[len(first) :] if both[: len(first)] == first else _plain(tokenizer, text)


def _before(tokenizer: Any) -> list[int]:
    """Token ids that a tokenizer adds before a text, such as BOS; those behind it would be inside a window."""
    text = "a"
    plain = _plain(tokenizer, text)
    whole = tokenizer.encode(text, verbose=False)
    places = (at for at in range(len(whole) - len(plain) + 1) if whole[at : at + len(plain)] == plain)
    return whole[: next(places, 0)]


def _some(count: int, limit: int, seed: int) -> list[int]:
    """At most `limit` of `count` indices, ascending."""
    # The beginning of one permutation, so that a larger limit includes the windows of a smaller one.
    order: list[int] = torch.randperm(count, generator=torch.Generator().manual_seed(seed), device="cpu").tolist()
    return sorted(order[:limit])
