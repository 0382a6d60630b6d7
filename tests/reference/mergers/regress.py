"""Ridge regression of the window's outputs on the values of kept tokens, in its primal form."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..coding import Config, Token
from ..selectors.kvzip import Text

CHUNK = 2048
"""Tokens that are replayed at a time, unless the selector has a replay of its own."""
SMALL = "regress:window=5:sinks=1:recent=3"


def merge_prompt(
    config: Config,
    memory: dict[str, Any],
    tokens: list[Token],
    kept: set[int],
    targets: list[Token],
    attention: list[Tensor],
) -> float:
    """Find the change D of the free values that minimizes |A D - R|^2 + penalty |D|^2."""
    if config["queries"] == "replay":
        if memory["replayed"] is None:
            return math.inf
        attention = memory["replayed"]
    newest = max(token.position for token in tokens) + 1
    movable = {token.position for token in targets}
    free = [
        column
        for column, token in enumerate(tokens)
        if token.position in movable and config["sinks"] <= token.position < newest - config["recent"]
    ]
    if not free:
        return math.inf
    rows: list[list[float]] = []
    residuals: list[Tensor] = []
    for matrix in attention:
        for row in matrix[-config["window"] :].double():
            full = sum(row[j] * token.seen_value for j, token in enumerate(tokens))
            gone = sum(float(row[j]) for j, token in enumerate(tokens) if token.position not in kept)
            left = any(row[j] > 0 and token.position in kept for j, token in enumerate(tokens))
            rest = 1 - gone if left else 1.0  # 1 - gone is a rounding error where kept tokens have no weight at all
            share = [float(row[j]) / rest if token.position in kept else 0.0 for j, token in enumerate(tokens)]
            less = sum(share[j] * token.seen_value for j, token in enumerate(tokens))
            rows.append([share[j] for j in free])
            residuals.append(full - less)  # pyright: ignore[reportOperatorIssue, reportArgumentType]
    a = torch.tensor(rows, dtype=torch.float64)
    penalty = config["ridge"] * float((a * a).sum()) / len(rows)
    if penalty == 0:
        return math.inf
    left = a.T @ a + penalty * torch.eye(len(free), dtype=torch.float64)
    change = torch.linalg.solve(left, a.T @ torch.stack(residuals))
    for number, column in enumerate(free):
        token = tokens[column]
        token.value = (token.value.double() + change[number]).to(token.value.dtype)
    return math.inf


def replayed(
    config: Config,
    keys: Tensor,
    texts: list[Text],
    chunk: int,
    group: list[int],
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> list[Tensor]:
    """The attention of the observed tokens of a replay to the keys [n, D] alone, matrix [W, n] of every query head."""
    count = len(keys)
    width = config["window"]
    wanted = [*range(count)] if count <= width else [(2 * i + 1) * count // (2 * width) for i in range(width)]
    matrices: list[Tensor] = []
    for hq in group:
        rows: list[Tensor] = []
        for text in texts:
            start = text.number * chunk
            stop = min((text.number + 1) * chunk, count)
            before = text.queries.shape[1] - (stop - start)
            for token in (token for token in wanted if start <= token < stop):
                logits = keys.double() @ text.queries[hq, before + token - start].double() * scale
                logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
                learned = logits.new_empty(0) if sinks is None else sinks[hq].detach().double()[None]
                rows.append(torch.cat([logits, learned]).softmax(-1)[:count])
        if rows:
            matrices.append(torch.stack(rows))
    return matrices
