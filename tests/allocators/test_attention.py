"""Allocators that measure layers, by attention or by what tokens are worth: metrics, and the budgets that follow."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import kvpolicy
from kvpolicy import Policy, PolicyCache
from kvpolicy.allocators.attention import number_reaching
from kvpolicy.allocators.kvcompose import KVCompose
from kvpolicy.allocators.threshold import GlobalThreshold
from kvpolicy.engine.attention import attend
from kvpolicy.engine.layer_attention import layer_attention
from kvpolicy.engine.layer_store import LayerStore
from kvpolicy.engine.prefill import PendingPrompt
from kvpolicy.hf.layer import PolicyLayer
from kvpolicy.protocols import SINGLE_RANK, LayerAttention
from kvpolicy.registry import lookup, name_of, names
from kvpolicy.statistics import Statistic
from kvpolicy.statistics.attention_sum import AttentionSum
from kvpolicy.statistics.recent_queries import RecentQueries
from kvpolicy.statistics.statistic import Coming, Tile, first_of
from kvpolicy.statistics.windows import ScoreTransform
from tests.conformance.models import build
from tests.conformance.play import make_batch, play
from tests.conformance.replay import Turn, reference_selector
from tests.reference import allocators
from tests.reference.allocators._measuring import Prompt, prompt_of, reaching
from tests.reference.engine import PLENTY, ReferenceLayer
from tests.reference.versions import small, version
from tests.sampling import each_once, pairwise, product

NAMES = [name for name in names("allocator") if lookup(name)[1]().layer_metric == "attention"]
KVZIP = "kvzip:chunk=9:sinks=2"
TURNS = [47, 1, 1, 9, 1]
"""A prompt, steps, and a later prompt."""
SHAPES = {
    "usual": (4, 2, 23),
    "one head": (1, 1, 23),
    "one token": (4, 2, 1),
    "two tokens": (2, 2, 2),
    "short": (4, 1, 5),
}
"""Query heads, KV heads and tokens of a prompt."""


def part(name: str) -> Any:
    """The allocator with small numbers."""
    return Policy.parse(f"{small('allocator', name)}+window@0.5").allocator


def config_of(allocator: Any) -> dict[str, Any]:
    return dataclasses.asdict(allocator)


def slow_metric(allocator: Any, prompt: Prompt) -> Any:
    return version("allocator", name_of(type(allocator))).measure(config_of(allocator), prompt)


def slow_budgets(allocator: Any, metrics: Any, total: int, floor: int, ceiling: int) -> list[int]:
    name = name_of(type(allocator))
    return allocators.budgets(name, config_of(allocator), metrics, total, len(metrics), floor, ceiling)


def draw(kind: str, shape: str, rows: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values, [B, ..., n, 8]."""
    heads, kv_heads, tokens = SHAPES[shape]
    generator = torch.Generator().manual_seed(len(kind) + tokens)
    q, k, v = (torch.randn(rows, count, tokens, 8, generator=generator) for count in (heads, kv_heads, kv_heads))
    if kind == "equal":  # every token has equal attention
        k = torch.zeros_like(k)
    if kind == "one token":  # has all of it
        q = q.abs()
        k = k * 1e-3
        k[:, :, 0] = 60
    if kind == "ties":
        k = k[:, :, :1].expand_as(k).clone()
        v = v.sign()
        k[:, :, ::3] = 0
    if kind == "no values":
        v = torch.zeros_like(v)
    return q, k, v


def pending_of(
    q: Tensor, k: Tensor, v: Tensor, asked: tuple[Statistic[Any], ...], valid: Tensor | None = None
) -> PendingPrompt:
    """The prompt as a layer holds it, in which the selector asked for wider statistics than the allocator."""
    coming = Coming(valid, q.shape[2], torch.zeros(len(q), dtype=torch.int64), None)
    transform = ScoreTransform(8**-0.5)
    window = first_of(RecentQueries, asked)
    recent = RecentQueries((0 if window is None else window.width) + 3).begun(coming).added(Tile(q, k, 0, valid, True))
    summed = AttentionSum(attend(q, k, v, transform, None, valid, True)[1])
    return PendingPrompt(k, v, valid, transform, (summed, recent))


