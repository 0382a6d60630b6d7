"""Pages of codes against one list of tokens for each head, coded number by number."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kvpolicy
from kvpolicy import Policy
from kvpolicy.allocators.adakv import AdaKV
from kvpolicy.codecs import common
from kvpolicy.engine import page_codes
from kvpolicy.engine.coded_pages import CodedPageBody
from kvpolicy.engine.row_limits import RowBudget
from kvpolicy.statistics.windows import ScoreTransform
from tests.codecs.compiling import call_directly
from tests.conformance.models import build
from tests.conformance.play import make_batch, talk
from tests.engine.paged import HEADS, SCALE, Run
from tests.engine.parts import pages_of

TOKENWISE = "tokenwise:group_size=2:residual_length=3:block_size=4"
CODECS = [
    TOKENWISE,
    "tokenwise:normalize=false:residual_length=0:block_size=1",
    "bfp:block_channels=3:residual_length=2:block_size=5",
    "turboquant:residual_length=3:block_size=2",
]


BOTH: dict[str, Any] = {"softcap": 2.0, "sinks": torch.linspace(-2, 3, HEADS * 2)}


@pytest.mark.parametrize(
    ("codec", "transform", "direct"),
    [
        *((codec, {}, False) for codec in CODECS),
        ("tokenwise:group_size=4:residual_length=3:block_size=4", {}, True),
        *((codec, BOTH, True) for codec in CODECS),
    ],
)
def test_prompts_and_steps_are_those_of_a_list(
    codec: str, transform: dict[str, Any], direct: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of pages that are decoded, and read without: but for blocks of 3 of 8 channels, which are unequal."""
    called = call_directly(monkeypatch) if direct else []
    run = Run("h2o", AdaKV(safeguard=0.0), [24, 12], codec=codec, dim=8, **transform)
    run.prompt([40, 23])
    for number in range(9):
        run.step(valid=[True, number % 3 != 1])
    reads = [name for name in called if name != "quantize"]
    assert len(reads) == (18 if direct and not codec.startswith("bfp") else 0)
    run.prompt([7, 0])  # a chunk or a turn in which the second row has nothing
    for _ in range(5):
        run.step()


def test_pages_that_change_hands_keep_the_parameters_of_their_head() -> None:
    """Heads swap which attends to many tokens, so that pages of one head become the other's."""
    run = Run("h2o", AdaKV(safeguard=0.0), [24], codec=TOKENWISE)
    for turn in range(3):
        q, k, v = run.draw(30)
        # Channels of very different means by head: the parameters of another head would be far off.
        k = k + torch.arange(HEADS)[:, None, None] * torch.linspace(-50, 50, k.shape[-1])
        q = q * torch.tensor([0.0, 0.02, 1.0]).roll(turn).repeat_interleave(2)[:, None, None]
        run.prompt([30], (q, k, v))
        run.step()
    assert len({*run.store.geometry.tokens_by_head()[0].tolist()}) > 1


def test_an_automatic_buffer_grows_with_its_row() -> None:
    run = Run("h2o", AdaKV(), [20], grows=True, codec="tokenwise:group_size=2")
    store = run.store
    q, k, v = run.draw(30)
    store.initialize(k, group=2)
    _, pending = store.attend_prompt(q, k, v, None, ScoreTransform(SCALE))
    keep, extra, last = (torch.tensor([count]) for count in (20, 5, 30))
    store.compress(pending, RowBudget(keep, extra, keep + extra, last))
    small = store.layout.exact
    store.reserve(130)
    assert store.tensors.limits is not None
    assert store.layout.exact == int(store.tensors.limits.flush_threshold) > small, "as many as wait for a demotion"
    held = store.geometry.tokens_by_head()
    for count in range(1, 8):
        store.append(*run.draw(1), None, ScoreTransform(SCALE))
        store.count_step()
        assert torch.equal(store.geometry.tokens_by_head(), held + count)


def test_a_few_pages_are_decoded_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_codes, "CHUNK_SLOTS", 9)
    run = Run("h2o", AdaKV(), [40], codec=TOKENWISE)
    run.prompt([60])
    body = pages_of(run.store)._body
    assert isinstance(body, CodedPageBody)
    pages = run.store.tensors.paged().owner.shape[1]
    assert body.owner.shape[1] < pages, "the buffers stand behind the pages of codes"
    monkeypatch.setattr(common, "MAX_CHUNKS", pages)
    for _ in range(3):
        run.step()


@pytest.mark.parametrize(
    "spec",
    [
        "uniform/adakv+h2o+tokenwise@0.3",
        "squeeze/adakv+snapkv:window=4:kernel=3+bfp:residual_length=3@0.5",
        "uniform/adakv+h2o:decode=grow+turboquant@0.4",
        "uniform/even+h2o+tokenwise:bits=fp8:block_size=6@12000B",
        "uniform/adakv+expected:sinks=2:horizon=6:decode=grow@0.5",
    ],
)
def test_the_plan_is_what_is_held(spec: str) -> None:
    model = build("llama")
    tokens, mask = make_batch([40, 27], [43])
    with kvpolicy.attach(model, spec):
        cache = kvpolicy.PolicyCache(model)
        talk(model, tokens, mask, [40, 1, 1, 1], cache)
        assert cache.plan is not None and cache.nbytes == cache.plan.nbytes
        assert cache.nbytes <= 12000 or "B" not in spec.partition("@")[2]
        for layer, shown in zip(cache.policy_layers, cache.report().layers, strict=True):
            assert [list(row) for row in shown.heads] == layer.store.geometry.tokens_by_head().tolist()
    for layer in cache.policy_layers:
        assert layer.owner is not None and layer.owner.shape == layer.positions.shape[:2]
        held = [set(layer.positions[0][layer.owner[0] == head].flatten().tolist()) - {-1} for head in range(2)]
        assert [len(head) for head in held] == layer.store.geometry.tokens_by_head()[0].tolist()


@pytest.mark.parametrize("codec", ["kivi", "gear", "rotate", "kvquant", "mikv", "zipcache", "staircase", "minicache"])
def test_codecs_that_share_more_than_a_head_are_refused(codec: str) -> None:
    with pytest.raises(kvpolicy.KVPolicyError, match=r"must encode every token by itself .* try tokenwise or bfp"):
        Policy.parse(f"uniform/adakv+snapkv+{codec}@0.5")


@pytest.mark.parametrize("policy", ["uniform/adakv+expected@0.5", "uniform/even+keydiff:decode=grow@0.5"])
def test_selectors_that_look_at_keys_in_steps_are_refused(policy: str) -> None:
    with pytest.raises(kvpolicy.KVPolicyError, match=r"must not look at keys, or all slots .* try snapkv, h2o or exp"):
        Policy.parse(policy)
