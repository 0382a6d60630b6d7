"""Codecs side by side: their words, in the order of the bits that they take."""

from __future__ import annotations

import dataclasses

from kvpolicy import Policy

CODECS = [
    "plain",
    "tokenwise:bits=8",
    "tokenwise:bits=fp8",
    "tokenwise",
    "tokenwise:bits=3",
    "tokenwise:bits=2",
    "kivi:bits=4",
    "kivi:bits=2",
    "gear",
    "kvquant:bits=4",
    "kvquant:bits=3",
    "kvquant:bits=2",
    "rotate:bits=4",
    "rotate:bits=2",
    "turboquant:bits=4",
    "turboquant:bits=3",
    "turboquant:bits=2",
    "bfp",
    "staircase",
    "csr:nnz=16",
    "csr:nnz=8",
    "csr:nnz=8:coef=fp8:index=packed",
    "csr:nnz=4",
    "mikv",
    "mikv:high_bits=8",
    "zipcache",
]
"""Words of a codec with its own defaults; `mikv` and `zipcache` want a selector that ranks."""


def with_ranking(codec: str, ranking: str = "h2o") -> str:
    """A policy that keeps every token under this codec."""
    return f"{ranking}+{codec}" if codec.startswith(("mikv", "zipcache")) else codec


_SHORT = {
    "residual_length": 8,
    "block_size": 8,
    "group_size": 16,
    "prompt_atoms": 16,
    "tokens_8bit": 16,
    "tokens_4bit": 32,
}
_BLOCKS = ("kivi", "gear", "staircase")


def short_windows(codec: str) -> str:
    """The same codec with exact windows of a few tokens, for prompts of a few hundred."""
    if codec == "plain":
        return codec
    part = Policy.parse(with_ranking(codec)).codec
    fields = {field.name for field in dataclasses.fields(part)}  # pyright: ignore[reportArgumentType]
    short = {name: value for name, value in _SHORT.items() if name in fields}
    if not codec.startswith(_BLOCKS):
        short.pop("group_size", None)  # there it is channels, not tokens
    policy = dataclasses.replace(Policy.parse(with_ranking(codec)), codec=dataclasses.replace(part, **short))  # pyright: ignore[reportArgumentType, reportType]
    return str(policy).split("+")[-1].split("@")[0]
