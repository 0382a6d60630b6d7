"""A prompt that awaits its budget is trimmed: what is kept in the end is what would have been kept of all of it."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from kvpolicy import Policy, PolicyCache, attach
from kvpolicy.engine import trimming
from kvpolicy.engine.invariants import check_invariants
from kvpolicy.engine.layer_spec import LayerSpec
from kvpolicy.engine.layer_store import LayerStore
from kvpolicy.engine.prefill import PendingPrompt
from kvpolicy.engine.row_limits import RowBudget
from kvpolicy.engine.state import fields, tensors
from kvpolicy.planning.planner import base_tokens
from kvpolicy.protocols import BoundsBudgets, LayerBounds, nested_from
from kvpolicy.registry import lookup
from kvpolicy.statistics.windows import ScoreTransform
from kvpolicy.text.errors import KVPolicyError
from tests.conformance.bench import Bench
from tests.conformance.fakes import Roll
from tests.conformance.models import build
from tests.conformance.policies import CODECS, SELECTORS, spec_of, words
from tests.engine.parts import generator
from tests.sampling import each_once, pairwise, product

TOKENS = 40
HEADS = 2
GROUP = 2
DIM = 8
NESTED = [name for name in SELECTORS if nested_from(Policy.parse(spec_of(name) + "@9").selector) is not None]
ROWS = {"one": [TOKENS], "padded": [TOKENS, 17, 30], "idle": [TOKENS, 0], "between": [TOKENS, 31]}
DRAWS = ["normal", "equal", "spike"]


def vectors(draw: str, rows: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values: of no pattern, all the same, or with all weight on one token."""
    dice = generator(seed)
    q, k, v = (torch.randn(rows, heads, TOKENS, DIM, generator=dice) for heads in (HEADS * GROUP, HEADS, HEADS))
    if draw == "equal":
        q, k, v = (t[:, :, :1].expand_as(t).contiguous() for t in (q, k, v))
    if draw == "spike":
        k[:, :, 11] = 40 * q[:, ::GROUP, -1]
    return q, k, v


class Prompt:
    """A layer with a prompt that awaits its budget."""

    def __init__(self, spec: str, draw: str, lengths: list[int], seed: int) -> None:
        undoes = Policy.parse(spec).undoes_rotation
        bench = Bench(spec, [TOKENS] * len(lengths), rope=Roll() if undoes else None)
        self.layer: LayerStore = bench.layer
        q, k, v = vectors(draw, len(lengths), seed)
        bench.projection = torch.randn(6, HEADS * GROUP * DIM, generator=generator(seed))
        valid = torch.arange(TOKENS) >= TOKENS - torch.tensor(lengths)[:, None]
        if lengths == ROWS["between"]:  # padding on both sides, and among the tokens
            valid[1] = torch.arange(TOKENS) % 10 >= 2
            valid[1, -1] = False
        given = bench._inputs(q)  # pyright: ignore[reportPrivateUsage]
        self.layer.initialize(k, group=GROUP)
        _, pending = self.layer.attend_prompt(
            q, k, v, None if bool(valid.all()) else valid, ScoreTransform(DIM**-0.5), given
        )
        self.pending: PendingPrompt = pending
        self.lengths = torch.tensor(lengths)

    def trim(self, most: list[int], least: int) -> None:
        before = self.pending
        bounds = LayerBounds(torch.full_like(self.lengths, least), torch.tensor(most))
        self.pending = self.layer.trim(before, bounds)

    def compressed(self, keep: list[int]) -> dict[str, Any]:
        """Every tensor of the layer under a budget, by name."""
        budget = torch.tensor(keep)
        massive = self.pending.flags & (torch.arange(TOKENS) % 13 == 5)
        offset = torch.zeros(len(keep), dtype=torch.int64)
        row_budget = RowBudget(budget, torch.zeros_like(budget), budget)
        self.layer.compress(self.pending, row_budget, massive=massive, rope_offset=offset)
        check_invariants(self.layer, keeps_newest=False)
        return {f"{name}.{field}": t for name, part in self.layer.tensors.parts().items() for field, t in fields(part)}


