"""Calibration texts, and windows of their tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvpolicy.text.errors import KVPolicyError, KVPolicyTypeError
from kvpolicy.text.formats import reason_of
from kvpolicy.text.validation import has_integers


def read_texts(paths: Iterable[str | Path]) -> list[str]:
    """Read text files; a folder stands for all its `.txt` files, sorted by name.

    Raises:
        KVPolicyError: If a file cannot be read as UTF-8 text, or if there is no text.
    """
    texts: list[str] = []
    for path in map(Path, paths):
        for file in sorted(path.glob("*.txt")) if path.is_dir() else [path]:
            try:
                texts.append(file.read_text(encoding="utf-8"))
            except (OSError, UnicodeDecodeError) as error:
                raise KVPolicyError(
                    f"The text {file} must be a readable UTF-8 file, got {reason_of(error)}; try another file."
                ) from error
    if not any(text.strip() for text in texts):
        raise KVPolicyError(
            "The files must contain text to calibrate on, got none; try text files, or folders with .txt files."
        )
    return texts


def token_windows(tokenizer: Any, texts: Sequence[str], length: int, limit: int, seed: int) -> list[Tensor]:
    """Split texts into windows of tokens, each of which starts with BOS if the tokenizer has it.

    Args:
        tokenizer: A tokenizer of transformers.
        texts: The texts, split separately; the last window of a text is shorter. Windows of less than 16 tokens are
            dropped if there are longer ones.
        length: Tokens per window.
        limit: The maximum number of windows. If there are more, the longest are used; among windows of equal length,
            the choice is random.
        seed: Seed of this choice.

    Returns:
        Token ids, each [n] int64.

    Raises:
        KVPolicyError: If the length leaves no token of a text beside BOS.
    """
    bos = [] if tokenizer.bos_token_id is None else [int(tokenizer.bos_token_id)]
    step = length - len(bos)
    if step < 1:
        raise KVPolicyError(
            f"The length of a window must be at least {len(bos) + 1} tokens, BOS included, got {length}; try 1024."
        )
    windows: list[list[int]] = []
    for text in texts:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False, verbose=False)
        windows += [bos + ids[start : start + step] for start in range(0, len(ids), step)]
    windows = [window for window in windows if len(window) >= 16] or windows
    order: list[int] = torch.randperm(
        len(windows), generator=torch.Generator().manual_seed(seed), device="cpu"
    ).tolist()
    order.sort(key=lambda index: -len(windows[index]))  # stable, so that windows of equal length stay shuffled
    return [torch.tensor(windows[index], device="cpu") for index in sorted(order[:limit])]


def as_windows(windows: Iterable[Tensor]) -> list[Tensor]:
    """Token ids, each [n] int64 on the CPU; the output of a tokenizer, [1, n], is accepted too.

    Raises:
        KVPolicyTypeError: If a window is not a tensor of token ids, or has several rows.
        KVPolicyError: If a window has no token.

    Examples:
        >>> [window.shape for window in as_windows([torch.arange(5)[None], torch.arange(3)])]
        [torch.Size([5]), torch.Size([3])]
    """
    found = [as_window(ids) for ids in windows]
    empty = next((number for number, ids in enumerate(found) if not len(ids)), None)
    if empty is not None:
        raise KVPolicyError(
            f"Every window must have at least one token, got none in window {empty}; try leaving it out."
        )
    return found


def as_window(ids: object) -> Tensor:
    """The token ids of one window, which may be none; see `as_windows`."""
    if not isinstance(ids, Tensor) or not has_integers(ids):
        what = str(ids.dtype).removeprefix("torch.") if isinstance(ids, Tensor) else type(ids).__name__
        raise KVPolicyTypeError(
            f"A window of tokens must be an integer tensor [n], got {what}; try the input_ids of a tokenizer."
        )
    if ids.dim() != 1 and (ids.dim() != 2 or len(ids) != 1):
        raise KVPolicyTypeError(
            f"A window of tokens must have the shape [n] or [1, n], got {list(ids.shape)}; try passing each row "
            "separately."
        )
    return ids.flatten().long().cpu()


def text_sha256(windows: Sequence[Tensor]) -> str:
    """Hash of the windows, which identifies the text of a calibration."""
    return hashlib.sha256(b"|".join(window.numpy().tobytes() for window in windows)).hexdigest()
