"""A layer under a reader, without a model, and what its steps read."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor

from kvpolicy import Policy
from kvpolicy.engine.invariants import check_invariants
from kvpolicy.engine.layer_index import StepReads
from kvpolicy.engine.layer_spec import LayerSpec
from kvpolicy.engine.layer_store import LayerStore
from kvpolicy.engine.reading import Board
from kvpolicy.engine.row_limits import RowBudget
from kvpolicy.protocols import Read
from kvpolicy.registry import name_of
from kvpolicy.statistics.windows import ScoreTransform
from tests.engine.parts import index_of, slots_of
from tests.reference.readers import Held, estimated
from tests.reference.versions import version

DIM = 8
HEADS = 2
GROUP = 2


class Layer:
    """A layer's store, and what was read in its last step.

    Attributes:
        store: The store.
        read: What the last step chose; None if it read everything.
    """

    def __init__(
        self,
        policy: str,
        budgets: list[int],
        *,
        new: int = 0,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        layer_idx: int = 0,
        board: Board | None = None,
    ) -> None:
        self.policy = Policy.parse(policy)
        parts = self.policy
        self.store = LayerStore(
            LayerSpec(layer_idx, parts.selector, parts.codec, parts.decode, parts.merger, parts.reader)
        )
        index_of(self.store).board = board
        self.budgets = budgets
        self.new = new
        self.transform = ScoreTransform(DIM**-0.5, softcap, sinks)
        self.read: Read | None = None
        self.steps = 0
        self.fitted: list[list[Any]] = []

    def prompt(self, q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None = None) -> Tensor:
        """Take in a prompt."""
        if not self.store.is_initialized:
            self.store.initialize(k)
        out, pending = self.store.attend_prompt(q, k, v, valid, self.transform)
        keep = torch.tensor(self.budgets)
        extra = torch.full_like(keep, self.new if self.policy.decode == "grow" else 0)
        self.store.compress(pending, RowBudget(keep, extra, keep + extra))
        check_invariants(self.store, keeps_newest=False)
        self._fit()
        return out

    def _fit(self) -> None:
        """Let the slow version find what the reader finds in each row and head, such as clusters, if it does."""
        method = version("reader", name_of(type(self.policy.reader)))
        if not hasattr(method, "fitted"):
            return
        config = config_of(self.policy) | {"rounded": self._rounded}
        self.fitted = [
            [method.fitted(config, self.parts(row, head)) for head in range(HEADS)] for row in range(len(self.budgets))
        ]

    def _rounded(self, vector: Any) -> Any:
        """A vector in the dtype of the keys."""
        return torch.tensor(vector, dtype=torch.float64).to(self.store.tensors.keys.dtype).double().tolist()

    def config(self, row: int, head: int) -> dict[str, Any]:
        """The parameters of the slow version of the reader, for a head."""
        found = {"fitted": self.fitted[row][head], "rounded": self._rounded} if self.fitted else {}
        return config_of(self.policy) | found

    def step(self, q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None = None) -> Tensor:
        """Take in one token, and note what was read for it."""
        reads: Any = slots_of(self.store).reads

        def note(*given: Any) -> Read:
            chosen = StepReads._choose(reads, *given)
            self.read = chosen
            return chosen

        def note_followed(*given: Any) -> Read:
            chosen = StepReads._follow(reads, *given)
            self.read = chosen
            return chosen

        self.read = None
        reads._choose = note
        reads._follow = note_followed
        out = self.store.append(q, k, v, valid, self.transform)
        del reads._choose, reads._follow
        return out

    def between(self) -> None:
        """What the owner does between steps."""
        self.steps += 1
        if self.fitted and self.steps % config_of(self.policy)["rebuild"] == 0:
            self._fit()  # before blocks are demoted
        self.store.count_step()
        self.store.ensure_capacity()
        check_invariants(self.store, keeps_newest=False)

    def positions_read(self, row: int, head: int) -> set[int]:
        """The positions that the last step chose, without a codec's full-precision buffer."""
        positions = self.store.tensors.positions[row, head]
        if self.read is None:
            return set(positions[positions >= 0].tolist())
        slots = self.read.slots[row, head][self.read.chosen[row, head]]
        found = positions[slots]
        return set(found[found >= 0].tolist())

    def parts(self, row: int, head: int) -> list[list[Held | None]]:
        """The slots that are divided into entries, for the slow version."""
        past = self.store.past()
        assert past is not None
        layout = self.store.layout
        ranges = [(0, layout.exact)]
        if sum(layout.coded):
            ranges = [(a, a + n) for a, n in zip(layout.starts(), layout.coded, strict=True) if n]
        keys: list[list[float]] = past.keys[row, head].double().tolist()
        values: list[list[float]] = past.values[row, head].double().tolist()
        held: list[int] = self.store.tensors.positions[row, head].tolist()
        counts: list[float] = counts_of(self.store)[row, head].tolist()
        return [
            [Held(held[s], keys[s], counts[s], values[s]) if held[s] >= 0 else None for s in range(a, b)]
            for a, b in ranges
        ]

    def read_keys(self, row: int, head: int, positions: list[int], keys: Tensor) -> Tensor:
        """The stored keys [n, D] of tokens as the last step read them; see the slow version."""
        method = version("reader", name_of(type(self.policy.reader)))
        if self.read is None or not hasattr(method, "read_key"):
            return keys
        config = self.config(row, head)
        length = int(self.store.tensors.length[row])
        tokens = [Held(position, key) for position, key in zip(positions, keys.tolist(), strict=True)]
        return torch.tensor([method.read_key(config, token, length) for token in tokens], dtype=torch.float64)

    def estimated(self, row: int, head: int, q: Tensor, read: set[int]) -> list[list[tuple[float, list[float]]]]:
        """What stands for the tokens that the last step did not read, of each query head; see the slow version."""
        name = name_of(type(self.policy.reader))
        if self.read is None or name == "reuse":
            return [[] for _ in range(GROUP)]
        found: Any = estimated(
            name,
            self.config(row, head),
            self.parts(row, head),
            q[row, head * GROUP : (head + 1) * GROUP, 0].double().tolist(),
            read,
            scale=self.transform.scale,
            softcap=self.transform.softcap,
            group_size=self.policy.codec.traits.group_size,
        )
        return found


