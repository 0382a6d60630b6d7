"""Texts to calibrate on, and windows of their tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvpolicy.spec.errors import KVPolicyError, KVPolicyTypeError


def read_texts(paths: Iterable[str | Path]) -> list[str]:
    """Read text files; of a folder, all its `.txt` files in the order of their names.

    Raises:
        KVPolicyError: Where a file cannot be read as UTF-8 text, or there is none.
    """
    texts: list[str] = []
    for path in map(Path, paths):
        for file in sorted(path.glob("*.txt")) if path.is_dir() else [path]:
            try:
                texts.append(file.read_text(encoding="utf-8"))
            except (OSError, UnicodeDecodeError) as error:
                raise KVPolicyError(f"The text {file} cannot be read ({error}): give UTF-8 text files.") from error
    if not any(text.strip() for text in texts):
        raise KVPolicyError("There is no text to calibrate on: give text files, or folders with .txt files.")
    return texts


def token_windows(tokenizer: Any, texts: Sequence[str], length: int, limit: int, seed: int) -> list[Tensor]:
    """Cut texts into windows of tokens, each beginning with BOS where the tokenizer has one.

    Args:
        tokenizer: Of transformers.
        texts: Each is cut by itself; the last window of a text is shorter. Windows below 16 tokens are left out, where
            there are longer ones.
        length: Tokens of a window.
        limit: The most windows; of more, the longest are taken, and of those alike some are drawn.
        seed: Of the draw.

    Returns:
        Token ids, each [n] int64.
    """
    begin = [] if tokenizer.bos_token_id is None else [int(tokenizer.bos_token_id)]
    step = length - len(begin)
    windows: list[list[int]] = []
    for text in texts:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False, verbose=False)
        windows += [begin + ids[start : start + step] for start in range(0, len(ids), step)]
    windows = [window for window in windows if len(window) >= 16] or windows
    drawn: list[int] = torch.randperm(len(windows), generator=torch.Generator().manual_seed(seed)).tolist()
    drawn.sort(key=lambda index: -len(windows[index]))
    return [torch.tensor(windows[index]) for index in sorted(drawn[:limit])]


def as_windows(windows: Iterable[Tensor]) -> list[Tensor]:
    """Token ids, each [n] int64 on the CPU; a tokenizer's [1, n] are read too.

    Raises:
        KVPolicyTypeError: Where one is no tensor of token ids, or of several rows.

    Examples:
        >>> [window.shape for window in as_windows([torch.arange(5)[None], torch.arange(3)])]
        [torch.Size([5]), torch.Size([3])]
    """
    return [_as_window(ids) for ids in windows]


def _as_window(ids: object) -> Tensor:
    if not isinstance(ids, Tensor) or ids.is_floating_point():
        what = str(ids.dtype).removeprefix("torch.") if isinstance(ids, Tensor) else type(ids).__name__
        raise KVPolicyTypeError(
            f"A window of tokens is of type {what}: give a tensor of whole numbers [n], such as input_ids."
        )
    if ids.dim() != 1 and (ids.dim() != 2 or len(ids) != 1):
        raise KVPolicyTypeError(
            f"A window of tokens has the shape {list(ids.shape)}: give each row by itself, [n] or [1, n]."
        )
    return ids.flatten().long().cpu()


def text_sha256(windows: Sequence[Tensor]) -> str:
    """What a text is known again by."""
    return hashlib.sha256(b"|".join(window.numpy().tobytes() for window in windows)).hexdigest()
