"""A walk whose steps run compiled, many of them, beside a history of uncompiled ones."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvpolicy import PolicyCache
from tests.conformance.access import kept_positions
from tests.walks.life import Life, Operation, again
from tests.walks.walk import Walk


class CompiledWalk(Walk):
    """Does to caches what a `Walk` does, with two of three steps through the compiled model.

    Their history is of uncompiled steps, so that both are compared. How many free slots a cache has may differ: `tick`
    adds them before they are needed. An inference tensor cannot be written by a compiled step outside of its mode. A
    compiled step must have a token in every row if layers have states.

    Attributes:
        compiled: How many steps were compiled.
    """

    def __init__(self, seed: int, folder: Path) -> None:
        super().__init__(seed, folder, dtypes=[torch.float32])
        self._acting.modes = [torch.no_grad]
        self._step = torch.compile(self._model, backend="eager")
        self.compiled = 0

    def _run(self, ids: Tensor, mask: Tensor, start: int, model: Any = None) -> Operation:
        uncompiled = super()._run(ids, mask, start)
        idle = self._has_states and not bool(mask[:, -1].all())
        if not start or ids.shape[1] > start + 1 or idle or self._dice.random() < 0.33:
            return uncompiled
        return _Both(uncompiled, super()._run(ids, mask, start, self._step))

    def _do(self, life: Life, words: str, operation: Operation) -> bool:
        if not isinstance(operation, _Both):
            return super()._do(life, words, operation)
        done, out = self._acting.attempt(life, f"{words}, compiled", operation.compiled)
        if done:
            life.cache.tick()
            life.history.append(operation.uncompiled)
            life.logits = out
            self.compiled += 1
        return done

    def _check_again(self, life: Life) -> None:
        """The same operations, all uncompiled, on a new cache lead to the same tokens and logits."""
        twin, out = again(self._new() if life.start is None else life.start.fork(), life.history)
        assert life.cache.is_initialized == twin.is_initialized
        if not twin.is_initialized:
            return
        for mine, others in zip(life.cache.policy_layers, twin.policy_layers, strict=True):
            assert kept_positions(mine) == kept_positions(others), f"layer {mine.layer_idx} of {life.name}"
            assert mine.length.tolist() == others.length.tolist()
        ours, theirs = life.cache.mask_digest, twin.mask_digest
        assert ours is not None and theirs is not None and torch.equal(ours, theirs)
        if life.logits is not None and out is not None:
            torch.testing.assert_close(life.logits, out, atol=1e-3, rtol=1e-3)


@dataclass
class _Both:
    """A step, uncompiled and compiled."""

    uncompiled: Operation
    compiled: Operation

    def __call__(self, cache: PolicyCache) -> Any:
        return self.uncompiled(cache)
