"""Rows that share the slots of a prefix, against attention in fp64 over the tokens of each row, one after another."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

import kvpolicy
from kvpolicy import KVPolicyError, Policy, PolicyCache
from kvpolicy.engine.invariants import check_invariants
from kvpolicy.engine.layer_store import LayerStore
from kvpolicy.engine.link import Link
from kvpolicy.engine.row_limits import RowBudget
from kvpolicy.engine.shared_prefix import SharedPrefix
from kvpolicy.planning.memory import layer_spec
from kvpolicy.statistics.windows import ScoreTransform
from kvpolicy.text.errors import KVPolicyStateError
from tests.conformance.models import build
from tests.conformance.play import forward
from tests.engine.filled import prompted
from tests.engine.parts import generator
from tests.engine.test_shared_fork import TEXT, conversation, go_on, read_text
from tests.sampling import each_once, product

HEADS = 2
GROUP = 2
DIM = 8
PROMPT = 40
KEPT = 24

PREFIXES = {
    "every token": ("full", 0),
    "evicted": ("snapkv:window=4@0.6", 0),
    "with empty slots": ("snapkv:window=4:decode=grow@0.6", 7),
    "codes": ("h2o+kivi:bits=4:group_size=4:residual_length=4@0.6", 0),
    "codes of each token": ("full+tokenwise", 3),
    "merged": ("snapkv:window=4+merge:least=-1.0@0.6", 0),
    "head budgets": ("uniform/adakv+snapkv:window=4@0.6", 0),
    "codes with head budgets": ("uniform/adakv+snapkv:window=4+tokenwise@0.6", 0),
}
"""A policy, and slots for tokens to come."""

TRANSFORMS = {
    "plain": ScoreTransform(0.4),
    "capped": ScoreTransform(0.4, softcap=1.5),
    "sinks": ScoreTransform(0.4, sinks=torch.tensor([0.5, -1.0, 2.0, 4.0])),
    "both": ScoreTransform(0.4, softcap=1.5, sinks=torch.tensor([0.5, -1.0, 2.0, 4.0])),
}


def drawn(rows: int, count: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of so many tokens in each row."""
    dice = generator(seed)
    q, k, v = (torch.randn(rows, heads, count, DIM, generator=dice) for heads in (HEADS * GROUP, HEADS, HEADS))
    return q, k, v


def compress(store: LayerStore, pending: object, keep: Tensor, extra: int) -> None:
    more = torch.full_like(keep, extra)
    store.compress(pending, RowBudget(keep, more, keep + more, keep + more))  # pyright: ignore[reportArgumentType]
    store.ensure_capacity()


def make_prefix(name: str, transform: ScoreTransform) -> LayerStore:
    """A layer with one row, whose prompt is compressed."""
    policy, extra = PREFIXES[name]
    store = LayerStore(layer_spec(Policy.parse(policy), 0))
    q, k, v = drawn(1, PROMPT, 0)
    k[:, 1] *= 4  # so that heads divide a budget unevenly
    store.initialize(k, group=GROUP)
    _, pending = store.attend_prompt(q, k, v, None, transform)
    keep = torch.tensor([PROMPT if "full" in policy else KEPT])
    more = torch.full_like(keep, extra)
    store.compress(pending, RowBudget(keep, more, keep + more, torch.full_like(keep, PROMPT + extra)))
    held = store.geometry.tokens_by_head()[0].tolist()
    assert len({*held}) == (HEADS if "head budgets" in name else 1), "heads are padded to the longest one"
    return store


