"""Our side: kvpolicy in the environment at hand."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

import kvpolicy
from kvpolicy.hf.adapters import KVPressScorer
from kvpolicy_eval.peers.side import Answer, Side, serve, storage_bytes


class KeyNorm:
    """Keys of small norm are kept: the formula of Knorm (arXiv:2406.11430), as a scorer."""

    def score(self, module: Any, hidden_states: Any, keys: Tensor, values: Any, attentions: Any, kwargs: Any) -> Tensor:
        """The negative norm of each key, [B, H, N]."""
        return -keys.float().norm(dim=-1)


class Averaged:
    """Keep what is attended to most by the queries that can see it: H2O's sums over their number."""

    def score(self, module: Any, hidden_states: Any, keys: Tensor, values: Any, attentions: Any, kwargs: Any) -> Tensor:
        """The mean of each column of the attention matrix, [B, H, N]."""
        queries = torch.arange(keys.shape[2], 0, -1)
        return (attentions.sum(2) / queries).unflatten(1, (keys.shape[1], -1)).mean(2)


SCORERS = {"knorm": KVPressScorer(KeyNorm()), "averaged": KVPressScorer(Averaged(), attentions=True)}
"""Methods that are no selectors of ours."""


def policy_of(words: str, budget: int | float | str | None = None) -> kvpolicy.Policy:
    """A policy from its words, or of one of the scorers above."""
    if words in SCORERS:
        return kvpolicy.Policy(selector=SCORERS[words], budget=0.5 if budget is None else budget)
    return kvpolicy.Policy.parse(words if budget is None or words == "full" else f"{words}@{budget}")


class Ours(Side):
    """kvpolicy."""

    packages = ("torch", "transformers")

    def versions(self) -> Answer:
        """Versions, and this package's own where it is not installed."""
        return {"kvpolicy": kvpolicy.__version__} | super().versions()

    def kept(self, ids: list[list[int]], method: str, keep: int) -> Answer:
        """Positions kept of a prompt, by layer and head."""
        with kvpolicy.attach(self.model, policy_of(method, keep)):
            cache = kvpolicy.PolicyCache(self.model)
            self.model(torch.tensor(ids), past_key_values=cache, logits_to_keep=1)
        return {"kept": [[_places(head) for head in layer.positions[0]] for layer in cache.policy_layers]}

    def answer(self, ids: list[list[int]], method: str, limit: int | None, new: int, after: int = 0) -> Answer:
        """Greedy tokens after a prompt, under a limit of bytes at the end, or the method as it is.

        The last `after` tokens of the prompt are read once the others are compressed.
        """
        tokens = torch.tensor(ids)
        policy = policy_of(method, None if limit is None else f"{limit}B")
        with kvpolicy.attach(self.model, policy):
            cache = kvpolicy.PolicyCache(self.model, prompt=tokens.shape[1] - after, new=new + after)
            if after:
                self.model(tokens[:, :-after], past_key_values=cache, logits_to_keep=1)
            out = self.greedy(tokens, new, cache)
        return {"ids": out, "held": cache.nbytes, "walked": storage_bytes(list(cache.policy_layers))}

    def time(self, method: str, length: int, share: float, steps: int) -> Answer:
        """Times of a prompt and of the steps after it."""
        if method == "full":
            from transformers import DynamicCache

            return self.timed(length, steps, lambda: DynamicCache(config=self.model.config), _stock_bytes)
        with kvpolicy.attach(self.model, policy_of(method, share)):
            return self.timed(
                length, steps, lambda: kvpolicy.PolicyCache(self.model, new=steps), lambda cache: cache.nbytes
            )

    def under(self, method: str, share: float) -> AbstractContextManager[Any]:
        """The model under a method that keeps a share of the prompt."""
        return kvpolicy.attach(self.model, policy_of(method, share))

    def _trap_sinks(self, ids: list[int], steps: int, keep: int) -> Answer:
        with kvpolicy.attach(self.model, policy_of("streaming:sinks=4", keep)):
            cache = kvpolicy.PolicyCache(self.model)
            self.model(torch.tensor([ids]), past_key_values=cache)
            for step in range(steps):
                self.model(torch.tensor([[step % 500 + 3]]), past_key_values=cache)
        alive = [
            sum(p in _places(head) for p in range(4)) for layer in cache.policy_layers for head in layer.positions[0]
        ]
        return {"value": min(alive), "of": 4, "held": cache.policy_layers[0].positions.shape[-1]}

    def _trap_chunks(self, ids: list[int], chunk: int, method: str) -> Answer:
        row = torch.tensor([ids])
        with kvpolicy.attach(self.model, policy_of(method, 0.5)):
            cache = kvpolicy.PolicyCache(self.model, prompt=len(ids))
            for start in range(0, len(ids), chunk):
                self.model(row[:, start : start + chunk], past_key_values=cache)
        return {"value": int((cache.policy_layers[0].positions[0, 0] >= 0).sum()), "of": len(ids) // 2}

    def _trap_two(self, first: list[int], second: list[int], method: str) -> Answer:
        one = torch.tensor([[5]])
        with kvpolicy.attach(self.model, policy_of(method, 0.5)):
            alone, other = kvpolicy.PolicyCache(self.model), kvpolicy.PolicyCache(self.model)
            self.model(torch.tensor([first]), past_key_values=alone)
            wanted = self.model(one, past_key_values=alone).logits
            again = kvpolicy.PolicyCache(self.model)
            self.model(torch.tensor([first]), past_key_values=again)
            self.model(torch.tensor([second]), past_key_values=other)
            got = self.model(one, past_key_values=again).logits
        return {"value": float((got - wanted).abs().max())}

    def _trap_compiled(self, ids: list[int], method: str) -> Answer:
        model: Any = self.fresh()
        row = torch.tensor([ids])
        compiled: Any = torch.compile(model, backend="eager")
        compiled(row)
        try:
            with kvpolicy.attach(compiled, policy_of(method, 0.5)) as handle:
                compiled(row)
                held = int((handle.cache.policy_layers[0].positions[0, 0] >= 0).sum()) if handle.cache else len(ids)
        except ValueError as error:
            return {"value": "refused", "said": str(error), "of": len(ids) // 2}
        return {"value": held, "of": len(ids) // 2}

    def _trap_bytes(self, ids: list[int], method: str) -> Answer:
        with kvpolicy.attach(self.model, policy_of(method, 0.5)):
            cache = kvpolicy.PolicyCache(self.model, prompt=len(ids), new=0)
            self.model(torch.tensor([ids]), past_key_values=cache)
        return {"value": storage_bytes(list(cache.policy_layers)) / cache.full_nbytes}


def _places(head: Tensor) -> list[int]:
    return sorted(place for place in head.tolist() if place >= 0)


def _stock_bytes(cache: Any) -> int:
    return storage_bytes(list(cache.layers))


if __name__ == "__main__":
    serve(Ours())
