"""A policy: which tokens a KV cache keeps, how they are stored, and within which budget."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from html import escape
from typing import Any, Literal

from kvpolicy.allocators.uniform import Uniform
from kvpolicy.codecs.plain import Plain
from kvpolicy.mergers.drop import Drop
from kvpolicy.protocols import (
    Allocator,
    Codec,
    DecodeMode,
    HeadAllocator,
    Merger,
    ModelInfo,
    Reader,
    Selector,
    compares_heads,
    joint_decode,
)
from kvpolicy.readers.all import ReadAll
from kvpolicy.registry import Kind
from kvpolicy.selectors.full import KeepAll
from kvpolicy.spec import grammar
from kvpolicy.spec.budget import Budget, check_budget
from kvpolicy.spec.errors import KVPolicyError, KVPolicyTypeError
from kvpolicy.spec.page_sizes import fewest_tokens
from kvpolicy.spec.part_fields import part_from_dict, part_to_dict
from kvpolicy.spec.tables import Cells, section, shorten, table
from kvpolicy.spec.validation import check_instance

DEFAULT_BUDGET = 0.2
"""The budget of a policy that has a selector and no budget."""

_IDENTITY = ("full", "none")
_UNSET: Any = None  # typed Any, because __post_init__ replaces it: `Policy.budget` is never None
_PROTOCOLS: dict[Kind, type] = {
    "allocator": Allocator,
    "selector": Selector,
    "merger": Merger,
    "codec": Codec,
    "reader": Reader,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """How the KV cache of a model is compressed: its parts and one budget.

    Any part works with any other, or is refused when the policy is made. A part that is omitted changes nothing.
    `str()` writes a policy as a spec, and `parse` reads it back.

    Args:
        allocator: How many tokens each layer may keep.
        selector: Which tokens are kept.
        merger: What becomes of a token that is not kept.
        codec: How a kept token is stored.
        reader: Which of the kept tokens a decode step reads.
        budget: A fraction of the prompt in (0, 1] (float), tokens per layer on average (int), or bytes of the whole
            cache (`"512MiB"`). The default is 0.2; it is 1.0 without a selector, and with a codec that keeps every
            token and uses the selector's priorities for its precision.

    Raises:
        KVPolicyTypeError: If a part is of another kind.
        KVPolicyError: If the budget is out of range, too small for the selector, or requires a selector; if the merger
            could never act; or if the reader does not work with the selector or the codec.

    Examples:
        >>> from kvpolicy.codecs.kivi import KIVI
        >>> policy = Policy(codec=KIVI(bits=4))
        >>> str(policy), policy.budget
        ('kivi:bits=4', 1.0)
        >>> Policy.parse("kivi:bits=4") == policy
        True
    """

    allocator: Allocator = field(default_factory=Uniform)
    selector: Selector = field(default_factory=KeepAll)
    merger: Merger = field(default_factory=Drop)
    codec: Codec = field(default_factory=Plain)
    reader: Reader = field(default_factory=ReadAll)
    budget: Budget = _UNSET

    def __post_init__(self) -> None:
        """Set the default budget, and check that the parts fit it."""
        for kind in _PROTOCOLS:
            _check_part(kind, getattr(self, kind))
        default = 1.0 if self._keeps_all or self._ranks else DEFAULT_BUDGET
        object.__setattr__(self, "budget", default if self.budget is _UNSET else check_budget(self.budget))
        self._check_budget()
        self._check_merger()
        self._check_heads()
        if not isinstance(self.reader, ReadAll):
            self._check_reader()

    @classmethod
    def parse(cls, text: str | None) -> Policy:
        """Read a policy from a spec; `full`, `none` and None are the policy that changes nothing.

        Args:
            text: `part {"+" part} ["@" budget]`, where a part is `name {":" key "=" value}`, and `a/b` wraps b in a.

        Raises:
            KVPolicyError: If the text is not a valid spec.

        Examples:
            >>> str(Policy.parse("pyramid:beta=20+kivi:bits=4@1.0"))
            'pyramid+kivi:bits=4'
            >>> Policy.parse("full") == Policy()
            True
        """
        if text is None or text in _IDENTITY:
            return cls()
        parts, budget = grammar.parse(text)
        try:
            return cls(**parts, budget=_UNSET if budget is None else budget)
        except TypeError as error:  # a part from another package does not implement its protocol
            raise KVPolicyError(f"The policy {shorten(text)!r} could not be created: {error}") from error

    @classmethod
    def of(cls, policy: Policy | str) -> Policy:
        """A policy as it is, or read from a spec.

        Raises:
            KVPolicyTypeError: If it is neither.
            KVPolicyError: If the spec is not valid.

        Examples:
            >>> Policy.of("h2o") == Policy.of(Policy.parse("h2o"))
            True
        """
        if isinstance(policy, cls):
            return policy
        if isinstance(policy, str):
            return cls.parse(policy)
        kinds = _kinds_of(policy)
        advice = f"Policy({kinds[0]}=...)" if kinds else '"snapkv@0.2"'
        raise KVPolicyTypeError(
            f"The policy must be a kvpolicy.Policy or a spec, got {type(policy).__name__}; try {advice}."
        )

    def to_dict(self) -> dict[str, Any]:
        """Every field of every part, as JSON can hold it; a spec leaves out what is the default.

        Raises:
            KVPolicyError: If a part is not registered, or holds an object.

        Examples:
            >>> Policy.parse("window@64").to_dict()["selector"], Policy.parse("window@64").to_dict()["budget"]
            ({'window': {'decode': 'evict'}}, 64)
        """
        return {kind: part_to_dict(getattr(self, kind)) for kind in _PROTOCOLS} | {"budget": self.budget}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Policy:
        """The policy that `to_dict` described.

        Raises:
            KVPolicyError: If it describes no policy.

        Examples:
            >>> policy = Policy.parse("squeeze+kvcrush/h2o+kivi:bits=4@0.2")
            >>> Policy.from_dict(policy.to_dict()) == policy
            True
        """
        unknown = sorted({*content} - {*_PROTOCOLS, "budget"})
        if unknown:
            raise KVPolicyError(
                f"A policy must be described by its parts and its budget, got {shorten(repr(unknown[0]))}."
            )
        parts: dict[str, Any] = {kind: part_from_dict(kind, content[kind]) for kind in _PROTOCOLS if kind in content}
        return cls(**parts, budget=content.get("budget", _UNSET))

    def __eq__(self, other: object) -> bool:
        """Equal parts, and an equal budget of the same type: 1 is one token and 1.0 is the whole prompt."""
        if not isinstance(other, Policy):
            return NotImplemented
        same_parts = all(getattr(self, kind) == getattr(other, kind) for kind in _PROTOCOLS)
        return same_parts and self.budget == other.budget and type(self.budget) is type(other.budget)

    def __str__(self) -> str:
        """The shortest spec of the policy, or the constructor call if a part is not registered."""
        default = Policy()
        parts: dict[Kind, Any] = {kind: getattr(self, kind) for kind in _PROTOCOLS}
        parts = {kind: part for kind, part in parts.items() if part != getattr(default, kind)}
        whole = isinstance(self.budget, float) and self.budget == 1.0
        budget = None if whole and (self._keeps_all or self._ranks) else self.budget
        try:
            return grammar.show(parts, budget) if parts else _IDENTITY[0]
        except ValueError:
            return _constructor(self)

    def __repr__(self) -> str:
        """An expression that creates the policy again."""
        spec = str(self)
        constructor = _constructor(self)
        return constructor if spec == constructor else f"Policy.parse({spec!r})"

    def _repr_html_(self) -> str:
        return policy_html(self)

    @property
    def decode(self) -> DecodeMode:
        """Whether generated tokens compete for the budget (`evict`) or are kept in addition to it (`grow`)."""
        whole = isinstance(self.budget, float) and self.budget == 1.0
        return "grow" if self._ranks and whole else self.selector.decode

    @property
    def undoes_rotation(self) -> Literal["", "codec", "selector"]:
        """Which part undoes the model's rotary embedding: the codec for keys, the selector for queries, or none."""
        if self.codec.traits.key_space == "unrotated":
            return "codec"
        return "" if self.selector.needs.query_moments is None else "selector"

    @property
    def heads(self) -> HeadAllocator | None:
        """The head allocator; None if every head of a layer has the same budget."""
        return getattr(self.allocator, "heads", None)

    def check(self, model: ModelInfo) -> None:
        """Raise KVPolicyError if a part cannot be used with a model, such as a codec without a calibration for it."""
        if self.heads is not None:
            self.heads.check(model)
        self.codec.check(model)
        self.reader.check(model)

    @property
    def min_tokens(self) -> int:
        """The smallest budget of a layer, in tokens."""
        return self.selector.min_tokens if self.heads is None else fewest_tokens(self.selector.min_tokens)

    @property
    def _ranks(self) -> bool:
        return self.codec.traits.demote_by == "priority"

    @property
    def _keeps_all(self) -> bool:
        return isinstance(self.selector, KeepAll)

    def _check_budget(self) -> None:
        budget = self.budget
        if self._keeps_all and self._ranks:
            raise KVPolicyError(
                f"The codec {self.codec} must be combined with a selector, whose priorities decide which tokens are "
                "stored precisely; try h2o."
            )
        if self._keeps_all and not (isinstance(budget, float) and budget == 1.0):
            raise KVPolicyError(
                f"A policy with the budget {budget} must have a selector, which decides what is evicted; try snapkv, "
                "or omit the budget."
            )
        if isinstance(budget, int) and budget < self.min_tokens:
            raise KVPolicyError(
                f"The budget must be at least {self.min_tokens} tokens for {self._ranked}, got {budget}."
            )

    @property
    def _ranked(self) -> str:
        """The selector, as messages about the smallest budget name it."""
        return f"{self.selector}" + ("" if self.heads is None else f" with {self.heads}")

    def _check_heads(self) -> None:
        """Refuse parts that need equally many tokens in every head."""
        heads: Any = self.heads
        if heads is None:
            return
        if not isinstance(heads, HeadAllocator):
            got = shorten(repr(heads))
            raise KVPolicyTypeError(
                f"The heads of an allocator must implement kvpolicy.protocols.HeadAllocator, got {got}; try AdaKV()."
            )
        if self._keeps_all:
            raise KVPolicyError(
                f"A policy with {heads} must have a selector, which ranks the tokens of each head; try snapkv."
            )
        if joint_decode(self.selector):
            raise KVPolicyError(
                f"The selector must decide for every head alone to be combined with {heads}, got {self.selector}, "
                "which ranks a token by all heads of a layer; try snapkv or h2o."
            )
        if heads.compares_heads and not compares_heads(self.selector):
            raise KVPolicyError(
                f"The selector must rank tokens by attention to be combined with {heads}, which compares them across "
                f"heads, got {self.selector}; try snapkv or h2o, or another head allocator."
            )
        needs = self.selector.needs
        if needs.vectors or needs.rerank_every or needs.head_shape:
            raise KVPolicyError(
                f"The selector must rank tokens by statistics of slots alone to be combined with {heads}, got "
                f"{self.selector}, which looks at keys; try snapkv or h2o."
            )
        if self.codec.stages and not (self.codec.traits.fits_pages and len(self.codec.stages) == 1):
            raise KVPolicyError(
                f"The codec must encode every token by itself to be combined with {heads}, which moves tokens between "
                f"pages, got {self.codec}; try tokenwise or bfp."
            )
        if self.merger.traits.when != "never":
            raise KVPolicyError(f"A policy with {heads} must drop tokens, got the merger {self.merger}; remove one.")
        if not isinstance(self.reader, ReadAll):
            raise KVPolicyError(
                f"A policy with {heads} must read every token, got the reader {self.reader}; remove one."
            )

    def _check_merger(self) -> None:
        when = self.merger.traits.when
        if when == "never":
            return
        if self._keeps_all:
            raise KVPolicyError(
                f"The merger {self.merger} must be combined with a selector, whose evicted tokens it merges; try "
                "snapkv."
            )
        whole = isinstance(self.budget, float) and self.budget == 1.0
        if whole and (when == "prompt" or self.decode == "grow"):
            raise KVPolicyError(
                f"A policy with the merger {self.merger} must evict tokens, got the budget {self.budget}, which keeps "
                "them all; try 0.2."
            )

    def _check_reader(self) -> None:
        if self.selector.needs.newest_row:
            raise KVPolicyError(
                f"The selector {self.selector} must see the newest token's attention to every kept token, of which the "
                f"reader {self.reader} leaves most unread; try snapkv or h2o."
            )
        if self.codec.traits.searches:
            raise KVPolicyError(
                f"The codec {self.codec} must not choose the slots that a step reads itself, since the reader "
                f"{self.reader} does; omit one of them."
            )
        if not (self.reader.traits.ordered and self.codec.stages):
            return
        if self.codec.traits.demote_by == "priority":
            raise KVPolicyError(
                f"The codec {self.codec} must store tokens in the order of their positions for the pages of the reader "
                f"{self.reader}, and stores them by priority; try the reader labels."
            )
        if self.decode != "grow":
            raise KVPolicyError(
                f"The selector {self.selector} must not evict while decoding if the reader {self.reader} reads pages "
                "of encoded slots, which cannot be sorted again; try decode=grow, or the reader labels."
            )