def measured(allocator: Any, pending: PendingPrompt) -> Tensor:
    return allocator.measure(layer_attention(pending, allocator.attention, SINGLE_RANK))


def assert_close(got: Tensor, want: Any) -> None:
    if isinstance(want, list) and isinstance(want[0], list):
        want = torch.tensor([[-torch.inf if w is None else w for w in line] for line in want])
    torch.testing.assert_close(got, torch.as_tensor(want, dtype=torch.float32), rtol=1e-4, atol=2e-5)


def test_equal_weights_reach_a_share_that_they_divide() -> None:
    """Ten of 0.1, which is no sum of powers of two, have 0.9 in nine of them."""
    for share, count in ((0.9, 9), (0.3, 3), (0.85, 9), (1.0, 10)):
        assert int(number_reaching(torch.full((10,), 0.1), share)) == reaching([0.1] * 10, share) == count
    assert int(number_reaching(torch.zeros(10), 0.9)) == reaching([0.0] * 10, 0.9) == 1


KINDS = ["random", "equal", "one token", "ties", "no values"]


@product("name,shape,kind", NAMES, [*SHAPES], KINDS, sample=pairwise(NAMES, [*SHAPES], KINDS, apart=[(1, 2)]))
def test_measures_as_the_slow_version(name: str, shape: str, kind: str) -> None:
    allocator = part(name)
    q, k, v = draw(kind, shape)
    got = measured(allocator, pending_of(q, k, v, allocator.attention.statistics))
    assert_close(got[0], slow_metric(allocator, prompt_of(q[0], k[0], v[0], 8**-0.5)))


@pytest.mark.parametrize("name", NAMES)
def test_a_row_is_measured_as_if_alone(name: str) -> None:
    """Whatever its padding, also between its tokens."""
    allocator = part(name)
    q, k, v = draw("random", "usual", rows=3)
    valid = torch.ones(3, 23, dtype=torch.bool)
    valid[1, :9] = False
    valid[2, [0, 5, 6, 20]] = False
    together = measured(allocator, pending_of(q, k, v, allocator.attention.statistics, valid))
    for row in range(3):
        own_q, own_k, own_v = (t[row : row + 1, :, valid[row]] for t in (q, k, v))
        alone = measured(allocator, pending_of(own_q, own_k, own_v, allocator.attention.statistics))[0]
        assert_close(together[row][..., : alone.shape[-1]] if alone.dim() else together[row], alone)


@pytest.mark.parametrize("name", NAMES)
def test_budgets_as_the_slow_version(name: str) -> None:
    """At the least budget, at the largest one, and with a layer that needs more than it can use."""
    allocator = part(name)
    q, k, v = draw("random", "usual", rows=5)
    q = q * torch.tensor([0.2, 1.0, 3.0, 0.0, 6.0])[:, None, None, None]
    q[4] = q[4].abs()
    k[4] = k[4] * 1e-3
    k[4, :, 0] = 60  # all attention of the last layer is on one token
    prompts = [prompt_of(q[row], k[row], v[row], 8**-0.5) for row in range(5)]
    metrics = measured(allocator, pending_of(q, k, v, allocator.attention.statistics))[None]  # rows as layers
    slow = [slow_metric(allocator, prompt) for prompt in prompts] if metrics.dim() > 2 else metrics[0].tolist()
    spread: list[int] = []
    for total in (10, 23, 50, 60, 113, 115):
        got = allocator.budgets(metrics, torch.tensor([total]), 2, torch.tensor([23]), 5)[0].tolist()
        assert sum(got) == total and got == slow_budgets(allocator, slow, total, 2, 23), total
        spread.append(max(got) - min(got))
    assert max(spread) > 1


