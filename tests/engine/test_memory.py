"""Rule 6: a layer's prompt is compressed and freed before the next layer runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

import kvpolicy
from kvpolicy import Policy, PolicyCache
from kvpolicy.statistics import Replay
from kvpolicy.statistics.statistic import first_of
from kvpolicy_eval.bench.models import llama
from tests.conformance.access import Attend, attending
from tests.conformance.policies import CODECS, SELECTORS, with_profile, words
from tests.engine.live import Alive, stored_bytes
from tests.sampling import each_once, product

LAYERS = 3
TOKENS = 512


CHOSEN = [*SELECTORS, "kvcrush:page=16/h2o"]
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


@product("selector", SELECTORS, sample=[("window",), ("h2o",), ("snapkv",), ("expected",), ("kvzip",)])
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
