"""A policy that is made from a file once the model is known."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

from kvpolicy.policy.combination import PROTOCOLS
from kvpolicy.policy.html import by_layer_html
from kvpolicy.policy.policy import DEFAULT_BUDGET, Policy
from kvpolicy.text import grammar
from kvpolicy.text.budget import Budget, check_budget
from kvpolicy.text.errors import KVPolicyError
from kvpolicy.text.validation import AutoInt, check_fields

TUNED = "tuned"
"""The name of these policies in specs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TunedFile:
    """A policy for each layer of the model, made from a file of measurements for the budget, or from a file of layers.

    Args:
        file: The path, as `kvpolicy tune` wrote it.
        length: Tokens of a text, prompt and new ones together, for which a budget in tokens or bytes is divided; `auto`
            is the mean length of the texts that the policy was tuned on.
    """

    file: str = ""
    length: AutoInt = "auto"

    def __post_init__(self) -> None:
        """Check the fields."""
        check_fields(self)
        if not self.file:
            raise KVPolicyError("tuned must have the file of a tuning, got none; try tuned:file=plan.json@0.1.")
        if self.length != "auto" and self.length < 1:
            raise KVPolicyError(f"length must be at least 1 token, got {self.length}.")


class TunedPolicy(Policy):
    """A policy by layer that is made from a file when the model is known: `tuned:file=plan.json@0.1`.

    `kvpolicy.attach` and `kvpolicy.plan` make a `LayeredPolicy` of it.

    Attributes:
        source: The file and its options.
        budget: The budget of all layers together, as in `Policy.by_layer`.
    """

    __slots__ = ("source",)
    differs_by_layer: ClassVar[bool] = True
    OPTIONS: ClassVar = TunedFile
    """The options of a spec."""
    source: TunedFile

    def __init__(self, source: TunedFile, budget: Budget | None = None) -> None:
        """Nothing is read yet."""
        object.__setattr__(self, "source", source)
        object.__setattr__(self, "budget", DEFAULT_BUDGET if budget is None else check_budget(budget))

    @classmethod
    def from_spec(cls, text: str) -> TunedPolicy:
        """Read `tuned:file=FILE[:length=N][@BUDGET]`.

        Raises:
            KVPolicyError: If the text is not a valid spec.
        """
        return cls(*grammar.parse_alone(TUNED, TunedFile, text))

    @property
    def _content(self) -> tuple[Any, ...]:
        return self.source, self.budget, type(self.budget)

    def __eq__(self, other: object) -> bool:
        """The same file and options, and an equal budget of the same type."""
        return isinstance(other, TunedPolicy) and self._content == other._content

    def __hash__(self) -> int:
        """The hash of the content."""
        return hash(self._content)

    def __str__(self) -> str:
        """The spec."""
        return grammar.show_alone(TUNED, self.source, self.budget)

    def __repr__(self) -> str:
        """An expression that creates the policy again."""
        return f"Policy.parse({str(self)!r})"

    def to_html(self) -> str:
        """The spec, since the layers are not known yet."""
        return by_layer_html(str(self), {}, self.budget)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle by construction."""
        return TunedPolicy, (self.source, self.budget)

    def __getattr__(self, name: str) -> Any:
        """Say where to read a part, which is not set here."""
        if name in PROTOCOLS:
            self._ask_layer()
        return object.__getattribute__(self, name)  # which says what is missing

    def _ask_layer(self) -> NoReturn:
        raise KVPolicyError(
            "The layers of a policy from a file must be read after it is attached, since they depend on the model, "
            f"got {self}; try handle.policy."
        )

    def at(self, layer_idx: int) -> NoReturn:
        """Not known before the model is."""
        self._ask_layer()

    @property
    def distinct(self) -> NoReturn:
        """Not known before the model is."""
        self._ask_layer()

    def with_budget(self, budget: Budget) -> Policy:
        """The same file with another budget."""
        return TunedPolicy(self.source, budget)
