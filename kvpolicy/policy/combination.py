"""The parts of a policy by kind, which of them do not work with which and why, and which policies fit one model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from kvpolicy.allocators.uniform import Uniform
from kvpolicy.protocols import (
    Allocator,
    Codec,
    DecodeMode,
    HeadAllocator,
    MeasuresAttention,
    Merger,
    Others,
    Reader,
    Selector,
    compares_heads,
    differs_by_layer,
    fits_pages,
    joint_decode,
    positions_only,
    rerank_every,
    same_in_heads,
    whole_heads,
)
from kvpolicy.readers.all import ReadAll
from kvpolicy.registry import Kind
from kvpolicy.selectors.full import KeepAll
from kvpolicy.statistics import GeneratedAttention, Vectors
from kvpolicy.statistics.statistic import first_of
from kvpolicy.text.budget import Budget, Share, fraction_of
from kvpolicy.text.errors import KVPolicyError, KVPolicyTypeError
from kvpolicy.text.tables import shorten
from kvpolicy.text.validation import check_instance

PROTOCOLS: dict[Kind, type] = {
    "allocator": Allocator,
    "selector": Selector,
    "merger": Merger,
    "codec": Codec,
    "reader": Reader,
}
"""The protocol of each kind of part, in the order in which a spec is written."""

FORMER = {
    "needs": "AttentionSum() or another one of kvpolicy.statistics",
    "joint_decode": "GeneratedAttention(of_all_heads=True)",
}
"""Members by which parts of earlier versions asked for statistics, and what to hand over: they would be shown none."""


def check_part(kind: Kind, part: object) -> None:
    """Raise KVPolicyTypeError if a part is not of a kind."""
    check_instance(kind, part)
    for name, statistic in FORMER.items():
        if hasattr(part, name):
            raise KVPolicyTypeError(
                f"The {kind} must hand over what it needs to see in statistics, got {shorten(repr(part))}, which has "
                f"{name}; try {statistic}."
            )
    if isinstance(part, PROTOCOLS[kind]):
        _check_values(kind, part)
        return
    kinds = kinds_of(part)
    if kinds:
        advice = f"pass it as {kinds[0]}="
    elif isinstance(part, str):
        advice = "read a spec with Policy.parse"
    else:
        advice = describe_missing(part, kind)
    raise KVPolicyTypeError(
        f"The {kind} must implement kvpolicy.protocols.{kind.capitalize()}, got {shorten(repr(part))}; {advice}."
    )


def _check_values(kind: Kind, part: object) -> None:
    """Refuse what a class of a user easily gets wrong, and what would otherwise fail within a forward."""
    try:
        hash(part)
    except TypeError:
        raise KVPolicyTypeError(
            f"The {kind} must be immutable, got {shorten(repr(part))}; try @dataclass(frozen=True), and tuples for "
            "lists."
        ) from None
    given = getattr(part, "statistics", ())
    if not isinstance(given, Iterable) or any(isinstance(each, type) for each in given):
        raise KVPolicyTypeError(
            f"The {kind} must hand over statistics as a tuple of objects, got {shorten(repr(given))} of "
            f"{type(part).__name__}; try (AttentionSum(),)."
        )


def kinds_of(part: object) -> list[Kind]:
    """The kinds whose protocol a part implements."""
    if isinstance(part, type):
        return []
    return [kind for kind, protocol in PROTOCOLS.items() if isinstance(part, protocol)]


def missing(part: object, kind: Kind) -> list[str]:
    """The members of a kind's protocol that a part lacks, sorted.

    Examples:
        >>> from kvpolicy.selectors.full import KeepAll
        >>> missing(KeepAll(), "codec")
        ['check', 'check_others', 'layout', 'stages', 'traits']
    """
    members = {*dir(PROTOCOLS[kind]), *PROTOCOLS[kind].__annotations__}
    return sorted(name for name in members if not name.startswith("_") and not hasattr(part, name))


def describe_missing(part: object, kind: Kind) -> str:
    """The members that a part lacks, as the end of a sentence.

    Examples:
        >>> from kvpolicy.selectors.full import KeepAll
        >>> describe_missing(KeepAll(), "allocator")
        'it lacks budgets, layer_metric of kvpolicy.protocols.Allocator'
    """
    return f"it lacks {', '.join(missing(part, kind))} of kvpolicy.protocols.{kind.capitalize()}"


def check_layers(layers: Sequence[Any]) -> None:
    """Refuse policies that cannot be those of the layers of one model.

    Args:
        layers: The policy of each layer.

    Raises:
        KVPolicyError: Naming the layers, and why.
    """
    if not layers:
        raise KVPolicyError("A policy by layer must have at least one layer, got none.")
    for index, policy in enumerate(layers):
        if not isinstance(policy.allocator, Uniform):
            raise KVPolicyError(
                f"The policy of a layer must have the allocator uniform, since its budget is the share of the layer, "
                f"got {policy} for layer {index}; try to leave the allocator out."
            )
        if policy.codec.traits.groups is not None:
            raise KVPolicyError(
                f"The codec of a layer must encode it by itself, got {policy} for layer {index}, whose codec shares "
                "codes between two layers; try tokenwise."
            )
        if differs_by_layer(policy.codec):
            raise KVPolicyError(
                f"The codec of a layer must not depend on the other layers, got {policy} for layer {index}, whose "
                "codec divides ranks over them; try ranks=same with a rank for this layer."
            )
        if isinstance(policy.budget, str | Share):
            raise KVPolicyError(
                f"The budget of a layer must be a relative share, a fraction or tokens, got {policy} for layer "
                f"{index}; try 0.2."
            )
    _check_same(layers, "be fractions, or all tokens", lambda policy: type(policy.budget).__name__, _is_share)
    _check_same(layers, "have the same decode mode", lambda policy: policy.decode)
    _check_same(layers, "replay their prompts alike, or none may", lambda policy: policy.replay)
    for index, policy in enumerate(layers):
        _check_reuse(layers, index, policy)


def _is_share(policy: Any) -> bool:
    return not policy.keeps_whole


def _check_same(layers: Sequence[Any], must: str, what: Any, counts: Any = None) -> None:
    found: dict[Any, int] = {}
    for index, policy in enumerate(layers):
        if counts is None or counts(policy):
            found.setdefault(what(policy), index)
    if len(found) > 1:
        first, second = list(found.values())[:2]
        raise KVPolicyError(
            f"The policies of the layers must {must}, got {layers[first]} for layer {first} and {layers[second]} for "
            f"layer {second}."
        )


def _check_reuse(layers: Sequence[Any], index: int, policy: Any) -> None:
    """Refuse a layer that reads what another one chose which reads otherwise."""
    source = policy.reader.traits.source(index)
    if source in (None, index) or source >= len(layers):
        return
    chooser = layers[source]
    if (chooser.reader, chooser.codec) != (policy.reader, policy.codec):
        raise KVPolicyError(
            f"A layer that reuses the choice of another one must have the same reader and codec, got {policy} for "
            f"layer {index} and {chooser} for layer {source}."
        )


def check_together(policy: Any) -> None:
    """Refuse a policy whose parts do not work with each other.

    Raises:
        KVPolicyError: Naming the parts.
    """
    check_merger(policy.merger, policy.selector, policy.budget, policy.decode)
    if policy.heads is not None:
        check_heads(policy.heads, policy.selector, policy.merger, policy.codec, policy.reader, policy.decode)
    check_reader(policy.reader, policy.selector, policy.codec, policy.merger, policy.decode)
    policy.codec.check_others(
        Others(
            allocator=policy.allocator,
            selector=policy.selector,
            reader=policy.reader,
            same_in_heads=same_in_heads(policy.selector),
            same_in_layers=positions_only(policy.selector),
            even_budgets=isinstance(policy.allocator, Uniform) and policy.heads is None,
            reads_all=isinstance(policy.reader, ReadAll),
        )
    )
    rebuilds = policy.reader.traits.rebuilds
    if rebuilds is not None and rebuilds.joint_heads and not same_in_heads(policy.selector):
        raise KVPolicyError(
            f"The selector must keep the same tokens in every head to be combined with {policy.reader}, whose heads "
            f"share coefficients, got {policy.selector}; try full, window or streaming, or joint=false."
        )
    if policy.codec.traits.demotion is not None and whole_heads(policy.selector):
        raise KVPolicyError(
            f"The selector must rank a token by itself to be combined with {policy.codec}, which ranks a part of the "
            f"tokens of a head at a time, got {policy.selector}; try snapkv or h2o, or the codec tokenwise."
        )
    allocator: Allocator = policy.allocator
    metric = allocator.layer_metric
    if metric in ("attention", "curve") and not isinstance(allocator, MeasuresAttention):
        raise KVPolicyTypeError(
            f"The allocator must have attention and a method measure(seen) for layer_metric={metric!r}, got "
            f"{shorten(repr(allocator))}, which lacks one; see kvpolicy.protocols.MeasuresAttention."
        )
    if metric == "curve":
        check_curves(allocator, policy.selector)


def check_curves(allocator: Allocator, selector: Selector) -> None:
    """Refuse an allocator that compares what tokens of different layers are worth, where that cannot be compared."""
    if not compares_heads(selector):
        raise KVPolicyError(
            f"The selector must rank tokens by attention to be combined with {allocator}, which compares them across "
            f"layers, got {selector}, whose compares_heads is not True; try kvzip or snapkv, or another allocator."
        )


def check_heads(
    heads: Any, selector: Selector, merger: Merger, codec: Codec, reader: Reader, decode: DecodeMode
) -> None:
    """Refuse parts that need equally many tokens in every head."""
    if not isinstance(heads, HeadAllocator):
        got = shorten(repr(heads))
        raise KVPolicyTypeError(
            f"The heads of an allocator must implement kvpolicy.protocols.HeadAllocator, got {got}; try AdaKV()."
        )
    if isinstance(selector, KeepAll):
        raise KVPolicyError(
            f"A policy with {heads} must have a selector that ranks the tokens of each head, got full, which "
            "keeps them all; try snapkv."
        )
    if joint_decode(selector):
        raise KVPolicyError(
            f"The selector must decide for every head alone to be combined with {heads}, got {selector}, which ranks "
            "a token by all heads of a layer; try snapkv or h2o."
        )
    if heads.compares_heads and not compares_heads(selector):
        raise KVPolicyError(
            f"The selector must rank tokens by attention to be combined with {heads}, which compares them across "
            f"heads, got {selector}, whose compares_heads is not True; try snapkv or h2o, or another head allocator."
        )
    # After a prompt, keys and values are handed over by head; the pages of a decode step are not, and need no ranks
    # where nothing is evicted. What cannot compare heads writes scores by head in every step.
    vectors = first_of(Vectors, selector.statistics)
    looks = (vectors is not None and vectors.generated) or rerank_every(selector) or whole_heads(selector)
    if looks and not (compares_heads(selector) and selector.decode == "grow"):
        raise KVPolicyError(
            f"The selector must not look at keys, or all slots of a head, while decoding to be combined with {heads}, "
            f"got {selector}; try "
            "snapkv, h2o or expected:decode=grow, or set compares_heads and decode='grow'."
        )
    if codec.stages and not fits_pages(codec):
        raise KVPolicyError(
            f"The codec must encode every token by itself to be combined with {heads}, which moves tokens between "
            f"pages, got {codec}; try tokenwise or bfp."
        )
    # With a codec, steps merge into the full-precision buffer, which each head has for itself.
    if merger.traits.compares and decode != "grow" and not codec.stages:
        raise KVPolicyError(
            f"The merger must not compare keys while decoding to be combined with {heads}, whose heads share the slots "
            f"of a layer, got {merger}; try compensate, a codec such as tokenwise, or decode=grow."
        )
    if not isinstance(reader, ReadAll):
        raise KVPolicyError(f"A policy with {heads} must read every token, got the reader {reader}; remove one.")


def check_merger(merger: Merger, selector: Selector, budget: Budget, decode: DecodeMode) -> None:
    """Refuse a merger that could never act."""
    when = merger.traits.when
    if when == "never":
        return
    if isinstance(selector, KeepAll):
        raise KVPolicyError(
            f"The merger {merger} must be combined with a selector that evicts tokens, got full, which keeps "
            "them all; try snapkv."
        )
    whole = fraction_of(budget) == 1.0
    if whole and (when == "prompt" or decode == "grow"):
        raise KVPolicyError(
            f"A policy with the merger {merger} must evict tokens, got the budget {budget}, which keeps them all; try "
            "0.2."
        )


def check_host(reader: Reader, codec: Codec, merger: Merger, decode: DecodeMode) -> None:
    """Refuse parts for which each step would copy more from host memory than what the reader chooses."""
    traits = reader.traits
    if traits.scans_keys and traits.choosers is None:
        raise KVPolicyError(
            "A reader must choose by an index to leave keys and values in host memory, got "
            f"{reader}, which looks at every key; try quest:host=true."
        )
    if codec.stages:
        raise KVPolicyError(
            f"The codec must be plain for the reader {reader}, which leaves keys and values in host memory in the "
            f"model's dtype, got {codec}; try host=false."
        )
    if merger.traits.when == "always" and decode != "grow":
        raise KVPolicyError(
            f"The merger must not merge while decoding for the reader {reader}, since it would copy every key from "
            f"host memory, got {merger}; try host=false."
        )


def check_reader(reader: Reader, selector: Selector, codec: Codec, merger: Merger, decode: DecodeMode) -> None:
    """Refuse a reader that leaves unread what the selector or the codec must see."""
    if isinstance(reader, ReadAll):
        return
    attention = first_of(GeneratedAttention, selector.statistics)
    if attention is not None and attention.of_all_slots:
        raise KVPolicyError(
            f"The selector {selector} must see the newest token's attention to every kept token, got the reader "
            f"{reader}, which leaves most of them unread; try snapkv or h2o."
        )
    if reader.traits.rebuilds is not None and codec.stages:
        raise KVPolicyError(
            f"The codec must be plain for the reader {reader}, which rebuilds keys from coefficients of its own, got "
            f"{codec}; try quest."
        )
    if reader.traits.host:
        check_host(reader, codec, merger, decode)
    if not (reader.traits.ordered and codec.stages):
        return
    if codec.traits.demotion is not None:
        raise KVPolicyError(
            "The codec must store tokens in the order of their positions for the pages of the reader "
            f"{reader}, got {codec}, which stores them by priority; try the reader labels."
        )
    if decode != "grow":
        raise KVPolicyError(
            f"The selector {selector} must not evict while decoding if the reader {reader} reads pages of encoded "
            f"slots, which cannot be sorted again, got decode={decode}; try decode=grow, or the reader labels."
        )
