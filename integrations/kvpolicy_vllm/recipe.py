"""The policy that prompts are compressed under, and from how many tokens on."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from kvpolicy.allocators.uniform import Uniform
from kvpolicy.codecs.plain import Plain
from kvpolicy.engine.row_limits import RowBudget
from kvpolicy.mergers.drop import Drop
from kvpolicy.planning.planner import divide
from kvpolicy.policy import Policy
from kvpolicy.policy.model_policy import keep_at_least
from kvpolicy.protocols import LayerShape, Selector
from kvpolicy.readers.all import ReadAll
from kvpolicy.registry import name_of
from kvpolicy.text.errors import KVPolicyError
from kvpolicy.text.limits import LEAST_TOKENS

SELECTORS = ("window", "streaming", "snapkv", "kvcrush", "keydiff", "h2o", "tova", "expected")
"""Selectors that decide at the end of a prompt, from its queries, keys and values alone, and always keep its last token
and equally many tokens in each head."""

ACROSS_HEADS = ("kvcrush", "tova")
"""Those of them that rank a token by all heads of a layer."""

POLICY = "KVPOLICY_POLICY"
THRESHOLD = "KVPOLICY_THRESHOLD"
LEAST = "KVPOLICY_LEAST"
PREFILLS = "KVPOLICY_PREFILLS"
"""Variables of the environment, for what the engine's config does not say."""

SHORTEST = 1024
"""The threshold where none is set."""

