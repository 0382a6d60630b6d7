"""A paged store of a few rows beside the slow version of each row, token by token."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from kvpolicy.allocators.duo import DuoAttention
from kvpolicy.allocators.head_files import HEAD_FILES
from kvpolicy.engine.invariants import check_invariants
from kvpolicy.engine.layer_spec import LayerSpec
from kvpolicy.engine.layer_store import LayerStore
from kvpolicy.engine.pages import row_pages
from kvpolicy.engine.row_limits import RowBudget
from kvpolicy.policy import Policy
from kvpolicy.statistics.windows import ScoreTransform
from tests.conformance.extremes import concentrate
from tests.conformance.replay import reference_codec, reference_merger, reference_selector
from tests.reference.engine import ReferenceLayer

HEADS = 3
GROUP = 2
DIM = 4
SCALE = 0.5
SELECTORS = ["h2o", "h2o:recent=0.9", "snapkv:window=6:kernel=3", "window"]
LOOKING = ["expected:sinks=2:horizon=6:decode=grow", "expected:sinks=2:horizon=6:decode=grow:moments=prompt"]
"""What looks at keys, and must not evict while decoding."""


Tokens = tuple[Tensor, Tensor, Tensor]
"""Queries, keys and values."""

GAP = 3e-6
"""Relative gap below which fp32 may order two scores in another way than fp64."""


class NearTie(Exception):
    """Kept tokens differ after scores so close that rounding decides between them: nothing can be compared any more."""


class Run:
    """A paged store of a few rows, and the slow version of each row."""

    def __init__(
        self,
        selector: str,
        heads: Any,
        budgets: list[int],
        *,
        grows: bool = False,
        last: int = 1000,
        codec: str = "plain",
        dim: int = DIM,
        merger: str = "drop",
        **transform: Any,
    ) -> None:
        policy = Policy.parse(f"{selector}+{merger}+{codec}@0.5")
        mode = "grow" if grows else "evict"
        self.store = LayerStore(LayerSpec(0, policy.selector, policy.codec, mode, policy.merger, heads=heads))
        slow = (type(heads).__name__.lower(), {"safeguard": getattr(heads, "safeguard", 0)})
        if isinstance(heads, DuoAttention):
            sizes = {"sparsity": heads.sparsity, "sinks": heads.sinks, "recent": heads.recent}
            slow = ("duo", {"scores": HEAD_FILES.load(heads.file).heads, "layer": 0, **sizes})
        self.rows = [
            ReferenceLayer(
                reference_selector(policy.selector),
                budget,
                num_heads=HEADS * GROUP,
                num_kv_heads=HEADS,
                decode="grow" if grows else "evict",
                heads=slow,
                codec=reference_codec(policy.codec),
                capacity=10**6,
                merger=None if merger == "drop" else reference_merger(policy.merger),
            )
            for budget in budgets
        ]
        self.budgets = budgets
        self.dim = dim
        self.grows = grows
        self.last = last
        self.transform = transform
        self.dice = torch.Generator().manual_seed(sum(budgets))

    def draw(self, count: int, sharp: float = 3.0, extreme: str = "random", place: int = 0) -> Tokens:
        """Queries, keys and values of so many tokens; heads attend to few or to many of them, or see `concentrate`."""
        shapes = [(len(self.rows), heads, count, self.dim) for heads in (HEADS * GROUP, HEADS, HEADS)]
        q, k, v = (torch.randn(*shape, generator=self.dice) for shape in shapes)
        q = q * torch.linspace(0.1, sharp, HEADS * GROUP)[:, None, None]
        return *concentrate(q, k, extreme, place), v

    def prompt(self, lengths: list[int], data: Tokens | None = None, extra: int = 0) -> None:
        """A prompt or chunk, padded on the left to the longest row."""
        count = max(lengths)
        q, k, v = data or self.draw(count)
        valid = torch.arange(count) >= count - torch.tensor(lengths)[:, None]
        if not self.store.is_initialized:
            self.store.initialize(k, group=GROUP)
        transform = ScoreTransform(SCALE, **self.transform)
        out, pending = self.store.attend_prompt(q, k, v, None if bool(valid.all()) else valid, transform)
        seen = torch.tensor([row.length for row in self.rows]) + torch.tensor(lengths)
        last = seen if self.grows else torch.maximum(seen, torch.tensor(self.last))
        keep = torch.tensor(self.budgets)
        more = torch.full_like(keep, extra)
        self.store.compress(pending, RowBudget(keep, more, torch.minimum(keep + more, last + more), last))
        self.store.ensure_capacity()
        size = row_pages(keep, more, last, HEADS).size
        for b, (row, length) in enumerate(zip(self.rows, lengths, strict=True)):
            if not length:
                continue
            own = slice(count - length, None)
            tail = -(-extra // int(size[b])) * int(size[b])
            found = row.forward(
                q[b, :, own],
                k[b, :, own],
                v[b, :, own],
                SCALE,
                self.budgets[b],
                step=False,
                last=int(last[b]),
                tail=tail,
                **self.transform,
            )
            torch.testing.assert_close(out[b, :, own], found.float(), atol=1e-5, rtol=1e-4)
        self.check()

    def select(self, rows: list[int]) -> None:
        """Take rows, some of them more than once."""
        index = torch.tensor(rows)
        self.store.map_rows(lambda t: t[index])
        self.rows = [copy.deepcopy(self.rows[row]) for row in rows]
        self.budgets = [self.budgets[row] for row in rows]
        self.check()

    def step(self, data: Tokens | None = None, valid: list[bool] | None = None) -> None:
        q, k, v = data or self.draw(1)
        mask = None if valid is None else torch.tensor(valid)[:, None]
        out = self.store.append(q, k, v, mask, ScoreTransform(SCALE, **self.transform))
        self.store.count_step()
        self.store.ensure_capacity()
        for b, row in enumerate(self.rows):
            if valid is None or valid[b]:
                found = row.forward(q[b], k[b], v[b], SCALE, **self.transform)
                torch.testing.assert_close(out[b], found.float(), atol=1e-5, rtol=1e-4)
        self.check()

    def steps(self, count: int) -> None:
        """Steps in which every row has a token."""
        for _ in range(count):
            self.step()

    def check(self) -> None:
        check_invariants(self.store)
        held = self.store.geometry.head_positions()
        for b, row in enumerate(self.rows):
            kept = [sorted(p for p in head if p >= 0) for head in held[b].tolist()]
            if kept != row.positions and 0 < row.margin < GAP:
                raise NearTie
            assert kept == row.positions
            assert self.store.geometry.tokens_by_head()[b].tolist() == [len(head) for head in row.positions]
        self.check_counts()

    def check_counts(self) -> None:
        """Every slot stands for as many tokens as in the slow version."""
        past = self.store.past()
        if past is None or past.counts is None:
            return
        positions = self.store.geometry.held_slots()[0]
        for b, row in enumerate(self.rows):
            for h, head in enumerate(row.heads):
                pairs = zip(positions[b, h].tolist(), past.counts[b, h].exp().tolist(), strict=True)
                found = {position: count for position, count in pairs if position >= 0}
                expected = pytest.approx({token.position: token.count for token in head.tokens}, rel=1e-4)
                if found != expected and 0 < row.margin < GAP:  # another slot takes the evicted tokens in
                    raise NearTie
                assert found == expected