def policy_html(policy: Policy) -> str:
    """An HTML table of a policy's parts: what each does, and its parameters."""
    rows = [_part_cells(kind, getattr(policy, kind)) for kind in _PROTOCOLS]
    rows.append(("budget", escape(str(policy.budget)), _budget_unit(policy.budget), ""))
    columns = ("", "part", "what it does", "with")
    return section(f"policy <code>{escape(str(policy))}</code>", table(columns, rows, text_columns=4))


def _constructor(policy: Policy) -> str:
    """The expression that makes a policy again, for parts that have no registered name."""
    return f"Policy({', '.join(f'{field.name}={getattr(policy, field.name)!r}' for field in fields(policy))})"


def _part_cells(kind: str, part: Any) -> Cells:
    summary = (inspect.getdoc(type(part)) or "").partition("\n\n")[0]
    options = fields(part) if is_dataclass(part) else ()
    pairs = [(option.name, getattr(part, option.name)) for option in options]
    values = ", ".join(f"{name}={value}" for name, value in pairs if name != "heads" or value is not None)
    return kind, escape(type(part).__name__), escape(" ".join(summary.split())), escape(values)


def _budget_unit(budget: Budget) -> str:
    if isinstance(budget, str):
        return "bytes of the whole cache"
    return "tokens per layer on average" if isinstance(budget, int) else "of each prompt's tokens"


