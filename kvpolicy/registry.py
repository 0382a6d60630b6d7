"""The names of strategies: built-in ones in a table for each kind, others by entry points.

A package adds a strategy under the entry point group of its kind, such as `kvpolicy.selectors`. A strategy is imported
when it is first looked up.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterable
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

from kvpolicy.text.errors import KVPolicyError
from kvpolicy.text.tables import shorten

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

Kind = Literal["allocator", "head_allocator", "selector", "merger", "codec", "reader"]

QUESTIONS: dict[Kind, str] = {
    "allocator": "how many tokens may each layer keep?",
    "head_allocator": "how is a layer's budget divided among its KV heads?",
    "selector": "which tokens are kept?",
    "merger": "what becomes of a token that is not kept?",
    "codec": "how is a kept token stored?",
    "reader": "which of the kept tokens does a decode step read?",
}
"""The question that each kind of part answers."""

ALLOCATORS = {
    "uniform": "kvpolicy.allocators.uniform:Uniform",
    "pyramid": "kvpolicy.allocators.pyramid:Pyramid",
    "squeeze": "kvpolicy.allocators.squeeze:SqueezeAttention",
    "kvcompose": "kvpolicy.allocators.kvcompose:KVCompose",
    "global": "kvpolicy.allocators.threshold:GlobalThreshold",
    "zigzag": "kvpolicy.allocators.zigzag:ZigZagKV",
    "cake": "kvpolicy.allocators.cake:CAKE",
    "simlayer": "kvpolicy.allocators.simlayer:SimLayerKV",
    "d2olayers": "kvpolicy.allocators.d2olayers:D2OLayers",
    "lava": "kvpolicy.allocators.lava:LAVa",
    "dynamickv": "kvpolicy.allocators.dynamickv:DynamicKV",
    "mass": "kvpolicy.allocators.mass:AttentionMass",
}
HEAD_ALLOCATORS = {
    "even": "kvpolicy.allocators.even:Even",
    "adakv": "kvpolicy.allocators.adakv:AdaKV",
    "duo": "kvpolicy.allocators.duo:DuoAttention",
}
SELECTORS = {
    "full": "kvpolicy.selectors.full:KeepAll",
    "window": "kvpolicy.selectors.window:SlidingWindow",
    "streaming": "kvpolicy.selectors.streaming:StreamingLLM",
    "random": "kvpolicy.selectors.random:RandomTokens",
    "h2o": "kvpolicy.selectors.h2o:H2O",
    "a2sf": "kvpolicy.selectors.a2sf:A2SF",
    "triattention": "kvpolicy.selectors.triattention:TriAttention",
    "rkv": "kvpolicy.selectors.rkv:RKV",
    "vase": "kvpolicy.selectors.vase:VaSE",
    "keyformer": "kvpolicy.selectors.keyformer:Keyformer",
    "snapkv": "kvpolicy.selectors.snapkv:SnapKV",
    "tova": "kvpolicy.selectors.tova:TOVA",
    "probe": "kvpolicy.selectors.probe:ProbeSalience",
    "scissorhands": "kvpolicy.selectors.scissorhands:Scissorhands",
    "expected": "kvpolicy.selectors.expected:ExpectedAttention",
    "keydiff": "kvpolicy.selectors.keydiff:KeyDiff",
    "qfilters": "kvpolicy.selectors.qfilters:QFilters",
    "kvzip": "kvpolicy.selectors.kvzip:KVzip",
    "kvzap": "kvpolicy.selectors.kvzap:KVzap",
    "knorm": "kvpolicy.selectors.knorm:KeyNorm",
    "lagkv": "kvpolicy.selectors.lagkv:LagKV",
    "cur": "kvpolicy.selectors.cur:CUR",
    "defensive": "kvpolicy.selectors.defensive:DefensiveKV",
    "dropkv": "kvpolicy.selectors.dropkv:DropKV",
    "critical": "kvpolicy.selectors.critical:CriticalKV",
    "caote": "kvpolicy.selectors.caote:CAOTE",
    "chunk": "kvpolicy.selectors.chunk:ChunkKV",
    "fair": "kvpolicy.selectors.fair:FairEviction",
    "compactor": "kvpolicy.selectors.compactor:Compactor",
    "kvcrush": "kvpolicy.selectors.kvcrush:KVCrush",
}
MERGERS = {
    "drop": "kvpolicy.mergers.drop:Drop",
    "merge": "kvpolicy.mergers.merge:CountedMerge",
    "regress": "kvpolicy.mergers.regress:Regress",
    "d2o": "kvpolicy.mergers.d2o:D2O",
    "compensate": "kvpolicy.mergers.compensate:Compensate",
    "blend": "kvpolicy.mergers.blend:Blend",
    "elastic": "kvpolicy.mergers.elastic:Elastic",
    "zsmerge": "kvpolicy.mergers.zsmerge:ZSMerge",
    "kvmerger": "kvpolicy.mergers.kvmerger:KVMerger",
    "keepkv": "kvpolicy.mergers.keepkv:KeepKV",
}
CODECS = {
    "plain": "kvpolicy.codecs.plain:Plain",
    "tokenwise": "kvpolicy.codecs.tokenwise:TokenWise",
    "kivi": "kvpolicy.codecs.kivi:KIVI",
    "gear": "kvpolicy.codecs.gear:GEAR",
    "kvquant": "kvpolicy.codecs.kvquant:KVQuant",
    "lowrank": "kvpolicy.codecs.lowrank.lowrank:LowRank",
    "rotate": "kvpolicy.codecs.rotate:RotateKV",
    "kvarn": "kvpolicy.codecs.kvarn:KVarN",
    "turboquant": "kvpolicy.codecs.turboquant:TurboQuant",
    "oscar": "kvpolicy.codecs.oscar:OSCAR",
    "bfp": "kvpolicy.codecs.bfp:BFP",
    "staircase": "kvpolicy.codecs.staircase:Staircase",
    "csr": "kvpolicy.codecs.csr.csr:CSR",
    "mikv": "kvpolicy.codecs.mikv:MiKV",
    "zipcache": "kvpolicy.codecs.zipcache:ZipCache",
    "think": "kvpolicy.codecs.think:ThinK",
    "minicache": "kvpolicy.codecs.minicache:MiniCache",
}
READERS = {
    "all": "kvpolicy.readers.all:ReadAll",
    "exact": "kvpolicy.readers.exact:ExactTopK",
    "quest": "kvpolicy.readers.quest:Quest",
    "labels": "kvpolicy.readers.labels:DoubleSparsity",
    "loki": "kvpolicy.readers.loki:Loki",
    "sparq": "kvpolicy.readers.sparq:SparQ",
    "rocket": "kvpolicy.readers.rocket:RocketKV",
    "centroids": "kvpolicy.readers.centroids:Centroids",
    "retrieval": "kvpolicy.readers.retrieval:Retrieval",
    "shadowkv": "kvpolicy.readers.shadowkv:ShadowKV",
    "reuse": "kvpolicy.readers.reuse:Reuse",
}
WHOLE = {"tuned": "kvpolicy.policy.tuned:TunedPolicy"}
"""Names that stand for a whole policy and not for a part."""

ALIASES = {"keepall": "full"}


class SharedOption(NamedTuple):
    """An option that every strategy of a kind takes, and that wraps it.

    Attributes:
        kind: The kind.
        values: A regular expression of its values. Named groups of digits are fields of the class, 0 if they are empty;
            their names may end in underscores, since a name is given once.
        shown: How its value is written, with the fields of the class.
        example: A value that works.
        target: The module and the class that wraps the strategy, through its field `base`.
    """

    kind: Kind
    values: str
    shown: str
    example: str
    target: str


OPTIONS = {
    "protect": SharedOption("selector", "prompt", "prompt", "prompt", "kvpolicy.selectors.protected:Protected"),
    "skip": SharedOption(
        "allocator",
        r"(?:first:(?P<first>\d+)(?:,last:(?P<last>\d+))?|last:(?P<last_>\d+)|(?P<first__>\d+)-(?P<last__>\d+))",
        "{first}-{last}",
        "2-2",
        "kvpolicy.allocators.skipped:SkippedLayers",
    ),
}
"""Options that every strategy of a kind takes, by name."""

BUILT_IN: dict[Kind, dict[str, str]] = {
    "allocator": ALLOCATORS,
    "head_allocator": HEAD_ALLOCATORS,
    "selector": SELECTORS,
    "merger": MERGERS,
    "codec": CODECS,
    "reader": READERS,
}
"""Module and class of each built-in strategy, by kind and name."""

SUMMARIES = {
    # generated: summaries
    "uniform": "Give every layer the same budget.",
    "pyramid": "Give early layers more budget than late ones, decreasing linearly.",
    "squeeze": "Move budget away from layers whose attention barely changes its input.",
    "kvcompose": "Give more budget to layers whose heads have more tokens that are worth keeping.",
    "global": "Give each layer as much as it has of the best tokens of all layers and heads.",
    "zigzag": "Give more budget to layers whose attention needs more tokens.",
    "cake": "Give more budget to layers whose attention is spread out and shifts between queries.",
    "simlayer": "Let lazy layers keep the first and the newest tokens, and divide the rest among the others.",
    "d2olayers": "Give more budget to layers in which few heads concentrate their attention.",
    "lava": "Give more budget to layers whose scores are spread over more tokens and heads.",
    "dynamickv": "Give each layer as much as it has of the most attended tokens of all layers.",
    "mass": "Give more budget to layers that need more tokens to reach a share of their attention.",
    "even": "Give every head of a layer the same budget, in whole pages.",
    "adakv": "Give more budget to heads whose attention is spread over many tokens.",
    "duo": "Give streaming heads the room of sinks and recent tokens, and the other heads the rest.",
    "full": "Keep every token: none is evicted, and generated tokens get additional slots.",
    "window": "Keep the newest tokens.",
    "streaming": "Keep the first tokens as attention sinks, and the newest tokens.",
    "random": "Keep the newest token, and others that are drawn at random: the baseline that a selector must exceed.",
    "h2o": "Keep the newest tokens, and those that have received the most attention so far.",
    "a2sf": "Keep the newest tokens, and those that have received the most attention, of which older attention counts less.",  # noqa: E501
    "triattention": "Keep the tokens whose keys have the largest products with the mean query of a head, at the distances to come.",  # noqa: E501
    "rkv": "Keep tokens that the newest queries attend to, and whose keys do not resemble those of other tokens.",
    "vase": "Keep the tokens whose values have the widest range, and draw the others by their attention.",
    "keyformer": "Keep the newest tokens, and those that have received the most attention under random noise.",
    "snapkv": "Keep the tokens that the last queries of the prompt attend to, with their neighbors.",
    "tova": "Evict the tokens that the newest token attends to least, the same ones in all heads of a layer.",
    "probe": "Rank tokens by the mean attention of the probe queries that can attend to them.",
    "scissorhands": "Evict the tokens that most of the recent queries have ignored.",
    "expected": "Keep the tokens that queries to come are expected to attend to.",
    "keydiff": "Keep the tokens whose keys differ most from the mean direction of all keys.",
    "qfilters": "Keep the tokens whose keys have the largest product with the main direction of a head's queries.",
    "kvzip": "Keep the tokens that the model attends to when it repeats the context.",
    "kvzap": "Keep the tokens that a trained gate expects a replay of the context to attend to.",
    "knorm": "Keep the tokens whose keys are short.",
    "lagkv": "Keep the tokens whose channels vary most within the range of the tokens that follow.",
    "cur": "Keep the tokens with the largest share of the squares of their window's keys and values.",
    "defensive": "Keep the tokens that any query of a window attends to, weighted by what their values add to the output.",  # noqa: E501
    "dropkv": "Keep the tokens without which the attention outputs of the last queries would change most.",
    "critical": "Keep the best tokens of another selector, and then those of large attention times what their values add.",  # noqa: E501
    "caote": "Rank the tokens of another selector by how much the attention output would change without them.",
    "chunk": "Keep the chunks of neighboring tokens that another selector ranks highest in the mean, the same in all heads.",  # noqa: E501
    "fair": "Keep the same share of every part of the prompt, and in each part the tokens that another selector ranks highest.",  # noqa: E501
    "compactor": "Keep the tokens whose keys are unlike the others, and those that the tokens around them attend to.",
    "kvcrush": "Use part of the budget for representatives of the tokens that the base selector would evict.",
    "drop": "Drop every token that is not kept, and leave the others as they are.",
    "merge": "Merge an evicted token into the kept token of the most similar key, and count both.",
    "regress": "Rewrite the values of kept tokens by ridge regression on the attention of the last queries of the prompt.",  # noqa: E501
    "d2o": "Merge evicted tokens into the most similar kept one, keys and values, above a threshold that moves.",
    "compensate": "Keep the mean key and the mean value of all evicted tokens in one slot of each head, and count them.",  # noqa: E501
    "blend": "Blend the value of an evicted token into that of the kept token of the most similar key.",
    "elastic": "Merge every evicted token into the kept token of nearest position, keys and values, and take their mean.",  # noqa: E501
    "zsmerge": "Merge evicted tokens into a few residual slots of each head, keys and values, and count them.",
    "kvmerger": "Merge evicted tokens into a kept token of the same run of similar neighbors, by a Gaussian of their distance.",  # noqa: E501
    "keepkv": "Merge an evicted token into the kept token of the most similar key, weighted by attention, and count both.",  # noqa: E501
    "plain": "Store every token in the dtype of the model.",
    "tokenwise": "Quantize each token separately, after normalizing the key channels.",
    "kivi": "Quantize keys per channel and values per token, both in groups.",
    "gear": "Quantize, and store a low-rank approximation of the error and the outliers in full.",
    "kvquant": "Quantize to calibrated levels, keys before the rotary embedding.",
    "lowrank": "Store the products of keys and values with a few calibrated directions of each head.",
    "rotate": "Quantize each token separately, after a Hadamard transform has spread its outliers over all channels.",
    "kvarn": "Quantize groups of tokens whose tokens and channels were given equal variances, after a Hadamard transform.",  # noqa: E501
    "turboquant": "Quantize each token separately: the direction of a key with fixed levels, a value by its range.",
    "oscar": "Quantize each token to 2 bits after a calibrated rotation, and keep many sinks and recent tokens as they are.",  # noqa: E501
    "bfp": "Store short mantissas, with one exponent per block of channels.",
    "staircase": "Store tokens in 8 bits, then in 4, then in 2 as they age.",
    "csr": "Store each vector as a sum of a few atoms of a dictionary, found by matching pursuit.",
    "mikv": "Store the tokens of highest priority in high precision, and all others in few bits instead of evicting them.",  # noqa: E501
    "zipcache": "Quantize each token separately, with more bits for tokens of higher priority.",
    "think": "Store fewer channels of keys, those that contribute most to the scores of the newest queries.",
    "minicache": "Store one direction for the keys of two neighboring layers, one for their values, and the norms of each layer.",  # noqa: E501
    "all": "Read every kept token in every decode step.",
    "exact": "Read every key, and the values of the tokens with the largest attention weights.",
    "quest": "Read the pages of tokens whose keys may have the largest product with the query.",
    "labels": "Read the tokens whose keys have the largest product with the query in a few channels.",
    "loki": "Read the tokens whose keys have the largest product with the query in a few principal components.",
    "sparq": "Read the tokens whose keys have the largest product with the query in its own largest channels.",
    "rocket": "Read the pages whose keys may have the largest product in the largest channels of the query.",
    "centroids": "Read the pages whose mean key has the largest product with the query, and estimate the others.",
    "retrieval": "Read the clusters whose center has the largest product with the query, and estimate the others.",
    "shadowkv": "Rebuild the keys of the chosen pages from a low rank, and copy only their values.",
    "reuse": "Let some layers choose which tokens are read, and let the layers behind them read the same tokens.",
    # /generated
}
"""The first sentence of each built-in strategy's docstring, so that `kvpolicy list` need not import it.