def budgets(rng: random.Random, rows: int, least: int) -> list[list[int]]:
    """Budgets of rows that fall from step to step, as bounds do; the last are those that the layer is given."""
    steps = [[rng.randint(least, TOKENS) for _ in range(rows)]]
    for _ in range(rng.randint(1, 4)):
        steps.append([rng.randint(least, most) for most in steps[-1]])
    return steps


# How a selector ranks and how a codec encodes do not interact in what is dropped before both.
@product(
    "selector,codec,rows,draw",
    NESTED,
    CODECS,
    [*ROWS],
    DRAWS,
    sample=pairwise(NESTED, CODECS, [*ROWS], DRAWS, apart=[(0, 1), (0, 2)]),
)
def test_the_same_is_kept(selector: str, codec: str, rows: str, draw: str) -> None:
    spec = words(selector, codec, budget="9")
    policy = Policy.parse(spec)
    least = max(nested_from(policy.selector) or 1, policy.min_tokens)
    rng = random.Random(spec + rows + draw)
    lengths = ROWS[rows]
    trimmed = 0
    for seed in range(4):
        whole, cut = (Prompt(spec, draw, lengths, seed) for _ in range(2))
        steps = budgets(rng, len(lengths), least)
        for most in steps[:-1]:
            cut.trim(most, least)
            assert cut.pending.columns == TOKENS
            assert cut.pending.lengths(torch.zeros(len(lengths), dtype=torch.int64)).equal(cut.lengths)
            if max(most) <= TOKENS * (1 - trimming.LEAST_GAIN) / 2:
                assert cut.pending.keys.shape[2] <= max(most) / (1 - trimming.LEAST_GAIN)
        trimmed += cut.pending.trimmed is not None
        given = [
            min(most, length) if rng.random() < 0.5 else most for most, length in zip(steps[-1], lengths, strict=True)
        ]
        given = [max(budget, least) for budget in given]
        expected = whole.compressed(given)
        got = cut.compressed(given)
        assert expected.keys() == got.keys()
        for name, tensor in expected.items():
            assert torch.equal(tensor, got[name]), f"{name} under {steps}"
    if least < TOKENS // 2:
        assert trimmed, "nothing was trimmed"


def test_every_simple_selector_says_whether_it_nests() -> None:
    """A list that a new selector is to be entered in, or in `NESTED` by its attribute."""
    others = {name for name in SELECTORS if name not in NESTED and "base" not in lookup(name)[1].__dataclass_fields__}
    assert others <= {"compactor", "cur", "defensive", "dropkv", "kvzip", "rkv", "vase"}


@pytest.mark.parametrize(
    "spec",
    ["window+merge@9", "h2o+regress@9", "kvcrush/snapkv:window=2@9", "uniform/adakv+snapkv:window=2@9"],
)
def test_what_cannot_be_known_is_held_whole(spec: str) -> None:
    """Mergers want what is evicted, some selectors keep other tokens under a small budget, heads share budgets."""
    policy = Policy.parse(spec)
    parts = (policy.selector, policy.codec, policy.decode, policy.merger)
    store = LayerStore(LayerSpec(0, *parts, heads=policy.heads))
    q, k, v = vectors("normal", 1, 0)
    store.initialize(k, group=GROUP)
    _, pending = store.attend_prompt(q, k, v, None, ScoreTransform(DIM**-0.5))
    assert store.trim(pending, LayerBounds(torch.tensor([9]), torch.tensor([12]))) is pending


def test_a_budget_below_the_window_is_not_trimmed_for() -> None:
    """`snapkv` ranks by fewer queries where the budget is less than two windows."""
    prompt = Prompt("snapkv:window=6@9", "normal", [TOKENS], 0)
    before = prompt.pending
    prompt.trim([20], 11)
    assert prompt.pending is before
    prompt.trim([20], 12)
    assert prompt.pending.keys.shape[2] == 20 and prompt.pending.nbytes < before.nbytes


def test_a_budget_beyond_the_bound_is_an_error() -> None:
    prompt = Prompt("window@9", "normal", [TOKENS], 0)
    prompt.trim([20], 4)
    with pytest.raises(KVPolicyError, match="got a bound of 20 and then a budget of 21 tokens"):
        prompt.compressed([21])


