"""Rows of tokens whose ends are predicted one by one, from a cache of their beginnings under a policy."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvpolicy_eval.common.conversation import run


class Predicted(NamedTuple):
    """How the ends are predicted.

    Attributes:
        nats: Mean surprise of a token.
        divergence: Mean divergence of the predictions from those of the full cache, in nats. Of the tokens but the
            first, which a prompt predicts.
    """

    nats: float
    divergence: float


class Continuation:
    """Rows of tokens, and what the full cache predicts of their ends.

    Args:
        model: A causal language model.
        ids: The rows, [B, N].
        prompt: Tokens of the beginnings, which are compressed.
    """

    def __init__(self, model: Any, ids: Tensor, prompt: int) -> None:
        """Predict nothing yet."""
        self.model = model
        self.ids = ids
        self.prompt = prompt

    def nats(self, policy: str, sized: str | None = None) -> float:
        """Mean surprise of a token, in nats.

        Args:
            policy: Spec of the policy that is attached.
            sized: The same with the budget of the cache; `policy` by default.
        """
        return self._nats(self._predictions(policy, sized or policy))

    def divergence(self, policy: str) -> float:
        """Mean divergence of what a policy predicts from what the full cache predicts, in nats."""
        return self._divergence(self._predictions(policy, policy))

    def predicted(self, policy: str) -> Predicted:
        """Both, from one run."""
        own = self._predictions(policy, policy)
        return Predicted(self._nats(own), self._divergence(own))

    @torch.inference_mode()
    def _nats(self, own: Sequence[Tensor]) -> float:
        nats = torch.zeros(())
        for position, logits in enumerate(own, self.prompt):
            nats += torch.nn.functional.cross_entropy(logits, self.ids[:, position])
        return float(nats) / len(own)

    @torch.inference_mode()
    def _divergence(self, own: Sequence[Tensor]) -> float:
        nats = torch.zeros(())
        for full, logits in list(zip(self._of_full, own, strict=True))[1:]:
            wanted = full.log_softmax(-1)
            nats += (wanted.exp() * (wanted - logits.log_softmax(-1))).sum(-1).mean()
        return float(nats) / (len(own) - 1)

    @functools.cached_property
    def _of_full(self) -> list[Tensor]:
        return self._predictions("full", "full")

    def _predictions(self, policy: str, sized: str) -> list[Tensor]:
        """Logits before each token after the prompts, [B, V] fp32 each."""
        new = self.ids.shape[1] - self.prompt
        steps = new - 1  # nothing is predicted behind the last token
        pieces = self.ids[:, : self.prompt + steps].split([self.prompt] + [1] * steps, 1)
        trace = run(self.model, policy, pieces, sized, prompt=self.prompt, new=new)
        return [logits.float() for logits in trace.logits]