`python -m kvpolicy_eval.catalog` writes it.
"""


def kinds() -> tuple[Kind, ...]:
    """The kinds of parts, in the order in which a spec is written; a head allocator is a part of an allocator."""
    return tuple(kind for kind in get_args(Kind) if kind != "head_allocator")


def described(kind: str) -> str:
    """A kind in words.

    Examples:
        >>> described("head_allocator")
        'head allocator'
    """
    return kind.replace("_", " ")


def names(kind: Kind | None = None) -> tuple[str, ...]:
    """The registered names, all or those of one kind, sorted.

    Examples:
        >>> names("head_allocator")
        ('adakv', 'duo', 'even')
    """
    return tuple(sorted(name for name, (its, _) in _table().items() if kind in (None, its)))


def built_in_classes(kind: Kind | None = None) -> dict[str, str]:
    """The module of each built-in strategy, all or those of one kind, by the name of its class; nothing is imported.

    Examples:
        >>> built_in_classes()["KIVI"]
        'kvpolicy.codecs.kivi'
    """
    tables = BUILT_IN.values() if kind is None else (BUILT_IN[kind],)
    targets = (target for table in tables for target in table.values())
    return {name: module for module, _, name in (target.partition(":") for target in targets)}


def lookup(name: str) -> tuple[Kind, type[Any]]:
    """Look up a strategy by its name.

    Args:
        name: A registered name, such as `h2o`.

    Returns:
        Its kind and its class.

    Raises:
        KVPolicyError: If there is no such name, or the strategy cannot be imported.

    Examples:
        >>> lookup("uniform")
        ('allocator', <class 'kvpolicy.allocators.uniform.Uniform'>)
    """
    found = _classes().get(ALIASES.get(name, name))
    if name in WHOLE:
        raise KVPolicyError(f"{name!r} sets every part of a policy and must stand alone, got it beside other parts.")
    if found is None:
        advice = suggest(name, [*names(), *WHOLE])
        if advice == ".":
            advice = "; try a name that `kvpolicy list` shows."
        raise KVPolicyError(f"A strategy must have a registered name, got {shorten(name)!r}{advice}")
    kind, target = found
    return kind, _load(name, target)


def whole_policy(name: str) -> Any:
    """The class of the policies that a name stands for; None if it is that of a part.

    Examples:
        >>> whole_policy("tuned").__name__, whole_policy("h2o")
        ('TunedPolicy', None)
    """
    return _load(name, WHOLE[name]) if name in WHOLE else None


def name_of(cls: type[Any]) -> str:
    """The name under which a strategy class is registered.

    Raises:
        KVPolicyError: If it is not registered.

    Examples:
        >>> from kvpolicy.codecs.plain import Plain
        >>> name_of(Plain)
        'plain'
    """
    own = f"{cls.__module__}:{cls.__qualname__}"
    for name, (_, target) in _classes().items():
        if target == own:
            return name
    for name, (kind, target) in _table().items():  # an entry point may name a re-export
        if name not in BUILT_IN[kind] and _load(name, target) is cls:
            return name
    raise KVPolicyError(
        f"{cls.__qualname__} must be registered to be written in a spec; add an entry point for {own} to the group of "
        f"its kind, {either(f'kvpolicy.{kind}s' for kind in kinds())}."
    )


def either(words: Iterable[str]) -> str:
    """A list of words as a sentence has it.

    Examples:
        >>> either(["a", "b", "c"])
        'a, b or c'
    """
    *first, last = words
    return f"{', '.join(first)} or {last}" if first else last


def suggest(word: str, known: Iterable[str]) -> str:
    """The end of a sentence about an unknown name: a suggestion if a known one is similar.

    Examples:
        >>> suggest("h20", ["h2o", "tova"])
        "; did you mean 'h2o'?"
        >>> suggest("zebra", ["h2o", "tova"])
        '.'
    """
    near = get_close_matches(word.lower(), list(known), n=1, cutoff=0.6)
    return f"; did you mean {near[0]!r}?" if near else "."


def _classes() -> dict[str, tuple[Kind, str]]:
    """The result of `_table`, and the classes behind `OPTIONS`, which no spec names."""
    behind: dict[str, tuple[Kind, str]] = {name: (option.kind, option.target) for name, option in OPTIONS.items()}
    return behind | _table()


@functools.cache
def _table() -> dict[str, tuple[Kind, str]]:
    """The kind and the `module:Class` of each name; all kinds share a namespace, so a spec needs no prefixes."""
    table: dict[str, tuple[Kind, str]] = {}
    for kind, built_in in BUILT_IN.items():
        _add(table, kind, built_in.items())
    points = list(_entry_points())
    for kind in BUILT_IN:
        _add(table, kind, ((point.name, point.value) for point in points if point.group == f"kvpolicy.{kind}s"))
    return table


def _entry_points() -> Iterable[EntryPoint]:
    """Entry points of all kinds, read once: each reading opens a file of every installed package."""
    # `import kvpolicy` imports this module, and importlib.metadata would take most of its time.
    from importlib.metadata import entry_points

    found = entry_points()
    return [point for kind in BUILT_IN for point in found.select(group=f"kvpolicy.{kind}s")]


def _add(table: dict[str, tuple[Kind, str]], kind: Kind, items: Iterable[tuple[str, str]]) -> None:
    for name, target in items:
        # `lookup` replaces an alias before it asks the table, so an entry of that name would never be found.
        taken = (kind, ALIASES[name]) if name in ALIASES else table.get(name)
        if taken is not None and taken != (kind, target):  # the same package may be found twice on sys.path
            raise KVPolicyError(
                f"The name {name!r} must be registered once, got the {taken[0]} {taken[1]} and the {kind} {target}; "
                "rename one entry point, or uninstall its package."
            )
        table[name] = (kind, target)


def _load(name: str, target: str) -> type[Any]:
    module, _, path = target.partition(":")
    try:
        found: object = functools.reduce(getattr, path.split("."), importlib.import_module(module))
    except (ImportError, AttributeError) as error:
        raise KVPolicyError(f"The strategy {name!r} could not be imported from {target}: {error}.") from error
    if not isinstance(found, type):  # such as a module or a function
        raise KVPolicyError(f"The strategy {name!r} must be a class, got {target}.")
    return found