def watch_trims(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens every prompt has after each trimming from now on."""
    held: list[int] = []
    trim = LayerStore.trim

    def counted(self: LayerStore, pending: PendingPrompt, *args: Any) -> PendingPrompt:
        after = trim(self, pending, *args)
        held.append(after.keys.shape[2])
        return after

    monkeypatch.setattr(LayerStore, "trim", counted)
    return held


def test_a_row_that_begins_later_is_not_trimmed_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer that has slots ranks them with the prompt."""
    model = build("llama", layers=6)
    ids = torch.randint(3, 40, (2, 60), generator=generator(1))
    mask = torch.ones_like(ids)
    mask[1, :30] = 0
    held = watch_trims(monkeypatch)
    with attach(model, "d2olayers+window@0.3"), torch.no_grad():
        cache = PolicyCache(model)
        model(ids[:, :30], attention_mask=mask[:, :30], cache=cache)
        assert min(held) < 30
        held.clear()
        model(ids[:, 30:], attention_mask=mask, cache=cache)
    assert set(held) <= {30}


def test_rows_of_a_trimmed_prompt_are_selected() -> None:
    """As beams select them."""
    prompt = Prompt("snapkv:window=2:kernel=3@9", "normal", [TOKENS, 30], 0)
    prompt.trim([20, 12], 4)
    held = prompt.pending.trimmed
    alone = prompt.pending.map_rows(lambda t: t[1:]).trimmed
    assert held is not None and alone is not None
    for name in ("positions", "length", "budget"):
        assert torch.equal(getattr(alone.view, name), getattr(held.view, name)[1:])
    assert sum(t.nbytes for t in held.tensors) == held.view.positions.nbytes + sum(
        t.nbytes for t in tensors(held.state)
    )


MEASURED = [
    "squeeze+streaming@0.3",
    "squeeze+snapkv:window=2:kernel=3@0.4",
    "cake:window=4+h2o@0.3",
    "zigzag:window=4+snapkv:window=2:kernel=3@0.4",
    "lava:window=4+tova@0.2",
    "mass+expected@0.3",
    "d2olayers+keydiff@0.3",
    "simlayer:recent=6+window+tokenwise:group_size=4:residual_length=2:block_size=2@0.3",
]
PROMPTS = [[70], [70, 41]]
TILES = [None, 16]


@product(
    "spec,rows,tile",
    MEASURED,
    PROMPTS,
    TILES,
    sample=[*each_once(MEASURED, PROMPTS, TILES), (MEASURED[0], [70, 41], None), (MEASURED[1], [70], 16)],
)
def test_a_cache_is_the_same(spec: str, rows: list[int], tile: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """With and without trimming; what waits is never more than the allocator guarantees, and two prompts."""
    model = build("llama", layers=6)
    ids = torch.randint(3, 40, (len(rows), max(rows)), generator=generator(1))
    mask = (torch.arange(max(rows)) >= max(rows) - torch.tensor(rows)[:, None]).long()

    def run() -> dict[str, Tensor]:
        with attach(model, spec, tile=tile), torch.no_grad():
            cache = PolicyCache(model)
            out = model(ids, attention_mask=mask, cache=cache)
            found = {"logits": out.logits}
            for layer in cache.policy_layers:
                for name, part in layer.store.tensors.parts().items():
                    found |= {f"{layer.layer_idx}.{name}.{field}": t for field, t in fields(part)}
            return found

    with monkeypatch.context() as patch:
        patch.setattr(LayerStore, "trim", lambda self, pending, *args: pending)
        expected = run()
    held = watch_trims(monkeypatch)
    got = run()
    assert expected.keys() == got.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensor, got[name]), name
    policy = Policy.parse(spec)
    allocator = policy.allocator
    assert isinstance(allocator, BoundsBudgets)
    assert min(held) < max(rows), "nothing was trimmed"
    if len(rows) == 1:
        length = torch.tensor(rows)
        total = base_tokens(policy, length) * 6
        most = allocator.guarantee(total, policy.min_tokens, length, 6).together
        assert sum(held[-6:]) * (1 - trimming.LEAST_GAIN) <= int(most), "after the last layer was measured"