def config_of(policy: Policy) -> dict[str, Any]:
    """The parameters of the reader of a policy."""
    return {field.name: getattr(policy.reader, field.name) for field in dataclasses.fields(policy.reader)}  # pyright: ignore[reportArgumentType]


def counts_of(store: LayerStore) -> Tensor:
    """Logarithm of the number of tokens that each slot stands for, [B, H, S] fp64."""
    return (
        torch.zeros(store.tensors.positions.shape).double()
        if store.tensors.log_counts is None
        else store.tensors.log_counts.double()
    )


def draw(n: int, seed: int, *, batch: int = 1, sharp: float = 2.0) -> tuple[Tensor, Tensor, Tensor]:
    """Random q, k and v of n tokens."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(batch, h, n, DIM, generator=generator) for h in (HEADS * GROUP, HEADS, HEADS))
    return q * sharp, k, v


def slow_output(layer: Layer, q: Tensor, chosen: list[list[set[int]]]) -> Tensor:
    """Attention of one query per head to the given positions of each row and head, and to a full-precision buffer."""
    past = layer.store.past()
    assert past is not None
    out = torch.zeros_like(q, dtype=torch.float64)
    exact = layer.store.layout.exact if sum(layer.store.layout.coded) else 0
    for row, heads in enumerate(chosen):
        for head, positions in enumerate(heads):
            held = layer.store.tensors.positions[row, head].tolist()
            slots = [s for s, p in enumerate(held) if p >= 0 and (s < exact or p in positions)]
            keys, values = (t[row, head, slots].double() for t in (past.keys, past.values))
            keys = layer.read_keys(row, head, [held[slot] for slot in slots], keys)
            others = layer.estimated(row, head, q, positions)
            for member in range(GROUP):
                query = q[row, head * GROUP + member, 0].double()
                score = keys @ query * layer.transform.scale
                if layer.transform.softcap is not None:
                    score = torch.tanh(score / layer.transform.softcap) * layer.transform.softcap
                weights = (score + counts_of(layer.store)[row, head, slots]).exp()
                rest = [(math.exp(number), value) for number, value in others[member]]
                total = weights.sum() + sum(weight for weight, _ in rest)
                if layer.transform.sinks is not None:
                    total = total + layer.transform.sinks[head * GROUP + member].double().exp()
                out[row, head * GROUP + member, 0] = (weights / total) @ values
                for weight, value in rest:
                    out[row, head * GROUP + member, 0] += weight / total * torch.tensor(value, dtype=torch.float64)
    return out
