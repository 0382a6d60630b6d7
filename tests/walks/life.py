"""A cache with all that was done to it, so that it can be done again."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvpolicy import KVPolicyError, PolicyCache
from kvpolicy.engine.invariants import check_invariants
from kvpolicy.hf.layer import PolicyLayer
from tests.engine.live import leaves_of, stored_bytes, tensors_of

Operation = Callable[[PolicyCache], "Tensor | PolicyCache | None"]
"""Something that is done to a cache: it returns logits or tokens, or another cache that takes its place."""

NO_TOKENS = torch.zeros(0, 0, dtype=torch.int64)


def again(cache: PolicyCache, operations: list[Operation]) -> tuple[PolicyCache, Tensor | None]:
    """Do operations in order; returns the cache behind them and what the last one returned."""
    out = None
    with torch.no_grad():
        for operation in operations:
            out = operation(cache)
            if isinstance(out, PolicyCache):
                cache = out
                out = None
    return cache, out


@dataclass
class Row:
    """What one row was told.

    Attributes:
        history: The same operations on a cache of this row alone.
        comparable: Whether a cache of its own is told the same. A row whose chunk is one token beside longer ones is
            not: alone, it is a decode step.
        begun: Whether it has tokens.
    """

    history: list[Operation] = field(default_factory=list)
    comparable: bool = True
    begun: bool = False

    def copy(self) -> Row:
        """A row with the same past and a future of its own."""
        return Row(list(self.history), self.comparable, self.begun)


@dataclass
class Life:
    """A cache and its past.

    Attributes:
        name: What notes call it.
        cache: The cache.
        start: The cache that the history begins with; None: a new one.
        history: What was done to it since.
        ids: The tokens that it has seen, [B, N], padded.
        mask: Which of them are tokens, [B, N].
        rows: Its rows.
        logits: What the last operation returned.
        shares: Whether its rows share the tokens of another cache.
        broken: Whether a forward was refused in the middle, so that only `reset` is left.
        ended: Whether nothing more is done to it.
        marked: Whether steps may be taken back.
        has_gap: Whether its end moved behind its newest tokens, which heads then need not hold.
    """

    name: str
    cache: PolicyCache
    start: PolicyCache | None = None
    history: list[Operation] = field(default_factory=list)
    ids: Tensor = NO_TOKENS
    mask: Tensor = NO_TOKENS
    rows: list[Row] = field(default_factory=list)
    logits: Tensor | None = None
    shares: bool = False
    broken: bool = False
    ended: bool = False
    marked: bool = False
    has_gap: bool = False

    def child(self, name: str, cache: PolicyCache) -> Life:
        """The life of a copy of the cache."""
        rows = [row.copy() for row in self.rows]
        past = (self.start, list(self.history), self.ids, self.mask, rows, self.logits)
        return Life(name, cache, *past, shares=self.shares, has_gap=self.has_gap)

    def take(self, rows: list[int]) -> None:
        """Follow a choice of the cache's rows."""
        self.ids = self.ids[rows]
        self.mask = self.mask[rows]
        self.rows = [self.rows[row].copy() for row in rows]
        self.logits = None

    def tell_rows(self, operation: Operation) -> None:
        """Note an operation that every row alone would be told, too."""
        for row in self.rows:
            row.history.append(operation)

    def not_comparable(self) -> None:
        """Note that caches of single rows can no longer be told the same."""
        for row in self.rows:
            row.comparable = False

    def begin_anew(self) -> None:
        """Forget the history: the next one starts from the cache as it is."""
        self.start = copy.deepcopy(self.cache)
        self.history = []
        self.logits = None


def state_of(cache: PolicyCache) -> dict[str, Any]:
    """All that a cache can reach and that may change; tensors by their shape, their dtype and a hash."""
    # But for what transformers notes of a cache that a user made.
    leaves = ((path, leaf) for path, leaf in leaves_of(cache) if not path.endswith("._is_user_defined"))
    return {path: _hashed(leaf) if isinstance(leaf, Tensor) else leaf for path, leaf in leaves}


def _hashed(tensor: Tensor) -> tuple[Any, ...]:
    flat = tensor.detach().flatten()
    data = flat.new_empty(flat.shape).copy_(flat).view(torch.uint8)  # with the stride that a view needs
    return tuple(tensor.shape), tensor.dtype, hash(data.numpy().tobytes())


def changes(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """What differs between two states, in words."""
    names = [*before, *(name for name in after if name not in before)]
    missing = object()
    found = [name for name in names if before.get(name, missing) != after.get(name, missing)]
    return [f"{name}: {before.get(name)} -> {after.get(name)}" for name in found]


def check_sentence(error: KVPolicyError) -> None:
    """A refusal is one sentence."""
    text = str(error)
    assert text.endswith(".") and ". " not in text and "\n" not in text, text


def check_cache(life: Life) -> None:
    """The stores keep their invariants, and the cache knows its bytes."""
    cache = life.cache
    for layer in cache.policy_layers:
        check_invariants(layer.store, keeps_newest=not life.has_gap)
    if not cache.is_initialized:
        return
    report = cache.report()
    assert str(report) and repr(cache)
    assert report.nbytes == cache.nbytes
    if life.shares:
        return  # what rows share is counted once, and reached from each
    stored = stored_bytes(cache) + sum(max(t.nbytes - t.untyped_storage().nbytes(), 0) for _, t in tensors_of(cache))
    # On no account: which row of the host is where, cosines between the chunks of a prompt, and what the rotary
    # embedding of the model remembers.
    beside = (".row_pages.", ".budgets.measured.sums.", ".key_rope._found_planes.")
    stored -= sum(t.nbytes for name, t in tensors_of(cache) if any(part in name for part in beside))
    stored -= sum(t.nbytes for name, t in tensors_of(cache) if name.endswith("rows.on_device"))
    # A sliding layer of transformers has a place for the next token.
    stock: list[Any] = [layer for layer in cache.layers if not isinstance(layer, PolicyLayer)]
    sliding = [layer for layer in stock if getattr(layer, "keys", None) is not None and layer.keys.dim() == 4]
    spare = sum(layer.keys[:, :, :1].nbytes + layer.values[:, :, :1].nbytes for layer in sliding)
    assert cache.nbytes <= stored <= cache.nbytes + spare


def same(one: Tensor, other: Tensor) -> bool:
    """Whether tensors are equal to the bit, NaN included."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(one, other) or (one.is_floating_point() and torch.equal(one.nan_to_num(), other.nan_to_num()))


def check_again(life: Life, new: Callable[[], PolicyCache]) -> None:
    """A cache to which the same is done again is the same, tensor by tensor."""
    twin, out = again(new() if life.start is None else copy.deepcopy(life.start), life.history)
    mine = dict(tensors_of(life.cache))
    others = dict(tensors_of(twin))
    assert mine.keys() == others.keys(), sorted(mine.keys() ^ others.keys())
    found = [name for name, tensor in mine.items() if not same(tensor, others[name])]
    assert found == [], found
    assert life.cache.nbytes == twin.nbytes
    assert _stable(life.cache) == _stable(twin)
    if life.logits is not None and out is not None:
        assert same(life.logits, out)


def _stable(cache: PolicyCache) -> list[str]:
    """The report, without what depends on the time."""
    return [line for line in str(cache.report()).splitlines() if "a decode step" not in line]
