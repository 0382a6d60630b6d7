"""A policy: what a KV cache keeps, how it stores it, and how much in all."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field, fields, is_dataclass
from html import escape
from typing import Any

from kvpolicy.allocators.uniform import Uniform
from kvpolicy.codecs.plain import Plain
from kvpolicy.protocols import Allocator, Codec, DecodeMode, Selector
from kvpolicy.registry import Kind
from kvpolicy.selectors.full import KeepAll
from kvpolicy.spec import grammar
from kvpolicy.spec.budget import Budget, check_budget
from kvpolicy.spec.errors import KVPolicyError, KVPolicyTypeError
from kvpolicy.spec.tables import Cells, section, table
from kvpolicy.spec.validation import check_instance

DEFAULT_SHARE = 0.2
"""The budget of a policy that names a selector and no budget."""

_IDENTITY = ("full", "none")
_UNSET: Any = None  # __post_init__ replaces it, so that no reader of a budget has to ask for None
_PROTOCOLS: dict[Kind, type] = {"allocator": Allocator, "selector": Selector, "codec": Codec}


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """Say how a model's KV cache is kept small.

    Three parts of three different types, and one budget. Any allocator works with any selector and any codec; a part
    that is not named changes nothing. `str()` writes a policy and `parse` reads it back.

    Args:
        allocator: How many tokens may each layer keep?
        selector: Which tokens are these?
        codec: How is a kept token stored?
        budget: How much in all: a share of the prompt in (0, 1] (float), tokens per layer on average (int), or bytes
            of the whole cache (`"512MiB"`). Without it, 1.0 where no selector is given, or where the codec keeps every
            token and takes the selector's ranking for its precision; else 0.2.

    Raises:
        KVPolicyTypeError: Where a part is in the wrong place.
        KVPolicyError: Where the budget is out of range, too small for the selector, or needs a selector.

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
    codec: Codec = field(default_factory=Plain)
    budget: Budget = _UNSET

    def __post_init__(self) -> None:
        """Fill in the budget and check that the parts fit it."""
        for kind in _PROTOCOLS:
            _check_part(kind, getattr(self, kind))
        default = 1.0 if self._keeps_all or self._ranks else DEFAULT_SHARE
        object.__setattr__(self, "budget", default if self.budget is _UNSET else check_budget(self.budget))
        self._check_budget()

    @classmethod
    def parse(cls, text: str | None) -> Policy:
        """Read a policy from its words; `full`, `none` and None are the policy that changes nothing.

        Args:
            text: `part {"+" part} ["@" budget]`, where a part is `name {":" key "=" value}`, and `a/b` wraps b in a.

        Raises:
            KVPolicyError: Where the text is not a policy; it says which word, what exists and what is near.

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
        except TypeError as error:  # of a text, nothing but ValueError: here a plug-in does not implement its kind
            raise KVPolicyError(f"The policy {text!r} cannot be built: {error}") from error

    @classmethod
    def of(cls, policy: Policy | str) -> Policy:
        """A policy as it is, or read from its words.

        Raises:
            KVPolicyTypeError: Where it is neither.
            KVPolicyError: Where the words are not a policy.

        Examples:
            >>> Policy.of("h2o") == Policy.of(Policy.parse("h2o"))
            True
        """
        if isinstance(policy, cls):
            return policy
        if isinstance(policy, str):
            return cls.parse(policy)
        fits = _fitting(policy)
        advice = f"write Policy({fits[0]}=...)" if fits else 'give words such as "snapkv@0.2", or a kvpolicy.Policy'
        raise KVPolicyTypeError(f"The policy is {policy!r}, which is none: {advice}.")

    def __eq__(self, other: object) -> bool:
        """Equal parts, and an equal budget of the same type: 1 is one token and 1.0 is everything."""
        if not isinstance(other, Policy):
            return NotImplemented
        ours, theirs = ((*(getattr(each, kind) for kind in _PROTOCOLS), each.budget) for each in (self, other))
        return ours == theirs and type(self.budget) is type(other.budget)

    def __str__(self) -> str:
        """The shortest words that parse back; of a part without a registered name, its `repr`."""
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
        """What makes it again."""
        spec = str(self)
        constructor = _constructor(self)
        return constructor if spec == constructor else f"Policy.parse({spec!r})"

    def _repr_html_(self) -> str:
        return policy_html(self)

    @property
    def decode(self) -> DecodeMode:
        """Whether generated tokens compete for the budget (`evict`) or get room beside it (`grow`)."""
        whole = isinstance(self.budget, float) and self.budget == 1.0
        return "grow" if self._ranks and whole else self.selector.decode

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
                f"The codec {self.codec} stores the tokens of highest rank precisely, and no selector ranks them: "
                "name one, such as h2o."
            )
        if self._keeps_all and not (isinstance(budget, float) and budget == 1.0):
            raise KVPolicyError(
                f"The budget {budget} may leave tokens out, and no selector says which to keep: "
                "name one, such as snapkv, or leave the budget out."
            )
        if isinstance(budget, int) and budget < self.selector.min_tokens:
            raise KVPolicyError(
                f"The budget of {budget} tokens is too small for {self.selector}: "
                f"the smallest that works is {self.selector.min_tokens}."
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
    values = ", ".join(f"{option.name}={getattr(part, option.name)}" for option in options)
    return kind, escape(type(part).__name__), escape(" ".join(summary.split())), escape(values)


def _budget_unit(budget: Budget) -> str:
    if isinstance(budget, str):
        return "bytes of the whole cache"
    return "tokens per layer on average" if isinstance(budget, int) else "of each prompt's tokens"


def _check_part(kind: Kind, part: object) -> None:
    check_instance(kind, part)
    if isinstance(part, _PROTOCOLS[kind]):
        return
    fits = _fitting(part)
    if fits:
        advice = f"give it as {fits[0]}="
    elif isinstance(part, str):
        advice = f"words are read by Policy.parse({part!r})"
    else:
        advice = lacking(part, kind)
    raise KVPolicyTypeError(f"The {kind} is {part!r}, which does not fit: {advice}.")


def _fitting(part: object) -> list[Kind]:
    return [] if isinstance(part, type) else [kind for kind, its in _PROTOCOLS.items() if isinstance(part, its)]


def missing(part: object, kind: Kind) -> list[str]:
    """What a kind's protocol asks for and a part has not, sorted.

    >>> missing(KeepAll(), "codec")
    ['check', 'layout', 'stages', 'traits']
    """
    asked = {*dir(_PROTOCOLS[kind]), *_PROTOCOLS[kind].__annotations__}
    return sorted(name for name in asked if not name.startswith("_") and not hasattr(part, name))


def lacking(part: object, kind: Kind) -> str:
    """The same, as the end of a sentence.

    >>> lacking(KeepAll(), "allocator")
    'it lacks budgets, measure of kvpolicy.protocols.Allocator'
    """
    return f"it lacks {', '.join(missing(part, kind))} of kvpolicy.protocols.{kind.capitalize()}"