@pytest.mark.parametrize("name", NAMES)
def test_layers_that_are_alike_share_equally(name: str) -> None:
    """Before a prompt, in one layer, and where nothing was measured."""
    allocator = part(name)
    total = torch.tensor([10, 10])
    ceiling = torch.tensor([30, 30])
    for number in (0.0, 1.0, -90.0):
        metrics = torch.full((2, 4), number)
        assert allocator.budgets(metrics, total, 1, ceiling, 4).tolist() == [[3, 3, 2, 2]] * 2
    assert allocator.budgets(torch.ones(2, 1), total, 1, ceiling, 1).tolist() == [[10], [10]]


def prompts_of(tape: Any, b: int) -> list[Prompt]:
    found: list[Prompt] = []
    for turn in (own[0] for own in tape.values()):
        q, k, v, _ = turn.row(b)
        found.append(prompt_of(q.float(), k.float(), v.float(), turn.kernel.scale))
    return found


SEEING = ["window", "snapkv:window=9", "h2o+kivi:bits=4:group_size=4:residual_length=4"]


@product("name,selector", NAMES, SEEING, sample=each_once(NAMES, SEEING))
def test_in_a_model(name: str, selector: str) -> None:
    """Rows are alone in their budgets, also under selectors that see no attention, or more of it."""
    policy = Policy.parse(f"{small('allocator', name)}+{selector}@0.5")
    lengths = [47, 30]
    tape, cache, _ = play(build("llama", layers=4), policy, lengths, TURNS)
    for b, length in enumerate(lengths):
        slow = [slow_metric(policy.allocator, prompt) for prompt in prompts_of(tape, b)]
        total = allocators.base_budget(0.5, length) * 4
        keep = [own[0].keep[b] for own in tape.values()]
        assert sum(keep) == total
        if isinstance(slow[0], list):
            assert keep == slow_budgets(policy.allocator, slow, total, 1, length + (cache.new or 0))
        else:
            assert_close(cache.cosines()[b], slow)
            exact = cache.cosines()[b].tolist()
            assert keep == slow_budgets(policy.allocator, exact, total, 1, length + (cache.new or 0))
    assert cache.plan is not None and cache.plan.measured and cache.plan.nbytes == cache.nbytes


def budgets_in(model: Any, policy: str, pieces: int = 1, **how: Any) -> list[list[int]]:
    """The budgets of layers after a prompt of 60 tokens in pieces."""
    ids, _ = make_batch([60], [60], 0)
    with torch.no_grad(), kvpolicy.attach(model, policy, **how):
        cache = PolicyCache(model, prompt=60, new=0)
        for piece in ids.chunk(pieces, 1):
            model(piece, cache=cache)
        return [layer.budget.tolist() for layer in cache.policy_layers]


@pytest.mark.parametrize(
    "policy", [*(f"{small('allocator', name)}+window@0.3" for name in NAMES), f"kvcompose+{KVZIP}@0.3"]
)
def test_tiles_and_held_chunks_have_the_budgets_of_one_piece(policy: str) -> None:
    model = build("llama", layers=3)
    replayed = f"{KVZIP}+tokenwise:bits=8:group_size=4:residual_length=4:block_size=4"
    whole = budgets_in(model, policy)
    assert budgets_in(model, policy, tile=16) == whole
    assert budgets_in(model, policy, 3, chunks="hold") == whole
    assert budgets_in(model, policy.replace("+window", f"+{replayed}")) == whole
    assert sum(map(sum, budgets_in(model, policy, 3))) == sum(map(sum, whole))


