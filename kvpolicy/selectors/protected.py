"""Protected: the prompt stays, and what is evicted while decoding is generated."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvpolicy.protocols import SMALLEST_HEAD, HeadShape, Selector, State, View
from kvpolicy.selectors.base import Wrapper, check_base
from kvpolicy.selectors.common import keep_always
from kvpolicy.selectors.h2o import H2O
from kvpolicy.statistics import Results
from kvpolicy.text.errors import KVPolicyError
from kvpolicy.text.strategy import checked, strategy


class PromptSlots(NamedTuple):
    """Which slots hold tokens of a prompt, and the state of the base.

    Attributes:
        prompt: [B, H, S] bool; the slot of a generated token is written with zeros, and so is not.
        base: The state of the base.
    """

    prompt: Tensor
    base: State


@strategy
class Protected(Wrapper):
    """Keep every token of the prompts, and let another selector evict generated tokens only.

    In long reasoning, the prompt is short beside what is generated, and losing a part of the question costs the answer.
    In a spec, it is an option of every selector that evicts while decoding: `h2o:protect=prompt@512`.

    Args:
        base: The selector that ranks generated tokens; one with `decode=evict`.

    Raises:
        KVPolicyError: If the base does not evict while decoding; later, if the tokens of the prompts fill the budget of
            a layer.

    Examples:
        >>> from kvpolicy import Policy
        >>> str(Policy.parse("h2o:protect=prompt@512"))
        'h2o:protect=prompt@512'

    Source:
        our own wrapper. R-KV (arXiv:2505.24133) and TriAttention (arXiv:2604.04921) keep the prompt so in their code.
        Differences:

        - The prompt counts toward the budget, which must be larger. Elsewhere it is kept in addition to a budget.
        - The tokens of later prompts are protected too, and a later prompt evicts generated tokens only.
        - All heads of a layer must have the same budget, and a codec must not rank tokens for its precision.
    """

    base: Selector = checked(check_base, H2O)

    def __post_init__(self) -> None:
        if self.base.decode != "evict":
            raise KVPolicyError(
                f"The selector must evict while decoding to protect the prompt, got {self.base}, which keeps generated "
                "tokens in addition to the budget; try h2o:protect=prompt."
            )

    @property
    def compares_heads(self) -> bool:
        """No: the tokens of prompts rank above all others."""
        return False

    @property
    def whole_heads(self) -> bool:
        """Yes: a head must have room for the whole prompt, so that no head allocator divides the slots."""
        return True

    def alloc(
        self, batch: int, heads: int, slots: int, device: torch.device | str, head: HeadShape = SMALLEST_HEAD
    ) -> State:
        """No slot holds a token of a prompt."""
        prompt = torch.zeros(batch, heads, slots, dtype=torch.bool, device=device)
        return PromptSlots(prompt, self.base.alloc(batch, heads, slots, device, head))

    def observe(self, state: PromptSlots, seen: Results, view: View) -> State:
        """Note the new tokens, and update the base."""
        assert view.added is not None, "only prompts are observed"
        first = (view.length - view.added)[:, None, None]
        prompt = view.valid & (state.prompt | (view.positions >= first))
        self._check_room(prompt, view)
        return PromptSlots(prompt, self.base.observe(state.base, seen, view))

    def priority(self, state: PromptSlots, view: View) -> Tensor:
        """The prompt is always kept, generated tokens by the base: [B, H, N]."""
        return keep_always(self.base.priority(state.base, view), state.prompt)

    def _check_room(self, prompt: Tensor, view: View) -> None:
        """Refuse a prompt that leaves no slot to evict."""
        held = prompt.sum(-1).amax(-1)
        full = held >= view.budget
        if bool(full.any()):
            row = int(full.nonzero()[0])
            raise KVPolicyError(
                f"The budget of a layer must be more than the tokens of the prompt for {self}, which leaves no other "
                f"slot to evict, got {int(view.budget[row])} for {int(held[row])} tokens; try "
                f"@{2 * int(held[row])}, or remove protect=prompt."
            )