class Rows:
    """Rows behind a prefix, and a list of the own tokens of each of them.

    Args:
        prefix: The layer that holds the prefix.
        own: The policy of what rows add.
        rows: How many rows there are.
        transform: From products to attention weights.
    """

    def __init__(self, prefix: LayerStore, own: str, rows: int, transform: ScoreTransform) -> None:
        self.prefix = prefix
        self.transform = transform
        self.policy = Policy.parse(own)
        budget = self.policy.budget
        self.budget = int(budget) if isinstance(budget, int | float) else 0
        self.store = LayerStore(layer_spec(self.policy, 0))
        self.store.initialize(prefix.tensors.keys.new_empty(rows, HEADS, 0, DIM), group=GROUP)
        self.store.prefix = SharedPrefix(prefix.contents, prefix.geometry)
        self.tokens: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(rows)]

    def feed(self, count: int, seed: int, valid: Tensor | None = None) -> None:
        """Take in tokens, of which `valid` [B, count] are not padding."""
        rows = len(self.tokens)
        q, k, v = drawn(rows, count, seed)
        step = count == 1 and self.store.layout.slots > 0
        if step:
            out = self.store.append(q, k, v, valid, self.transform)
            self.store.count_step()
            self.store.ensure_capacity()
        else:
            out, pending = self.store.attend_prompt(q, k, v, valid, self.transform)
            seen = pending.lengths(self.store.tensors.length)
            grows = self.policy.decode == "grow"
            compress(self.store, pending, seen if grows else torch.full_like(seen, self.budget), 0)
        for row in range(rows):
            for column in range(count):
                if valid is None or valid[row, column]:
                    if step and self.policy.decode == "evict":  # evicts before it attends
                        self.evict(row, self.budget - 1)
                    self.tokens[row].append((k[row, :, column], v[row, :, column]))
                    want = self.attend(row, q[row, :, column])
                    torch.testing.assert_close(out[row, :, column].double(), want, atol=1e-5, rtol=1e-4)
            if self.policy.decode == "evict":
                self.evict(row, self.budget)
        self.check()

    def evict(self, row: int, most: int) -> None:
        """Drop the oldest own tokens of a row until there are at most so many."""
        self.tokens[row] = self.tokens[row][-most:] if most else []

    def attend(self, row: int, queries: Tensor) -> Tensor:
        """Outputs of the queries [Hq, D] of a row's newest token, over the prefix and its own tokens, [Hq, D] fp64."""
        past = self.prefix.past()
        assert past is not None
        out = torch.zeros(HEADS * GROUP, DIM, dtype=torch.float64)
        for number in range(HEADS * GROUP):
            head = number // GROUP
            there = past.occupied[0, head]
            own_keys, own_values = (torch.stack([pair[i][head] for pair in self.tokens[row]]) for i in (0, 1))
            keys = torch.cat([past.keys[0, head][there], own_keys]).double()
            values = torch.cat([past.values[0, head][there], own_values]).double()
            score = keys @ queries[number].double() * self.transform.scale
            if self.transform.softcap is not None:
                score = torch.tanh(score / self.transform.softcap) * self.transform.softcap
            if past.counts is not None:
                score[: int(there.sum())] += past.counts[0, head][there].double()
            sinks = self.transform.sinks
            sink = score.new_zeros(0) if sinks is None else sinks[number : number + 1].double()
            weights = torch.cat([score, sink]).softmax(0)[: len(score)]
            out[number] = weights @ values
        return out

    def select(self, rows: list[int]) -> None:
        """Take rows, in any order and any number of times."""
        self.store.map_rows(lambda t: t[torch.tensor(rows)])
        self.tokens = [list(self.tokens[row]) for row in rows]
        self.check()

    def check(self) -> None:
        check_invariants(self.store)
        check_invariants(self.prefix)
        held = (self.store.tensors.positions >= 0).sum(-1)
        assert held.tolist() == [[len(own)] * HEADS for own in self.tokens]


def random_mask(dice: Random, rows: int, count: int) -> Tensor | None:
    """Which tokens of a question are not padding, which comes first; a row may have nothing but padding."""
    if dice.random() < 0.3:
        return None
    lengths = torch.tensor([dice.randint(0, count) for _ in range(rows)])
    return torch.arange(count) >= count - lengths[:, None]


@product("name,transform", [*PREFIXES], [*TRANSFORMS], sample=each_once([*PREFIXES], [*TRANSFORMS]))
def test_rows_attend_to_the_prefix_and_to_their_own_tokens(name: str, transform: str) -> None:
    how = TRANSFORMS[transform]
    rows = Rows(make_prefix(name, how), "full", 3, how)
    rows.feed(5, 1, torch.tensor([[False, True, True, True, True], [True] * 5, [False] * 4 + [True]]))
    for seed in range(2, 6):
        rows.feed(1, seed)
    rows.feed(1, 6, torch.tensor([[True], [False], [True]]))
    rows.feed(3, 7)
    rows.feed(1, 8)


