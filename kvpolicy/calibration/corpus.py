"""Texts to calibrate on, and windows of their tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def read_texts(paths: Iterable[str | Path]) -> list[str]:
    """Read text files; of a folder, all its `.txt` files in the order of their names.

    Raises:
        ValueError: Where a file cannot be read as UTF-8 text, or there is none.
    """
    texts: list[str] = []
    for path in map(Path, paths):
        for file in sorted(path.glob("*.txt")) if path.is_dir() else [path]:
            try:
                texts.append(file.read_text(encoding="utf-8"))
            except (OSError, UnicodeDecodeError) as error:
                raise ValueError(f"The text {file} cannot be read ({error}): give UTF-8 text files.") from error
    if not any(text.strip() for text in texts):
        raise ValueError("There is no text to calibrate on: give text files, or folders with .txt files.")
    return texts


def token_windows(tokenizer: Any, texts: Sequence[str], length: int, limit: int, seed: int) -> list[Tensor]:
    """Cut texts into windows of tokens, each beginning with BOS where the tokenizer has one.

    Args:
        tokenizer: Of transformers.
        texts: Each is cut by itself; the last window of a text is shorter. Windows below 16 tokens are left out, where
            there are longer ones.
        length: Tokens of a window.
        limit: The most windows; of more, some are drawn.
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
    drawn = torch.randperm(len(windows), generator=torch.Generator().manual_seed(seed))[:limit]
    return [torch.tensor(windows[index]) for index in sorted(drawn.tolist())]