AT_A_TIME = 4
"""The number of prefills where none is set."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """How prompts are compressed.

    Attributes:
        policy: The policy, with `decode=grow`: in an engine, nothing is evicted while an answer grows. A budget that is
            a fraction has a least number of tokens.
        threshold: Prompts of so many tokens and more are compressed.
        prefills: How many prompts are prefilled, or are compressed and wait for blocks, at a time; what waits is held
            beside the engine's blocks.

        least: The least number of tokens of a budget that is a fraction without one; 0 for none.

    Raises:
        KVPolicyError: If the policy has a part that an engine cannot have, or the budget is too small for a prompt of
            the threshold.

    Examples:
        >>> recipe = Recipe.parse("snapkv@0.2", threshold="1024")
        >>> str(recipe.policy), recipe.kept(2048), recipe.kept(8192)
        ('snapkv:decode=grow@0.2:least=1024', 1024, 1638)
    """

    policy: Policy
    threshold: int = SHORTEST
    prefills: int = AT_A_TIME
    least: int = LEAST_TOKENS

    def __post_init__(self) -> None:
        """Check the policy, let it grow, and keep enough of short prompts."""
        _check_parts(self.policy)
        growing = dataclasses.replace(self.policy, selector=_growing(self.policy.selector))
        object.__setattr__(self, "policy", keep_at_least(growing, self.least))
        if self.kept(self.threshold) < 2:
            raise KVPolicyError(
                f"{THRESHOLD} must be large enough for {self.policy} to keep two tokens, got {self.threshold}; try "
                "1024."
            )

    @classmethod
    def parse(
        cls,
        policy: str,
        *,
        threshold: object = SHORTEST,
        prefills: object = AT_A_TIME,
        least: object = LEAST_TOKENS,
    ) -> Recipe:
        """Read a recipe from texts.

        Raises:
            KVPolicyError: Naming what is wrong.
        """
        return cls(
            policy=Policy.parse(policy),
            threshold=_count(threshold, THRESHOLD),
            prefills=_count(prefills, PREFILLS),
            least=_count(least, LEAST, 0),
        )

    @classmethod
    def of(cls, transfer: Any, environment: Mapping[str, str] | None = None) -> Recipe | None:
        """The recipe of an engine: `policy`, `threshold`, `prefills` and `least` of its `kv_connector_extra_config`.

        Where one of them is missing, the variables `KVPOLICY_POLICY`, `KVPOLICY_THRESHOLD`, `KVPOLICY_PREFILLS` and
        `KVPOLICY_LEAST` say it. None if there is no policy.

        Args:
            transfer: The `kv_transfer_config` of the engine, or None.
            environment: The variables; those of the process by default.

        Raises:
            KVPolicyError: Naming what is wrong.
        """
        environment = os.environ if environment is None else environment

        def setting(name: str, variable: str, default: Any = None) -> Any:
            found = None if transfer is None else transfer.get_from_extra_config(name, None)
            return environment.get(variable, default) if found is None else found

        policy = setting("policy", POLICY)
        if not policy:
            return None
        return cls.parse(
            str(policy),
            threshold=setting("threshold", THRESHOLD, SHORTEST),
            prefills=setting("prefills", PREFILLS, AT_A_TIME),
            least=setting("least", LEAST, LEAST_TOKENS),
        )

    @property
    def compares_heads(self) -> bool:
        """Whether tokens are ranked by several KV heads together."""
        return any(name_of(type(each)) in ACROSS_HEADS for each in _chain(self.policy.selector))

    def budget(self, tokens: int) -> RowBudget:
        """The budget of a layer for a prompt.

        Raises:
            KVPolicyError: If it is too small for the selector.
        """
        length = torch.tensor([tokens], device="cpu")
        shape = LayerShape(1, 2, torch.float32)  # a budget in tokens does not depend on it
        found = divide(self.policy, None, length, length, [shape])
        return RowBudget(found.keep[:, 0], found.extra, found.expected_len[:, 0], found.last)

    def kept(self, tokens: int) -> int:
        """Tokens of a prompt that every head keeps, the last one included."""
        return min(int(self.budget(tokens).keep), tokens)


def _check_parts(policy: Policy) -> None:
    """Refuse what an engine's blocks cannot hold, or what is not decided at the end of a prompt."""
    if policy.differs_by_layer:
        raise KVPolicyError(f"{POLICY} must be one policy for all layers, got {policy}; try snapkv@0.2.")
    if type(policy.allocator) is not Uniform or policy.heads is not None:
        raise KVPolicyError(
            f"{POLICY} must keep equally many tokens in all layers and heads, since an engine has one table of blocks "
            f"for them, got {policy}; try {_text(policy.selector)}@0.2."
        )
    if type(policy.merger) is not Drop:
        raise KVPolicyError(
            f"{POLICY} must not merge tokens, since an engine cannot count merged tokens, got {policy}; try "
            f"{_text(policy.selector)}@0.2."
        )
    if type(policy.codec) is not Plain:
        raise KVPolicyError(
            f"{POLICY} must not encode tokens, since the engine's blocks have their own format, got {policy}; try "
            f"{_text(policy.selector)}@0.2."
        )
    if type(policy.reader) is not ReadAll:
        raise KVPolicyError(
            f"{POLICY} must read all tokens in a step, as an engine does, got {policy}; try "
            f"{_text(policy.selector)}@0.2."
        )
    for selector in _chain(policy.selector):
        if (name := name_of(type(selector))) not in SELECTORS:
            raise KVPolicyError(
                f"The selector of {POLICY} must be one of {', '.join(SELECTORS)}, which need only the queries, keys "
                f"and values of a prompt, got {name}; try snapkv@0.2."
            )
    if isinstance(policy.budget, str):
        raise KVPolicyError(
            f"The budget of {POLICY} must be a share of a prompt or a number of tokens, got {policy.budget}; try 0.2."
        )


def _chain(selector: Any) -> list[Selector]:
    """A selector and those that it wraps."""
    found: list[Selector] = []
    while selector is not None:
        found.append(selector)
        selector = getattr(selector, "base", None)
    return found


def _text(selector: Selector) -> str:
    return name_of(type(selector))


def _growing(selector: Any) -> Selector:
    """A selector with `decode=grow`, also where another one wraps it."""
    base = getattr(selector, "base", None)
    changes: dict[str, Any] = {"decode": "grow"} if base is None else {"base": _growing(base)}
    return dataclasses.replace(selector, **changes)


def _count(value: object, name: str, smallest: int = 1) -> int:
    text = str(value)
    if not text.isdecimal() or int(text) < smallest:
        raise KVPolicyError(f"{name} must be a number of at least {smallest}, got {text!r}.")
    return int(text)