@pytest.mark.parametrize("own", ["full", "window@6", "streaming:sinks=0@6"])
@pytest.mark.parametrize("seed", range(3))
def test_a_random_walk(own: str, seed: int) -> None:
    """Questions, steps, padding and selections of rows, in any order; the first forward may be of one token."""
    dice = Random(seed)
    transform = TRANSFORMS[dice.choice([*TRANSFORMS])]
    rows = Rows(make_prefix(dice.choice([*PREFIXES]), transform), own, dice.randint(1, 3), transform)
    count = len(rows.tokens)
    rows.feed(dice.choice([1, 4]), 100 * seed)
    for number in range(1, 16):
        count = len(rows.tokens)
        turn = dice.random()
        if turn < 0.6:
            rows.feed(1, 100 * seed + number, random_mask(dice, count, 1))
        elif turn < 0.8:
            size = dice.randint(2, 9)
            rows.feed(size, 100 * seed + number, random_mask(dice, count, size))
        else:
            rows.select([dice.randrange(count) for _ in range(dice.randint(1, 4))])


def test_prompts_larger_than_a_tile_of_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries are taken a few at a time, in the order of rows, heads and tokens."""
    monkeypatch.setattr("kvpolicy.engine.shared_prefix.TILE_ELEMENTS", 1)
    rows = Rows(make_prefix("codes", TRANSFORMS["plain"]), "full", 3, TRANSFORMS["plain"])
    rows.feed(7, 1)


def test_half_precision_is_joined_in_fp32() -> None:
    """The output differs from that in fp64 by the rounding of one result, not of two parts."""
    store = LayerStore(layer_spec(Policy.parse("full"), 0))
    q, k, v = (t.bfloat16() for t in drawn(1, PROMPT, 0))
    store.initialize(k, group=GROUP)
    _, pending = store.attend_prompt(q, k, v, None, TRANSFORMS["plain"])
    compress(store, pending, torch.tensor([PROMPT]), 0)
    prefix = SharedPrefix(store.contents, store.geometry)
    part = prefix.attend_step(q[:, :, -1:], TRANSFORMS["plain"])
    assert part.output.dtype == part.normalizer.dtype == torch.float32


def test_a_step_reads_the_prefix_once_for_all_rows() -> None:
    prefix = make_prefix("codes", TRANSFORMS["plain"])
    moved = {}
    for count in (1, 5):
        rows = Rows(prefix, "full", count, TRANSFORMS["plain"])
        rows.feed(4, 1)
        rows.feed(1, 2)
        own = Link()
        own.start()
        rows.store.geometry.count_read(own)
        moved[count] = rows.store.step_bytes.moved - own.moved
        rows.store.contents.link.moved = 0  # as before the first step: what a step would read
        assert rows.store.step_bytes.moved == moved[count] + own.moved
    assert moved[1] == moved[5] == prefix.step_bytes.moved > 0


def test_a_write_to_the_prefix_is_noticed() -> None:
    rows = Rows(make_prefix("every token", TRANSFORMS["plain"]), "full", 2, TRANSFORMS["plain"])
    rows.feed(2, 1)
    rows.prefix.tensors.values[0, 0, 0, 0] += 1
    with pytest.raises(AssertionError, match="a shared prefix is as it was"):
        check_invariants(rows.store)


def test_the_text_must_not_change_while_it_is_shared() -> None:
    model = build("llama")
    ids, mask = conversation([6])
    with kvpolicy.attach(model, "window@0.5"):
        text = read_text(model, ids)
        text.fork(shared=True)
        calls = {
            "A forward": lambda: forward(model, ids, mask, TEXT, TEXT + 6, text),
            "tick": text.tick,
            "mark": text.mark,
            "crop": lambda: text.crop(-1),
            "shift": lambda: text.shift(30, 1),
            "expect": lambda: text.expect(None, 3),
            "hold_next": text.hold_next,
            "batch_select_indices": lambda: text.batch_select_indices(torch.tensor([0])),
            "batch_repeat_interleave": lambda: text.batch_repeat_interleave(2),
        }
        for name, call in calls.items():
            refused = f"{name}.* must not change a cache whose slots other caches share"
            with pytest.raises(KVPolicyStateError, match=refused):
                call()
        text.reset()
        forward(model, ids, mask, 0, TEXT, text)
        assert text.get_seq_length() == TEXT


def test_what_cannot_be_done_behind_a_shared_text(tmp_path: Path) -> None:
    model = build("llama")
    ids, mask = conversation([6])
    with kvpolicy.attach(model, "window@0.5"):
        shared = read_text(model, ids).fork(shared=True)
        go_on(model, shared, ids, mask)
        for call in (lambda: shared.save(tmp_path / "file"), lambda: shared.crop(-1), lambda: shared.shift(2, 1)):
            with pytest.raises(KVPolicyStateError, match="one with a shared prefix"):
                call()
        with pytest.raises(KVPolicyStateError, match="shares the same prefix"):
            shared.fork(shared=True)
        assert not [*tmp_path.iterdir()]
    model = build("gemma2")
    with kvpolicy.attach(model, "window@0.5"):
        shared = read_text(model, ids).fork(shared=True)
        with pytest.raises(KVPolicyStateError, match="sliding window"):
            shared.reset()


def test_detached_rows_are_refused_as_others() -> None:
    model = build("llama")
    ids, mask = conversation([6])
    with kvpolicy.attach(model, "window@0.5"):
        shared = read_text(model, ids).fork(shared=True)
    with kvpolicy.attach(model, "window@0.5"), pytest.raises(KVPolicyError, match="got a detached one"):
        forward(model, ids, mask, TEXT, TEXT + 6, shared)


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("window+quest:page=4:read=8@0.5", r"Every slot must be read .* got Quest"),
        ("full+csr:read_top_k=4:prompt_atoms=0", r"Every slot must be read .* got CSR"),
    ],
)
def test_prefixes_that_cannot_be_shared(policy: str, message: str) -> None:
    model, _ = kvpolicy.tiny()
    ids, _ = conversation([6])
    with kvpolicy.attach(model, policy):
        text = read_text(model, ids)
        with pytest.raises(KVPolicyError, match=message):
            text.fork(shared=True)


@pytest.mark.parametrize(
    ("own", "part"),
    [
        ("h2o@8", "selector h2o"),
        ("snapkv:window=4@8", "selector snapkv"),
        ("keydiff@8", "selector keydiff"),
        ("squeeze+window@8", "allocator squeeze"),
        ("window+merge@8", "merger"),
        ("window+quest:page=4:read=8@16", "reader quest"),
        (kvpolicy.Policy.by_layer(["window@0.5"] * 3, budget=0.5), "a policy by layer"),
    ],
)
def test_own_policies_that_are_refused(own: Any, part: str) -> None:
    model = build("llama")
    ids, _ = conversation([6])
    with kvpolicy.attach(model, "window@0.5"):
        text = read_text(model, ids)
        with pytest.raises(KVPolicyError, match=f"own must be a policy that selects tokens .* got (the )?{part}"):
            text.fork(shared=True, own=own)
        assert not text.journal.is_shared


def test_wrong_calls() -> None:
    model = build("llama")
    ids, mask = conversation([6, 6])
    with kvpolicy.attach(model, "window@0.5"):
        with pytest.raises(KVPolicyStateError, match="must hold a whole prompt for its slots"):
            PolicyCache(model).fork(shared=True)
        two = prompted(model, ids, mask, TEXT)
        with pytest.raises(KVPolicyError, match="must have one row for its slots to be shared, got 2"):
            two.fork(shared=True)
        text = read_text(model, ids)
        with pytest.raises(KVPolicyError, match="rows must be a list of numbers from 0 to 0"):
            text.fork([0, 1], shared=True)
        with pytest.raises(KVPolicyError, match="own must be None without shared=True, got 'full'"):
            text.fork(own="full")
        text.mark()
        with pytest.raises(KVPolicyStateError, match=r"fork\(shared=True\) must be called without a mark"):
            text.fork(shared=True)
        text.rollback(0)
        shared = text.fork([0, 0], shared=True)
        with pytest.raises(KVPolicyError, match=r"must have the 2 row\(s\) of its cache, got 1"):
            forward(model, ids[:1], mask[:1], TEXT, TEXT + 6, shared)
