"""Our side: kvpolicy in the running environment."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

import kvpolicy
from kvpolicy.hf.adapters import KVPressScorer
from kvpolicy.hf.cache_names import cache_argument
from kvpolicy_eval.common.conversation import run
from kvpolicy_eval.peers.side import NOT_INSTALLED, Answer, Side, serve, storage_bytes
from kvpolicy_eval.peers.stock import QUANTIZERS, is_quantized, stock_cache


class KeyNorm:
    """Keeps keys of small norm: the formula of Knorm (arXiv:2406.11430), as a scorer of kvpress."""

    def score(self, module: Any, hidden_states: Any, keys: Tensor, values: Any, attentions: Any, kwargs: Any) -> Tensor:
        """Negative norm of each key, [B, H, N]."""
        return -keys.float().norm(dim=-1)


class MeanAttention:
    """Keeps tokens with the highest mean attention: H2O's sums over the number of queries that attend to a token."""

    def score(self, module: Any, hidden_states: Any, keys: Tensor, values: Any, attentions: Any, kwargs: Any) -> Tensor:
        """Mean of each column of the attention matrix below the diagonal, [B, H, N]."""
        queries = torch.arange(keys.shape[2], 0, -1)
        return (attentions.sum(2) / queries).unflatten(1, (keys.shape[1], -1)).mean(2)


SCORERS = {"knorm": KVPressScorer(KeyNorm()), "averaged": KVPressScorer(MeanAttention(), attentions=True)}
"""Methods that kvpolicy has no selector for, by name."""


def policy_of(method: str, budget: int | float | str | None = None) -> kvpolicy.Policy:
    """A policy from its spec, or from the name of a scorer."""
    if method in SCORERS:
        return kvpolicy.Policy(selector=SCORERS[method], budget=0.5 if budget is None else budget)
    return kvpolicy.Policy.parse(method if budget is None or method == "full" else f"{method}@{budget}")


class Ours(Side):
    """kvpolicy."""

    packages = ("torch", "transformers", *QUANTIZERS.values())

    def versions(self) -> Answer:
        """Versions of what is installed, with that of kvpolicy even if it is not."""
        found = super().versions()
        return {"kvpolicy": kvpolicy.__version__} | {k: v for k, v in found.items() if v != NOT_INSTALLED}

    def kept(self, ids: list[list[int]], method: str, keep: int) -> Answer:
        """Kept positions of a prompt, by layer and KV head."""
        cache = run(self.model, policy_of(method, keep), [torch.tensor(ids)]).cache
        return {"kept": [[_occupied(head) for head in layer.positions[0]] for layer in cache.policy_layers]}

    def answer(self, ids: list[list[int]], method: str, limit: int | None, new: int, after: int = 0) -> Answer:
        """Answer to a prompt.

        Args:
            ids: Token ids, one row.
            method: Spec of the policy.
            limit: Bytes of the cache after the answer; None for the spec's budget.
            new: Tokens of the answer.
            after: Tokens at the end of the prompt that are fed after the others have been compressed.

        Returns:
            The tokens, the bytes that the cache reports, and the bytes of its storages.
        """
        tokens = torch.tensor(ids)
        policy = policy_of(method, None if limit is None else f"{limit}B")
        with kvpolicy.attach(self.model, policy):
            cache = kvpolicy.PolicyCache(self.model, prompt=tokens.shape[1] - after, new=new + after)
            if after:
                self.model(tokens[:, :-after], **cache_argument(self.model, cache), logits_to_keep=1)
            out = self.greedy(tokens, new, cache)
        return {"ids": out, "held": cache.nbytes, "walked": storage_bytes(list(cache.policy_layers))}

    def time(self, method: str, length: int, share: float, steps: int) -> Answer:
        """Times of a prompt and of the decode steps after it."""
        if method == "full":
            return self.timed(length, steps, lambda: stock_cache(self.model.config), _stock_bytes)
        with kvpolicy.attach(self.model, policy_of(method, share)):
            return self.timed(
                length, steps, lambda: kvpolicy.PolicyCache(self.model, new=steps), lambda cache: cache.nbytes
            )

    def under(self, method: str, share: float) -> AbstractContextManager[Any]:
        """Context manager that applies a method, which keeps a share of the prompt, to the model."""
        return kvpolicy.attach(self.model, policy_of(method, share))

    @contextmanager
    def generating(self, method: str, share: float | None, prompt: int, new: int) -> Generator[Any]:
        """A cache for one call of `generate`: of transformers, or of a policy that is attached for the call."""
        if not method or is_quantized(method):
            yield stock_cache(self.model.config, method)
            return
        with kvpolicy.attach(self.model, policy_of(method, share)):
            yield kvpolicy.PolicyCache(self.model, prompt=prompt, new=new)

    def _trap_sinks(self, ids: list[int], steps: int, keep: int) -> Answer:
        pieces = [torch.tensor([ids]), *(torch.tensor([[step % 500 + 3]]) for step in range(steps))]
        cache = run(self.model, policy_of("streaming:sinks=4", keep), pieces).cache
        heads = [_occupied(head) for layer in cache.policy_layers for head in layer.positions[0]]
        kept = [sum(sink in positions for sink in range(4)) for positions in heads]
        return {"value": min(kept), "of": 4, "held": cache.policy_layers[0].positions.shape[-1]}

    def _trap_chunks(self, ids: list[int], chunk: int, method: str) -> Answer:
        pieces = torch.tensor([ids]).split(chunk, 1)
        cache = run(self.model, policy_of(method, 0.5), pieces, prompt=len(ids)).cache
        return {"value": int((cache.policy_layers[0].positions[0, 0] >= 0).sum()), "of": len(ids) // 2}

    def _trap_two(self, first: list[int], second: list[int], method: str) -> Answer:
        one = torch.tensor([[5]])
        with kvpolicy.attach(self.model, policy_of(method, 0.5)):
            alone = kvpolicy.PolicyCache(self.model)
            other = kvpolicy.PolicyCache(self.model)
            self.model(torch.tensor([first]), **cache_argument(self.model, alone))
            expected = self.model(one, **cache_argument(self.model, alone)).logits
            interrupted = kvpolicy.PolicyCache(self.model)
            self.model(torch.tensor([first]), **cache_argument(self.model, interrupted))
            self.model(torch.tensor([second]), **cache_argument(self.model, other))
            logits = self.model(one, **cache_argument(self.model, interrupted)).logits
        return {"value": float((logits - expected).abs().max())}

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
            return {"value": "refused", "error_message": str(error), "of": len(ids) // 2}
        return {"value": held, "of": len(ids) // 2}

    def _trap_bytes(self, ids: list[int], method: str) -> Answer:
        cache = run(self.model, policy_of(method, 0.5), [torch.tensor([ids])], prompt=len(ids), new=0).cache
        return {"value": storage_bytes(list(cache.policy_layers)) / cache.full_nbytes}


def _occupied(head: Tensor) -> list[int]:
    """Positions in the occupied slots of a head."""
    return sorted(position for position in head.tolist() if position >= 0)


def _stock_bytes(cache: Any) -> int:
    return storage_bytes(list(cache.layers))


if __name__ == "__main__":
    serve(Ours())
