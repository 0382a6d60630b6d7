"""Ridge regression of the window's outputs on the values of kept tokens, in its primal form."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..coding import Config, Token

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
            share = [float(row[j]) / (1 - gone) if token.position in kept else 0.0 for j, token in enumerate(tokens)]
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