def _check_part(kind: Kind, part: object) -> None:
    check_instance(kind, part)
    if isinstance(part, _PROTOCOLS[kind]):
        return
    kinds = _kinds_of(part)
    if kinds:
        advice = f"pass it as {kinds[0]}="
    elif isinstance(part, str):
        advice = "read a spec with Policy.parse"
    else:
        advice = describe_missing(part, kind)
    raise KVPolicyTypeError(
        f"The {kind} must implement kvpolicy.protocols.{kind.capitalize()}, got {shorten(repr(part))}; {advice}."
    )


def _kinds_of(part: object) -> list[Kind]:
    """The kinds whose protocol a part implements."""
    if isinstance(part, type):
        return []
    return [kind for kind, protocol in _PROTOCOLS.items() if isinstance(part, protocol)]


def missing(part: object, kind: Kind) -> list[str]:
    """The members of a kind's protocol that a part lacks, sorted.

    Examples:
        >>> missing(KeepAll(), "codec")
        ['check', 'layout', 'stages', 'traits']
    """
    members = {*dir(_PROTOCOLS[kind]), *_PROTOCOLS[kind].__annotations__}
    return sorted(name for name in members if not name.startswith("_") and not hasattr(part, name))


def describe_missing(part: object, kind: Kind) -> str:
    """The members that a part lacks, as the end of a sentence.

    Examples:
        >>> describe_missing(KeepAll(), "allocator")
        'it lacks budgets, layer_metric of kvpolicy.protocols.Allocator'
    """
    return f"it lacks {', '.join(missing(part, kind))} of kvpolicy.protocols.{kind.capitalize()}"
