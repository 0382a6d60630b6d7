"""A policy: which tokens a KV cache keeps, how they are stored, and within which budget."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from kvpolicy.allocators.uniform import Uniform
from kvpolicy.codecs.plain import Plain
from kvpolicy.mergers.drop import Drop
from kvpolicy.policy.combination import PROTOCOLS, check_layers, check_part, check_together, kinds_of
from kvpolicy.policy.html import by_layer_html, policy_html
from kvpolicy.protocols import (
    Allocator,
    ChecksModel,
    Codec,
    DecodeMode,
    HeadAllocator,
    Merger,
    ModelInfo,
    Reader,
    Selector,
)
from kvpolicy.protocols.allocator import heads_of
from kvpolicy.readers.all import ReadAll
from kvpolicy.registry import Kind, whole_policy
from kvpolicy.selectors.full import KeepAll
from kvpolicy.statistics import Moments, Replay
from kvpolicy.statistics.statistic import first_of
from kvpolicy.text import grammar
from kvpolicy.text.arguments import named_options
from kvpolicy.text.budget import Budget, check_budget, fewest_tokens, fraction_of, json_budget
from kvpolicy.text.errors import KVPolicyError, KVPolicyTypeError
from kvpolicy.text.part_fields import part_from_dict, part_to_dict
from kvpolicy.text.tables import shorten

DEFAULT_BUDGET = 0.2
"""The budget of a policy that has a selector and no budget."""

_IDENTITY = ("full", "none")
_UNSET: Any = None  # typed Any, because __post_init__ replaces it: `Policy.budget` is never None


@named_options
@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """How the KV cache of a model is compressed: its parts and one budget.

    Any part works with any other, or is refused when the policy is made. A part that is omitted changes nothing.
    `str()` writes a policy as a spec, and `parse` reads it back.

    Args:
        allocator: How many tokens each layer may keep.
        selector: Which tokens are kept.
        merger: Treatment of evicted tokens.
        codec: How a kept token is stored.
        reader: Which of the kept tokens a decode step reads.
        budget: A fraction of the prompt in (0, 1] (float, or `Share` with a least number of tokens), tokens per layer
            on average (int), or bytes of the whole cache (`"512MiB"`). The default is 0.2; it is 1.0 without a
            selector, and with a codec that keeps every token and uses the selector's priorities for its precision.

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
    differs_by_layer: ClassVar[bool] = False
    """Whether its layers have policies of their own."""

    def __post_init__(self) -> None:
        """Set the default budget, and check that the parts fit it."""
        for kind in PROTOCOLS:
            check_part(kind, getattr(self, kind))
        # Before the checks: `decode`, which they use, depends on the budget.
        default = 1.0 if self._keeps_all or self._ranks else DEFAULT_BUDGET
        budget = default if self.budget is _UNSET else check_budget(self.budget)
        # Where every token is kept, a least number of them says nothing more.
        budget = 1.0 if default == fraction_of(budget) == 1.0 else budget
        object.__setattr__(self, "budget", budget)
        self._check_budget()
        check_together(self)

    @classmethod
    def parse(cls, text: str | None) -> Policy:
        """Read a policy from a spec; `full`, `none` and None are the policy that changes nothing.

        Args:
            text: `part {"+" part} ["@" budget]`, where a part is `name {":" key "=" value}`, and `a/b` wraps b in a. A
                budget that is a fraction may have a least number of tokens, as in `@0.2:least=1024`.

        Raises:
            KVPolicyError: If the text is not a valid spec.
            KVPolicyTypeError: If it is no text.

        Examples:
            >>> str(Policy.parse("pyramid:beta=20+kivi:bits=4@1.0"))
            'pyramid+kivi:bits=4'
            >>> Policy.parse("full") == Policy()
            True
        """
        if text is None or grammar.check_text(text).strip() in _IDENTITY:
            return cls()
        whole = whole_policy(grammar.first_name(text))
        if whole is not None:
            return whole.from_spec(text)
        parts, budget = grammar.parse(text)
        try:
            return cls(**parts, budget=_UNSET if budget is None else budget)
        except TypeError as error:  # a part from another package does not implement its protocol
            raise KVPolicyError(f"The policy {shorten(text)!r} could not be created: {error}") from error

    @classmethod
    def by_layer(cls, policies: Sequence[Policy | str], *, budget: Budget) -> LayeredPolicy:
        """A policy for each layer of a model, under one budget in bytes.

        Args:
            policies: A policy or its spec for each layer of the model; those of layers that are not under the policy,
                such as sliding windows, are not used. Their budgets are relative shares, fractions or all tokens: they
                are multiplied by one number, so that all layers together fit the budget. A policy that evicts nothing
                keeps every token.
            budget: A fraction of the full cache's bytes, of prompt and announced new tokens, in the layers under the
                policy (float; 1.0 evicts nothing), the bytes of so many tokens per layer in a full cache (int), the
                fraction or, if that is more, the bytes of a least number of tokens (`Share`), or bytes of the whole
                cache (`"512MiB"`).

        Raises:
            KVPolicyTypeError: If an element is no policy.
            KVPolicyError: If the layers do not fit together; the message says which and why.

        Examples:
            >>> policy = Policy.by_layer(["snapkv@0.5", "h2o+bfp@0.25"], budget=0.2)
            >>> str(policy.at(1).codec), policy.budget
            ('bfp', 0.2)
        """
        return LayeredPolicy(policies, budget)

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
        kinds = kinds_of(policy)
        advice = f"Policy({kinds[0]}=...)" if kinds else '"snapkv@0.2"'
        got = f"the class {policy.__name__}" if isinstance(policy, type) else type(policy).__name__
        raise KVPolicyTypeError(f"The policy must be a kvpolicy.Policy or a spec, got {got}; try {advice}.")

    def to_dict(self) -> dict[str, Any]:
        """Every field of every part, as JSON can hold it; a spec leaves out what is the default.

        Raises:
            KVPolicyError: If a part is not registered, or holds an object.

        Examples:
            >>> Policy.parse("window@64").to_dict()["selector"], Policy.parse("window@64").to_dict()["budget"]
            ({'window': {'decode': 'evict'}}, 64)
        """
        return {kind: part_to_dict(getattr(self, kind)) for kind in PROTOCOLS} | {"budget": json_budget(self.budget)}

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
        if not isinstance(content, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise KVPolicyError(f"A policy must be described by a dictionary, got {shorten(repr(content))}.")
        layered = isinstance(content.get("layers"), list)
        unknown = sorted({*content} - ({"layers", "spec", "budget"} if layered else {*PROTOCOLS, "budget"}))
        if unknown:
            raise KVPolicyError(
                f"A policy must be described by its parts and its budget, got {shorten(repr(unknown[0]))}."
            )
        if layered:
            layers = [cls.from_dict(layer) for layer in content["layers"]]
            return LayeredPolicy(layers, content.get("budget"), spec=str(content.get("spec", "")))
        parts: dict[str, Any] = {kind: part_from_dict(kind, content[kind]) for kind in PROTOCOLS if kind in content}
        return cls(**parts, budget=content.get("budget", _UNSET))

    def __eq__(self, other: object) -> bool:
        """Equal parts and an equal budget; those of a `ModelPolicy` are its policy's."""
        if not isinstance(other, Policy):
            return NotImplemented
        # `named_options` compares types besides: a budget of 1 is one token, and 1.0 is the whole prompt.
        return all(getattr(self, kind) == getattr(other, kind) for kind in (*PROTOCOLS, "budget"))

    def __str__(self) -> str:
        """The shortest spec of the policy, or the constructor call if a part is not registered."""
        default = Policy()
        parts: dict[Kind, Any] = {kind: getattr(self, kind) for kind in PROTOCOLS}
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
        return self.to_html()

    def to_html(self) -> str:
        """An HTML table of the parts: what each does, and its parameters."""
        return policy_html(str(self), {kind: getattr(self, kind) for kind in PROTOCOLS}, self.budget)

    def at(self, layer_idx: int) -> Policy:
        """The policy of a layer, by its index in the model: this one, unless it differs by layer."""
        return self

    @property
    def distinct(self) -> tuple[Policy, ...]:
        """The policies of all layers, each once."""
        return (self,)

    @property
    def layer_groups(self) -> tuple[tuple[int, ...], ...]:
        """Layers that store a part of what they hold together, once the model is known; see `ModelPolicy`."""
        return ()

    def with_budget(self, budget: Budget) -> Policy:
        """The same policy with another budget.

        Raises:
            KVPolicyError: As for a new policy.

        Examples:
            >>> str(Policy.parse("h2o@0.5").with_budget(64))
            'h2o@64'
        """
        return dataclasses.replace(self, budget=budget)

    @property
    def layer_metric(self) -> str:
        """The metric of every layer that is measured before the budget is divided; empty if none is."""
        return self.allocator.layer_metric

    @property
    def replay(self) -> Replay | None:
        """How a prompt is run through the model once more; None if it is not."""
        own = self.at(0)  # layers that differ have the same
        return first_of(Replay, (*own.selector.statistics, *own.merger.statistics))

    @property
    def reads_part(self) -> bool:
        """Whether a decode step may read only a part of what is kept, in any layer."""
        return any(not isinstance(own.reader, ReadAll) for own in self.distinct)

    @property
    def decode(self) -> DecodeMode:
        """Whether generated tokens compete for the budget (`evict`) or are kept in addition to it (`grow`)."""
        own = self.at(0)  # layers that differ have the same
        return "grow" if own._ranks and own._is_whole else own.selector.decode

    @property
    def undoes_rotation(self) -> Literal["", "codec", "reader", "selector"]:
        """Which part undoes the model's rotary embedding: the codec or the reader for keys, the selector, or none.

        The first of them, if there are several.
        """
        if any(own.codec.traits.key_space == "unrotated" for own in self.distinct):
            return "codec"
        if any(own.reader.traits.rebuilds for own in self.distinct):
            return "reader"
        every = [each for own in self.distinct for each in own.selector.statistics]
        return "selector" if any(each.undoes_rotation or isinstance(each, Moments) for each in every) else ""

    @property
    def heads(self) -> HeadAllocator | None:
        """The head allocator; None if every head of a layer has the same budget."""
        return heads_of(self.allocator)

    def check(self, model: ModelInfo) -> None:
        """Raise KVPolicyError if a part cannot be used with a model, such as a codec without a calibration for it."""
        if self.heads is not None:
            self.heads.check(model)
        for part in (self.allocator, self.selector):
            if isinstance(part, ChecksModel):
                part.check(model)
        self.codec.check(model)
        self.reader.check(model)

    @property
    def min_tokens(self) -> int:
        """The smallest budget of a layer, in tokens."""
        return min(
            own.selector.min_tokens if own.heads is None else fewest_tokens(own.selector.min_tokens)
            for own in self.distinct
        )

    @property
    def keeps_whole(self) -> bool:
        """Whether every token of a prompt is kept, whatever the budget of all layers."""
        return all(own._keeps_all or (own._ranks and own._is_whole) for own in self.distinct)

    @property
    def _is_whole(self) -> bool:
        return isinstance(self.budget, float) and self.budget == 1.0

    @property
    def _ranks(self) -> bool:
        return self.codec.traits.demotion is not None

    @property
    def _keeps_all(self) -> bool:
        return isinstance(self.selector, KeepAll)

    def _check_budget(self) -> None:
        budget = self.budget
        if self._keeps_all and self._ranks:
            raise KVPolicyError(
                f"The codec {self.codec} must be combined with a selector that ranks the tokens to store precisely, "
                "got full, which ranks none; try h2o."
            )
        if self._keeps_all and not self._is_whole:
            raise KVPolicyError(
                f"A policy with the budget {budget} must have a selector that evicts tokens, got full, which keeps "
                "them all; try snapkv, or omit the budget."
            )
        if isinstance(budget, int) and budget < self.min_tokens:
            raise KVPolicyError(
                f"The budget must be at least {self.min_tokens} tokens for {self._ranked}, got {budget}."
            )

    @property
    def _ranked(self) -> str:
        """The selector, as messages about the smallest budget name it."""
        return f"{self.selector}" + ("" if self.heads is None else f" with {self.heads}")


class LayeredPolicy(Policy):
    """A policy for each layer of a model, under one budget in bytes; see `Policy.by_layer`.

    Args:
        policies: A policy or its spec for each layer of the model.
        budget: The budget of all layers together.
        spec: The string that `str` returns, for a policy that was made from a file.

    Attributes:
        layers: The policy of each layer of the model.
        budget: The budget of all layers together.
    """

    __slots__ = ("_spec", "layers")
    differs_by_layer: ClassVar[bool] = True
    layers: tuple[Policy, ...]

    def __init__(self, policies: Sequence[Policy | str], budget: Any, spec: str = "") -> None:
        """Check that the layers fit together; `spec` is what `str` writes, for a policy that was made from a file."""
        if isinstance(policies, str) or not isinstance(policies, Sequence):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise KVPolicyTypeError(
                f"The policies must be a list with one for each layer, got {shorten(repr(policies))}; try "
                'Policy.by_layer(["snapkv@0.2", "h2o@0.1"], budget=0.1).'
            )
        object.__setattr__(self, "layers", tuple(map(Policy.of, policies)))
        for index, policy in enumerate(self.layers):
            if policy.differs_by_layer:
                raise KVPolicyError(
                    f"The policy of a layer must not differ by layer itself, got {policy} for layer {index}."
                )
        object.__setattr__(self, "budget", check_budget(budget))
        object.__setattr__(self, "_spec", spec)
        check_layers(self.layers)

    def __getattr__(self, name: str) -> Any:
        """Say where to read a part, which is not set here."""
        if name in PROTOCOLS:
            raise KVPolicyError(
                f"The parts of a policy that differs by layer must be read from one layer, got {self}; try .at(0)."
            )
        return object.__getattribute__(self, name)  # which says what is missing

    @property
    def _content(self) -> tuple[Any, ...]:
        return self.layers, self.budget, type(self.budget)

    def __eq__(self, other: object) -> bool:
        """Equal layers, and an equal budget of the same type."""
        return isinstance(other, LayeredPolicy) and self._content == other._content

    def __hash__(self) -> int:
        """The hash of the content."""
        return hash(self._content)

    def __str__(self) -> str:
        """The spec of the file that it was made from; without one, an expression that creates it again."""
        return self._spec or repr(self)

    def __repr__(self) -> str:
        """An expression that creates the policy again."""
        return f"Policy.by_layer([{', '.join(map(_item, self.layers))}], budget={self.budget!r})"

    def to_html(self) -> str:
        """An HTML table of the layers."""
        parts = {f"layer {index}": policy for index, policy in enumerate(self.layers)}
        return by_layer_html(self._spec or "by layer", parts, self.budget)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle by construction."""
        return LayeredPolicy, (self.layers, self.budget, self._spec)

    def at(self, layer_idx: int) -> Policy:
        """The policy of a layer, by its index in the model."""
        return self.layers[layer_idx]

    @property
    def distinct(self) -> tuple[Policy, ...]:
        """The policies of all layers, each once."""
        return tuple(dict.fromkeys(self.layers))

    def with_budget(self, budget: Budget) -> Policy:
        """The same policies under another budget."""
        return LayeredPolicy(self.layers, budget)

    def of_layers(self, indices: Sequence[int]) -> LayeredPolicy:
        """The policy of a model of which these layers are under it: what only others have is not in `distinct`."""
        used = {self.layers[index] for index in indices}
        if len(used) == len(self.distinct):
            return self
        layers = [policy if policy in used else self.layers[indices[0]] for policy in self.layers]
        return LayeredPolicy(layers, self.budget, self._spec)

    def to_dict(self) -> dict[str, Any]:
        """Every field of every part of every layer, as JSON can hold it."""
        content = {"layers": [policy.to_dict() for policy in self.layers], "budget": json_budget(self.budget)}
        return content | ({"spec": self._spec} if self._spec else {})

    @property
    def layer_metric(self) -> str:
        """Empty, because the shares of the layers are given."""
        return ""

    def check(self, model: ModelInfo) -> None:
        """Raise KVPolicyError if the model has another number of layers, or a part cannot be used with it."""
        if len(self.layers) != model.depth:
            raise KVPolicyError(
                f"A policy by layer must have one for each of the model's {model.depth} layers, got {len(self.layers)}."
            )
        for policy in self.distinct:
            policy.check(model)


def _item(policy: Policy) -> str:
    spec = str(policy)
    return repr(policy) if spec == _constructor(policy) else repr(spec)


def _constructor(policy: Policy) -> str:
    """The expression that makes a policy again, for parts that have no registered name."""
    return (
        f"Policy({', '.join(f'{field.name}={getattr(policy, field.name)!r}' for field in dataclasses.fields(policy))})"
    )