@pytest.mark.parametrize(
    "policy", ["cake+window@0.4", "mass+window@0.4", "dynamickv+window@0.4", f"global+{KVZIP}@0.4"]
)
def test_a_later_prompt_has_the_metric_of_the_first(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is measured again, no statistics are gathered for it, and held bytes are those that are planned."""
    name, _, others = policy.partition("+")
    kind = lookup(name)[1]
    sums: list[bool] = []
    count: list[int] = []
    real = kind.measure
    gather = LayerStore.attend_new

    def measure(*given: Any) -> Any:
        count.append(1)
        return real(*given)

    def attend_new(store: LayerStore, *given: Any) -> Any:
        sums.append(first_of(AttentionSum, store.contents.prompt_statistics) is not None)
        return gather(store, *given)

    monkeypatch.setattr(kind, "measure", measure)
    monkeypatch.setattr(LayerStore, "attend_new", attend_new)
    tape, cache, _ = play(build("llama", layers=3), f"{small('allocator', name)}+{others}", [40], TURNS)
    assert len(count) == 3
    assert sums == [name == "mass"] * 3 + [False] * 3
    first, last = ([own[turn].keep[0] for own in tape.values()] for turn in (0, 3))
    assert len(set(first)) > 1 and sum(last) > sum(first)
    for before, after in zip(first, last, strict=True):
        assert abs(before / sum(first) - after / sum(last)) < 0.05
    assert cache.plan is not None and cache.plan.nbytes == cache.nbytes


@pytest.mark.parametrize("name", NAMES)
def test_prompts_wait_without_what_was_measured(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a selector that sees no attention."""
    held: list[int] = []
    real = PolicyLayer.keep
    monkeypatch.setattr(
        PolicyLayer, "keep", lambda layer, pending: (held.append(len(pending.statistics)), real(layer, pending))[1]
    )
    play(build("llama", layers=2), f"{small('allocator', name)}+window@0.4", [40], TURNS[:2])
    assert held == [0, 0]


def test_selectors_choose_as_without_the_allocator() -> None:
    """Also where the allocator asks for more queries than they do."""
    model = build("llama", layers=1)
    plain, measuring = (
        play(model, f"{name}snapkv:window=4@0.5", [47, 30], TURNS)[0] for name in ("", "cake:window=20+")
    )
    assert [turn.kept for turn in plain[0]] == [turn.kept for turn in measuring[0]]


@pytest.mark.parametrize("name", NAMES)
def test_a_row_that_begins_in_a_later_forward_is_measured_as_alone(name: str) -> None:
    """It has slots by then, since the other row needed some."""
    model = build("llama", layers=4)
    ids = torch.randint(3, 40, (2, 50), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, :30] = 0
    with kvpolicy.attach(model, f"{small('allocator', name)}+window@0.4"), torch.no_grad():
        together = PolicyCache(model)
        alone = PolicyCache(model)
        model(ids[:, :30], attention_mask=mask[:, :30], cache=together)
        first = together.cosines()[0]
        model(ids[:, 30:], attention_mask=mask, cache=together)
        model(ids[1:, 30:], cache=alone)
    assert_close(together.cosines()[1], alone.cosines()[0])
    assert torch.equal(together.cosines()[0], first)


BOTH = [KVCompose(), GlobalThreshold()]


@pytest.mark.parametrize("allocator", BOTH)
@pytest.mark.parametrize("kind", ["random", "equal", "one head", "one layer", "one token"])
def test_curves_give_the_budgets_of_the_slow_version(allocator: Any, kind: str) -> None:
    """With all worth in one head, one layer or one token too, and at the least budget."""
    worth = torch.rand(5, 3, 20, generator=torch.Generator().manual_seed(0))
    worth = {
        "random": worth,
        "equal": torch.ones_like(worth),
        "one head": worth * torch.tensor([1.0, 0.0, 0.0])[:, None],
        "one layer": worth * (torch.arange(5) == 2)[:, None, None],
        "one token": worth * (torch.arange(20) == 7),
    }[kind]
    worth[:, :, -1] = torch.inf  # the newest token
    none = torch.zeros(1, dtype=torch.int64)
    seen = [LayerAttention(none[:, None], none, none, worth=worth[None, layer], layer_idx=layer) for layer in range(5)]
    curves = torch.stack([allocator.measure(each)[0] for each in seen])[None]
    for total in (10, 23, 50, 99, 100):
        got = allocator.budgets(curves, torch.tensor([total]), 2, torch.tensor([20]), 5)[0].tolist()
        assert got == slow_budgets(allocator, worth.tolist(), total, 2, 20), (kind, total)


@pytest.mark.parametrize("allocator", BOTH)
def test_before_a_prompt_and_without_tokens(allocator: Any) -> None:
    total = torch.tensor([10, 10])
    ceiling = torch.tensor([30, 30])
    assert allocator.budgets(torch.ones(2, 4), total, 1, ceiling, 4).tolist() == [[3, 3, 2, 2]] * 2
    empty = torch.full((2, 4, 6), -torch.inf)
    assert allocator.budgets(empty, total, 1, ceiling, 4).tolist() == [[3, 3, 2, 2]] * 2


def worths(policy: Policy, turns: Sequence[Turn], b: int) -> list[list[list[float]]]:
    """What the tokens of each head of each layer are worth to kvzip after a prompt, of one row."""
    found: list[list[list[float]]] = []
    for turn in turns:
        q, k, v, _ = turn.row(b)
        slow = ReferenceLayer(
            reference_selector(policy.selector), PLENTY, num_heads=q.shape[0], num_kv_heads=k.shape[0], capacity=PLENTY
        )
        texts = [text for text in (replayed.row(b) for replayed in turn.replays) if text is not None]
        slow.forward(q.float(), k.float(), v.float(), turn.kernel.scale, texts=texts)
        found.append([[score.real for score in head] for head in slow.scores])
        for head in found[-1]:
            for position in (0, 1, len(head) - 1):  # the sinks and the newest token
                head[position] = torch.inf
    return found


@pytest.mark.parametrize("name", ["kvcompose", "global"])
def test_curves_in_a_model(name: str) -> None:
    """Rows are alone in their budgets, whatever the padding."""
    policy = Policy.parse(f"{name}+{KVZIP}@0.4")
    lengths = [47, 30]
    tape, cache, _ = play(build("llama", layers=3), policy, lengths, TURNS)
    for b, length in enumerate(lengths):
        turns = [own[0] for own in tape.values()]
        total = allocators.base_budget(0.4, length) * 3
        expected = slow_budgets(policy.allocator, worths(policy, turns, b), total, 1, length + (cache.new or 0))
        assert [turn.keep[b] for turn in turns] == expected
        assert len(set(expected)) > 1


def test_head_budgets_get_what_the_layer_has() -> None:
    """With `adakv` behind it, the tokens of all layers and heads are those above one threshold, but for whole pages."""
    tape, cache, _ = play(build("llama", layers=3), f"global/adakv:safeguard=0.0+{KVZIP}@0.4", [47], TURNS)
    kept = [[len(head) for head in own[0].kept[0]] for own in tape.values()]
    budgets = [own[0].keep[0] for own in tape.values()]
    assert len({count for heads in kept for count in heads}) > 1
    for heads, budget in zip(kept, budgets, strict=True):
        assert sum(heads) <= budget * len(heads)
    assert cache.plan is not None and cache.plan.measured


@pytest.mark.parametrize("policy", ["kvcompose+snapkv:window=4@0.2", "global+h2o@30KB"])
def test_chunks_of_curves_stay_within_the_budget(policy: str) -> None:
    model = build("llama", layers=3)
    ids, _ = make_batch([200], [200], 0)
    with torch.no_grad(), kvpolicy.attach(model, policy):
        cache = PolicyCache(model, prompt=200, new=0)
        for part in ids.chunk(5, 1):
            model(part, cache=cache)
    assert cache.plan is not None and cache.nbytes == cache.plan.nbytes
    if isinstance(cache.policy.budget, str):
        assert cache.nbytes <= 30 * 1000
