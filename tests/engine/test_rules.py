"""What is left of the rules: what a query attends to (1), what is stored of it (7), and odd ways to call a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import DynamicCache

import kvpolicy
from kvpolicy import Policy, PolicyCache
from kvpolicy.engine.selection import eviction_scores
from kvpolicy.engine.state import tensors
from kvpolicy.protocols import View
from kvpolicy.registry import names
from kvpolicy.statistics import Replay
from kvpolicy.statistics.statistic import first_of
from kvpolicy_eval.bench.codecs import DIM, HEADS, Case
from kvpolicy_eval.bench.models import llama
from tests.conformance.access import Attend, addresses, attending, kept_positions, selector_state
from tests.conformance.models import FAMILIES, UNNAMED, build
from tests.conformance.play import ROWS, TURNS, forward, make_batch, talk
from tests.conformance.policies import CODECS, RANKED, SELECTORS, with_profile, words
from tests.engine.filled import attached, prompted
from tests.engine.live import Alive, stored_bytes
from tests.engine.parts import Ranking, Worth
from tests.sampling import each_once, product

SCORING = [["h2o", "snapkv", "tova", "kvcrush/h2o"], [torch.bfloat16, torch.float16]]


@product("selector,dtype", *SCORING, sample=each_once(*SCORING))
def test_scores_are_fp32(selector: str, dtype: torch.dtype) -> None:
    """Rule 7."""
    model = build("llama", dtype)
    with kvpolicy.attach(model, f"{selector}@0.5"):
        cache = PolicyCache(model)
        logits = talk(model, *make_batch([26, 17]), TURNS, cache)
    kinds = {t.dtype for layer in cache.policy_layers for t in tensors(selector_state(layer)) if t.is_floating_point()}
    assert kinds == {torch.float32}
    assert logits.dtype == dtype and torch.isfinite(logits).all()


def test_a_mask_of_the_new_tokens_alone() -> None:
    model = build("llama")
    ids, mask = make_batch([26, 17])
    places = (mask.cumsum(-1) - 1).clamp_min(0)
    with kvpolicy.attach(model, "h2o@0.5"), torch.no_grad():
        want = talk(model, ids, mask, TURNS, PolicyCache(model))
        cache = PolicyCache(model)
        got = list[Tensor]()
        start = 0
        for size in TURNS:
            now = slice(start, start + size)
            out = model(ids[:, now], attention_mask=mask[:, now], position_ids=places[:, now], cache=cache)
            got.append(out.logits)
            start += size
    assert torch.equal(torch.cat(got, 1), want)


@pytest.mark.parametrize("policy", ["h2o+kivi:group_size=4:residual_length=4@0.5", "full", "window@0.5"])
def test_a_tick_too_many_does_no_harm(policy: str) -> None:
    """An uncompiled loop that also calls `tick`."""
    with attached(policy, [26, 17]) as (model, ids, mask):
        want = talk(model, ids, mask, TURNS, PolicyCache(model, new=sum(TURNS[1:])))
        cache = PolicyCache(model, new=sum(TURNS[1:]))
        start = 0
        got = list[Tensor]()
        for size in TURNS:
            got.append(forward(model, ids, mask, start, start + size, cache))
            cache.tick()
            start += size
    assert torch.equal(torch.cat(got, 1), want)


@pytest.mark.parametrize(
    ("selector", "sizes"),
    [
        ("window", [13, 13]),
        ("window", [1] * 26),
        ("streaming:sinks=2", [26]),
        ("streaming:sinks=2", [7, 7, 7, 5]),
        ("streaming:sinks=2", [25, 1]),
    ],
)
def test_a_prompt_may_come_in_pieces(selector: str, sizes: list[int]) -> None:
    """Selectors by position keep the same, however the prompt is cut, where its length is known."""
    model = build("llama")
    with kvpolicy.attach(model, f"{selector}@0.5"):
        cache = PolicyCache(model, prompt=26)
        talk(model, *make_batch([26], [26]), sizes, cache)
    sinks = [0, 1] if "sinks" in selector else []
    assert kept_positions(cache.policy_layers[0])[0][0] == [*sinks, *range(13 + len(sinks), 26)]


PROMPT = 30
STEPS = [18, 90]
"""Enough that every codec writes several blocks; and so many that all slots were overwritten many times."""
GROWING = ["window:decode=grow", "h2o:decode=grow", "full"]


def run(policy: str, rows: list[int], steps: int, layers: int = 2) -> tuple[PolicyCache, list[list[int]]]:
    """A long conversation; returns the cache and where its buffers were after each step."""
    model = build("llama", layers=layers)
    ids, mask = make_batch(rows, [PROMPT] + [1] * steps)
    places: list[list[int]] = []
    with kvpolicy.attach(model, policy):
        cache = prompted(model, ids, mask, PROMPT, new=steps)
        for column in range(PROMPT, PROMPT + steps):
            places.append(addresses(cache))
            forward(model, ids, mask, column, column + 1, cache)
    return cache, [*places, addresses(cache)]


MANY = [(*row, STEPS[0]) for row in each_once(SELECTORS, CODECS)]


@product("selector,codec,steps", SELECTORS, CODECS, STEPS, sample=[*MANY, ("h2o", "kivi", STEPS[1])])
def test_nothing_is_allocated_again(selector: str, codec: str, steps: int) -> None:
    cache, places = run(words(selector, codec), [PROMPT, 21], steps)
    assert all(place == places[0] for place in places)
    for layer in cache.policy_layers:
        assert layer.length.tolist() == [PROMPT + steps, 21 + steps]
        ends = zip(kept_positions(layer), layer.budget.tolist(), layer.length.tolist(), strict=True)
        for row, budget, length in ends:
            assert all(len(head) == budget and head[-1] == length - 1 for head in row)


@product("selector,codec", GROWING, CODECS, sample=each_once(GROWING, ["plain", "kivi", "mikv", "csr"]))
def test_room_for_what_was_announced(selector: str, codec: str) -> None:
    """A growing cache, too, is allocated once where it knows how many tokens will come."""
    budget = "1.0" if selector == "full" else "0.5"
    ranking = "window" if selector == "full" and codec in RANKED else selector
    cache, places = run(words(ranking, codec, budget=budget), [PROMPT, 21], steps=18)
    assert all(place == places[0] for place in places)
    held = (cache.policy_layers[0].positions >= 0).sum(-1)[:, 0].tolist()
    assert held == ([48, 39] if selector == "full" else [33, 28])


def test_an_endless_priority_is_evicted_only_if_all_are() -> None:
    positions = torch.tensor([[[3, 1, 2]]], dtype=torch.int32)
    view = View(positions, torch.tensor([4]), torch.tensor([3]), 0)
    for worth, slot in (
        ([torch.inf, torch.inf, 9.0], 2),
        ([torch.inf, torch.inf, torch.nan], 2),
        ([torch.nan, 1.0, torch.nan], 1),
        ([torch.inf] * 3, 0),
        ([-torch.inf, -torch.inf, 0.0], 0),
    ):
        state = Worth(torch.tensor([[worth]]), positions.long())
        assert int(eviction_scores(Ranking(), state, view, ~view.valid).argmax(-1)) == slot, worth  # pyright: ignore[reportArgumentType]


SHORT = [TURNS[0], 1, 1, 1]

WHOLE = (["full", "snapkv@40"], [*FAMILIES, *UNNAMED], [*ROWS])


@product("policy,family,rows", *WHOLE, sample=each_once(*WHOLE))
def test_equals_the_stock_cache(policy: str, family: str, rows: str) -> None:
    model = build(family)
    ids, mask = make_batch(ROWS[rows])
    stock = talk(model, ids, mask, TURNS, DynamicCache(config=model.config))
    with kvpolicy.attach(model, policy):
        ours = talk(model, ids, mask, TURNS, PolicyCache(model))
    assert (ours - stock)[mask.bool()].abs().max() < 3e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    model = build("llama", dtype)
    ids, mask = make_batch([26, 11])
    stock = talk(model, ids, mask, TURNS, DynamicCache())
    with kvpolicy.attach(model, "h2o@40"):
        ours = talk(model, ids, mask, TURNS, PolicyCache(model))
    error = (ours - stock)[mask.bool()].abs().max()
    assert error < (0.08 if dtype == torch.bfloat16 else 0.01) * stock.abs().max()


def test_share_of_one_keeps_the_prompt_and_then_evicts() -> None:
    """A share is of the prompt: with 1.0 the prompt is whole, and generated tokens compete from there on."""
    model = build("llama")
    ids, mask = make_batch([26])
    stock = talk(model, ids, mask, SHORT, DynamicCache())
    with kvpolicy.attach(model, "window@1.0"):
        cache = PolicyCache(model)
        ours = talk(model, ids, mask, SHORT, cache)
    assert torch.allclose(ours[:, :26], stock[:, :26], atol=3e-5)
    assert cache.policy_layers[0].positions.sort().values.tolist() == [[list(range(3, 29))] * 2]


LAYERS = 3
TOKENS = 512

FITTING = [name for name in SELECTORS if name != "kvzap"]
"""Those of which no file is of models with another hidden size."""
CHOSEN = [*FITTING, "kvcrush:page=16/h2o"]
PADDED = [(*row, bool(number % 2)) for number, row in enumerate(each_once(CHOSEN, CODECS))]


class Watch:
    """Counts, whenever a layer begins or ends, the cache's bytes and the storages of prompts that are alive."""

    def __init__(self) -> None:
        self.peak = 0
        self._prompts: list[tuple[StorageWeakRef, int]] = []
        self._cache: PolicyCache | None = None

    def around(self, real: Attend) -> Attend:
        def attend(cache: PolicyCache, layer_idx: int, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
            self._prompts += [(StorageWeakRef(t.untyped_storage()), t.untyped_storage().nbytes()) for t in (k, v)]
            self.count()
            out = real(cache, layer_idx, q, k, v, *rest)
            self.count()
            return out

        return attend

    def follow(self, cache: PolicyCache) -> PolicyCache:
        self._cache = cache
        return cache

    def count(self) -> None:
        assert self._cache is not None
        slots = sum(
            size for layer in self._cache.policy_layers for kind, size in layer.held().items() if "prompt" not in kind
        )
        alive = sum(size for reference, size in self._prompts if not reference.expired())
        self.peak = max(self.peak, slots + alive)


def prefill(policy: Policy | str, *, padded: bool = False) -> tuple[int, PolicyCache]:
    """The peak of a prefill, and its cache."""
    model = llama(LAYERS, 64, 8, vocabulary=8, positions=1024)
    watch = Watch()
    ids = torch.randint(0, 8, (2, TOKENS))
    mask = torch.ones_like(ids)
    mask[1, : TOKENS // 3] = not padded
    with torch.no_grad(), kvpolicy.attach(model, policy), attending(watch.around):
        cache = watch.follow(PolicyCache(model))
        model(ids, attention_mask=mask, cache=cache)
    return watch.peak, cache


def replays(selector: str) -> bool:
    """Whether a selector runs its context again, for which every layer holds its prompt."""
    asked = Policy.parse(words(selector, budget="0.25")).selector.statistics
    return first_of(Replay, asked) is not None


ONE_LAYER = 2 * 2 * TOKENS * 64 * 4
"""Keys and values of one layer's prompt, two rows, fp32."""


@product("selector,codec,padded", CHOSEN, CODECS, [False, True], sample=PADDED)
def test_peak(selector: str, codec: str, padded: bool) -> None:
    peak, cache = prefill(words(selector, codec, budget="0.25"), padded=padded)
    assert stored_bytes(cache) == cache.nbytes
    assert peak <= 1.1 * (cache.nbytes + ONE_LAYER * (LAYERS if replays(selector) else 1))


def test_peak_of_squeeze_with_a_profile(tmp_path: Path) -> None:
    policy = with_profile("squeeze+snapkv@0.25", tmp_path, [0.1, 0.2, 0.9])
    peak, cache = prefill(policy)
    assert peak <= 1.1 * (cache.nbytes + ONE_LAYER)


def test_peak_of_squeeze_online() -> None:
    """Measuring has to see every layer first: the whole prompt is held, and not more; then it is freed."""
    peak, cache = prefill("squeeze+snapkv@0.25")
    assert LAYERS * ONE_LAYER <= peak <= 1.1 * LAYERS * ONE_LAYER
    # A layer has slots for the row that it gives more tokens, so that the rows together take more than a quarter.
    assert stored_bytes(cache) == cache.nbytes < 0.4 * LAYERS * ONE_LAYER


@product("selector", FITTING, sample=[("window",), ("h2o",), ("snapkv",), ("expected",), ("kvzip",)])
def test_whole_peak(selector: str) -> None:
    """Everything that a prefill allocates, beside what the same prefill takes without any cache."""
    model = llama(LAYERS, 64, 8, vocabulary=8, positions=1024)
    ids = torch.randint(0, 8, (2, TOKENS))
    with torch.no_grad(), Alive(model) as bare:
        model(ids, use_cache=False)
    with torch.no_grad(), kvpolicy.attach(model, words(selector, budget="0.25")), Alive(model) as ours:
        cache = PolicyCache(model)
        model(ids, cache=cache)
    statistics = 10 * 1024**2  # a tile of scores, its softmax and its queries, for what sums over all of them
    # A replay needs every layer's prompt, and a copy of one of them behind which its own keys stand.
    held = ONE_LAYER * (LAYERS + 1 if replays(selector) else 1)
    many = replays(selector) or selector in ("h2o", "probe")
    assert ours.peak <= bare.peak + 1.1 * (cache.nbytes + held) + statistics * many


def test_a_prompt_in_chunks_never_holds_more() -> None:
    """Chunks join under the budget, so that the peak is that of a chunk."""
    model = llama(LAYERS, 64, 8, vocabulary=8, positions=1024)
    watch = Watch()
    ids = torch.randint(0, 8, (2, TOKENS))
    with torch.no_grad(), kvpolicy.attach(model, "snapkv@0.25"), attending(watch.around):
        cache = watch.follow(PolicyCache(model, prompt=TOKENS))
        for chunk in ids.split(64, 1):
            model(chunk, cache=cache)
    assert watch.peak <= 1.1 * (cache.nbytes + ONE_LAYER * 64 / TOKENS)


CODED_TOKENS = 16384
DENSE = CODED_TOKENS * HEADS * DIM * 4
"""Bytes of all keys, or all values, in fp32."""


@pytest.fixture(scope="module", params=[name for name in names("codec") if name != "plain"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    """A codec that holds many tokens; writing them takes longer than reading."""
    with torch.inference_mode():
        return Case(request.param, CODED_TOKENS, tmp_path_factory.mktemp("calibration"))


@pytest.mark.parametrize("what", ["score", "mix"])
def test_no_dense_copy(case: Case, what: str) -> None:
    with torch.inference_mode(), Alive(torch.nn.Identity()) as watch:
        out = getattr(case, what)()
    assert sum(part.nbytes for part in out) < watch.peak < DENSE * 2 / 3


class Largest(TorchDispatchMode):
    """The most bytes of any tensor that an operator returned, and the operator."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self.where = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().nbytes() > self.most:
                self.most = tensor.untyped_storage().nbytes()
                self.where = str(func)
        return out


def largest(policy: str, tokens: int, rows: list[int]) -> tuple[int, str]:
    """Of a prefill and of a continuation of half its size."""
    model = llama(1, 16, 4, kv_heads=2, vocabulary=8, positions=8192)
    ids = torch.randint(0, 8, (len(rows), tokens))
    mask = torch.ones_like(ids)
    for row, length in enumerate(rows):
        mask[row, : tokens - length] = 0
    with torch.no_grad(), kvpolicy.attach(model, policy), Largest() as seen:
        cache = PolicyCache(model)
        model(ids, attention_mask=mask, cache=cache)
        more = torch.ones(len(rows), tokens // 2, dtype=torch.int64)
        model(more, attention_mask=torch.cat([mask, more], 1), cache=cache)
    return seen.most, seen.where


METHODS = [
    *(words(selector) for selector in SELECTORS),
    "squeeze+window@0.5",
    "kvcrush:page=32/h2o@0.5",
    "kvcrush:buckets=distance:pick=best/window@0.5",
    "h2o+kivi@0.5",
    "full",
    "kvzip:chunk=128:sinks=2@0.5",
]
LOOKING = [
    *(words(name) for name in ("expected", "h2o", "kvcrush", "probe", "scissorhands")),
    "kvzip:chunk=128:sinks=2@0.5",
]
LOOKS = [(policy, bool(number % 2)) for number, policy in enumerate([*LOOKING, "h2o+kivi@0.5"])]
"""What looks at attention in a way of its own, every other one with padding."""


@product("policy,padded", METHODS, [False, True], sample=LOOKS)
def test_no_square(policy: str, padded: bool) -> None:
    """Less than one byte per pair of tokens, for all heads and rows together: not even a mask of bool fits in that."""
    most, where = largest(policy, 4096, [4096, 2700] if padded else [4096])
    assert most < 4096**2, where


def test_tiles_stay_small() -> None:
    """Doubling the prompt doubles what is held, and does not quadruple it."""
    small, large = (largest("h2o@0.25", tokens, [tokens])[0] for tokens in (2048, 4096))
    assert large <= 2.1 * small
