"""The codecs that tables compare, in the order of their bits per element."""

from __future__ import annotations

import dataclasses
from typing import Any

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
"""Specs of codecs at their defaults, apart from the options given; see `with_ranking` for `mikv` and `zipcache`."""

_SHORT = {
    "residual_length": 8,
    "block_size": 8,
    "group_size": 16,
    "prompt_atoms": 16,
    "tokens_8bit": 16,
    "tokens_4bit": 32,
}
"""Values of the options that set how many tokens a codec keeps in full precision."""

_TOKEN_GROUPS = ("kivi", "gear", "staircase")
"""Codecs whose `group_size` counts tokens; in the others it counts channels."""


def with_ranking(codec: str, ranking: str = "h2o") -> str:
    """The spec of a policy that keeps every token under a codec.

    Args:
        codec: Spec of the codec.
        ranking: Selector that is added for codecs which need a ranking of tokens.
    """
    return f"{ranking}+{codec}" if codec.startswith(("mikv", "zipcache")) else codec


def short_windows(codec: str) -> str:
    """The same codec with short full-precision buffers, so that it compresses prompts of a few hundred tokens.

    Args:
        codec: Spec of the codec.

    Returns:
        Its spec, without the selector and the budget of a policy.
    """
    if codec == "plain":
        return codec
    policy = Policy.parse(with_ranking(codec))
    part: Any = policy.codec
    fields = {field.name for field in dataclasses.fields(part)}
    options = {name: value for name, value in _SHORT.items() if name in fields}
    if not codec.startswith(_TOKEN_GROUPS):
        options.pop("group_size", None)
    spec = str(dataclasses.replace(policy, codec=dataclasses.replace(part, **options)))
    return spec.split("+")[-1].split("@")[0]
