"""The codecs that tables compare."""

from __future__ import annotations

import dataclasses
from typing import Any

from kvpolicy import LowRank, Policy, registry
from kvpolicy.text.grammar import first_name

VARIANTS = {
    "tokenwise": ["tokenwise:bits=8", "tokenwise:bits=fp8", "tokenwise", "tokenwise:bits=3", "tokenwise:bits=2"],
    "kivi": ["kivi:bits=4", "kivi:bits=2"],
    "kvquant": ["kvquant:bits=4", "kvquant:bits=3", "kvquant:bits=2"],
    "rotate": ["rotate:bits=4", "rotate:bits=2"],
    "kvarn": ["kvarn:value_bits=4", "kvarn"],
    "oscar": ["oscar:bits=4", "oscar"],
    "turboquant": ["turboquant:bits=4", "turboquant:bits=3", "turboquant:bits=2"],
    "csr": ["csr:nnz=16", "csr:nnz=8", "csr:nnz=8:coef=fp8:index=packed", "csr:nnz=4"],
    "mikv": ["mikv", "mikv:high_bits=8"],
    "think": ["think", "think/tokenwise"],
    "lowrank": ["lowrank:rank=32", "lowrank:rank=32/tokenwise"],
    "minicache": ["minicache:start=0"],
}
"""Options with which a codec is compared, in the order of their bits per element; others have their defaults only."""

CODECS = [spec for name in registry.CODECS for spec in VARIANTS.get(name, [name])]
"""Specs of all codecs; see `with_ranking` for those that need a ranking of tokens."""

_SHORT = {
    "residual_length": 8,
    "block_size": 8,
    "group_size": 16,
    "prompt_atoms": 16,
    "tokens_8bit": 16,
    "tokens_4bit": 32,
}
"""Values of the options that set how many tokens a codec keeps in full precision."""

_MANY_SINKS = 64
"""First tokens that are a large part of a prompt of a few hundred tokens; a codec keeps an eighth of them there."""


def with_ranking(codec: str, ranking: str = "h2o") -> str:
    """The spec of a policy that keeps every token under a codec.

    Args:
        codec: Spec of the codec.
        ranking: Selector that is added for codecs which need a ranking of tokens.
    """
    _, kind = registry.lookup(first_name(codec))
    return f"{ranking}+{codec}" if kind().traits.demotion is not None else codec


def selector_for(codec: str, usual: str) -> str:
    """The selector with which a codec is measured under eviction.

    Args:
        codec: Spec of the codec.
        usual: Spec of the selector of most codecs. Those that group layers or heads are combined with few; with
            `streaming` otherwise.

    Examples:
        >>> selector_for("tokenwise", "snapkv"), selector_for("minicache:start=0", "snapkv")
        ('snapkv', 'streaming')
        >>> selector_for("lowrank:head_group=4", "snapkv")
        'streaming'
    """
    together = Policy.parse(with_ranking(codec)).codec
    is_grouped = groups_layers(codec) or (isinstance(together, LowRank) and together.head_group > 1)
    refused = is_grouped and first_name(usual) not in ("full", "window", "streaming")
    return "streaming" if refused else usual


def groups_layers(codec: str) -> bool:
    """Whether a codec, a spec, stores a part of several layers once."""
    _, kind = registry.lookup(first_name(codec))
    return kind().traits.groups is not None


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
    return _codec_spec(dataclasses.replace(policy, codec=_shortened(part)))


def short_options(codec: str) -> str:
    """The options that `short_windows` adds to a codec.

    Args:
        codec: Spec of the codec.

    Examples:
        >>> short_options("kivi:bits=2"), short_options("zipcache")
        ('group_size=16:residual_length=8', '')
    """
    given = _codec_spec(Policy.parse(with_ranking(codec))).split(":")
    return ":".join(option for option in short_windows(codec).split(":") if option not in given)


def _codec_spec(policy: Policy) -> str:
    return str(policy).split("+")[-1].split("@")[0]


def _shortened(part: Any) -> Any:
    """A codec with short full-precision buffers, or with such a base if it has one, whose buffer is its own."""
    base = getattr(part, "base", None)
    if base is not None and base.stages:
        return dataclasses.replace(part, base=_shortened(base))
    fields = {field.name for field in dataclasses.fields(part)}
    options = {name: value for name, value in _SHORT.items() if name in fields}
    if part.traits.group_size == 1:  # then the option counts channels, and not tokens
        options.pop("group_size", None)
    sinks = getattr(part, "sinks", 0)
    if sinks >= _MANY_SINKS:
        options["sinks"] = sinks // 8
    return dataclasses.replace(part, **options)
