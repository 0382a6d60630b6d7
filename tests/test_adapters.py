"""A scorer written for kvpress runs in our engine and keeps what kvpress would."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import kvpolicy
from kvpolicy.hf.adapters import KVPressScorer
from tests.conformance.models import VOCABULARY, build
from tests.conformance.policies import ALLOCATORS


@dataclass
class Knorm:
    """As kvpress' KnormPress; notes what it was given."""

    compression_ratio: float = 0.25

    def score(
        self, module: Any, hidden_states: Tensor, keys: Tensor, values: Tensor, attentions: Any, kwargs: dict[str, Any]
    ) -> Tensor:
        self.given = (module, hidden_states, keys, values, attentions, kwargs, self.compression_ratio)
        self.ratios = [*getattr(self, "ratios", []), self.compression_ratio]
        self.rotary = module.rotary_emb
        return -keys.norm(dim=-1)


@dataclass
class Streaming:
    """As kvpress' StreamingLLMPress: its scores mean something only at its own ratio."""

    compression_ratio: float = 0.0

    def score(self, *given: Any) -> Tensor:
        keys = given[2]
        length = given[2].shape[2]
        score = torch.ones_like(keys[..., 0])
        score[:, :, 4 : 4 + length - int(length * (1 - self.compression_ratio))] = 0
        return score


class Says:
    """Gives what it was told to."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def score(self, *given: Any) -> Any:
        return self.answer(given[2]) if callable(self.answer) else self.answer


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        num_hidden_layers=3, hidden_size=64, num_attention_heads=4, num_key_value_heads=2, vocab_size=99
    )
    return LlamaForCausalLM(config).eval()


IDS = torch.randint(1, 99, (2, 24), generator=torch.Generator().manual_seed(1))
MASK = torch.ones(2, 24, dtype=torch.long)
MASK[1, :9] = 0


def _kept(cache: Any, layer: int, row: int = 0) -> list[list[int]]:
    return [sorted(p for p in head if p >= 0) for head in cache.layers[layer].positions[row].tolist()]


def _policy(press: Any, budget: Any = 8, **options: Any) -> kvpolicy.Policy:
    return kvpolicy.Policy(selector=KVPressScorer(press, **options), budget=budget)


@torch.no_grad()
def test_keeps_the_top_of_its_scores(model: Any) -> None:
    full = model(IDS).cache
    with kvpolicy.attach(model, _policy(Knorm())) as handle:
        model(IDS)
    for index, layer in enumerate(full.layers):
        top = (-layer.keys.norm(dim=-1)).topk(8, dim=-1).indices.sort(dim=-1).values
        for row in range(2):
            assert _kept(handle.cache, index, row) == top[row].tolist()


@torch.no_grad()
def test_is_given_what_kvpress_gives(model: Any) -> None:
    press = Knorm()
    full = model(IDS).cache
    with kvpolicy.attach(model, _policy(press)):
        model(IDS)
    module, hidden, keys, values, attentions, kwargs, ratio = press.given
    assert module is model.model.layers[2].self_attn and press.rotary is model.model.rotary_emb
    assert not hasattr(module, "rotary_emb") and "rotary_emb" not in dict(module.named_modules())
    assert hidden.shape == (2, 24, 64) and attentions is None
    torch.testing.assert_close(keys, full.layers[2].keys)
    torch.testing.assert_close(values, full.layers[2].values)
    assert [t.shape for t in kwargs["position_embeddings"]] == [(1, 24, 16)] * 2
    assert not {"cache", "past_key_values", "kv_slots", "attention_mask"} & set(kwargs)
    assert int(24 * (1 - ratio)) == 8 and press.compression_ratio == 0.25  # its own again


@torch.no_grad()
def test_a_ratio_that_scores_depend_on_is_the_layers(model: Any) -> None:
    with kvpolicy.attach(model, _policy(Streaming())) as handle:
        model(IDS)
    assert _kept(handle.cache, 0) == [[0, 1, 2, 3, 20, 21, 22, 23]] * 2


@torch.no_grad()
@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_a_padded_row_is_itself_alone(model: Any, allocator: str) -> None:
    from kvpolicy.registry import lookup

    policy = kvpolicy.Policy(allocator=lookup(allocator)[1](), selector=KVPressScorer(Knorm()), budget=0.4)
    with kvpolicy.attach(model, policy) as handle:
        both = model.generate(IDS, attention_mask=MASK, max_new_tokens=6, do_sample=False, pad_token_id=0)
        batch = handle.cache
        alone = model.generate(IDS[1:, 9:], max_new_tokens=6, do_sample=False, pad_token_id=0)
    assert both[1, 24:].tolist() == alone[0, 15:].tolist()
    assert [_kept(batch, i, 1) for i in range(3)] == [_kept(handle.cache, i) for i in range(3)]


@torch.no_grad()
def test_chunks_are_scored_with_all_that_is_on_offer(model: Any) -> None:
    press = Knorm()
    with kvpolicy.attach(model, _policy(press)) as handle:
        cache = kvpolicy.PolicyCache(model, prompt=24)
        model(IDS[:, :14], cache=cache)
        first = _kept(cache, 0)
        model(IDS[:, 14:], cache=cache)
        model(IDS)
    chunked = _kept(cache, 0)
    _, hidden, keys, *_ = press.given
    assert hidden.shape[1] == keys.shape[2] == 24
    assert len(first[0]) == 8 and chunked == _kept(handle.cache, 0)  # a norm does not depend on the chunk


@torch.no_grad()
def test_grows_by_default_and_evicts_where_asked(model: Any) -> None:
    with kvpolicy.attach(model, _policy(Knorm())) as handle:
        model.generate(IDS[:1], max_new_tokens=7, do_sample=False)
        assert len(_kept(handle.cache, 0)[0]) == 8 + 6
    with kvpolicy.attach(model, _policy(Knorm(), decode="evict", window=3)) as handle:
        model(IDS[:1])
        best = model.model.layers[0].self_attn and _kept(handle.cache, 0)
        cache = handle.cache
        for step in range(9):
            model(torch.tensor([[step + 1]]), cache=cache)
        kept = _kept(cache, 0)
    for head in range(2):
        assert kept[head][-3:] == [30, 31, 32] and len(kept[head]) == 8
        assert set(kept[head][:-3]) <= set(best[head])  # the window pushed out the three lowest, and nothing more


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_attentions_are_those_of_the_model(family: str) -> None:
    """Also of capped scores, and beside learned sinks; layers of a window have no scorer."""
    model = build(family)
    ids = IDS % VOCABULARY
    seen: list[Tensor] = []

    class Observed:
        def score(self, *given: Any) -> Tensor:
            seen.append(given[4])
            return given[4].sum(2).unflatten(1, (2, 2)).mean(2)

    eager = copy.deepcopy(model)
    eager.set_attn_implementation("eager")
    wanted = eager(ids, output_attentions=True).attentions
    with kvpolicy.attach(model, _policy(Observed(), attentions=True)):
        model(ids)
    wanted = wanted if family == "llama" else wanted[1::2]
    for ours, theirs in zip(seen, wanted, strict=True):
        torch.testing.assert_close(ours, theirs)


@torch.no_grad()
def test_goes_with_every_part(model: Any) -> None:
    selector = kvpolicy.KVCrush(base=KVPressScorer(Knorm(), decode="evict"))
    policy = kvpolicy.Policy(
        allocator=kvpolicy.SqueezeAttention(), selector=selector, codec=kvpolicy.KIVI(bits=4), budget=0.5
    )
    with kvpolicy.attach(model, policy) as handle:
        model.generate(IDS, attention_mask=MASK, max_new_tokens=4, do_sample=False, pad_token_id=0)
        assert handle.cache is not None and handle.plan is not None
        assert handle.cache.nbytes == handle.plan.nbytes


@torch.no_grad()
def test_what_need_not_be_scored_is_not(model: Any) -> None:
    press = Knorm()
    with kvpolicy.attach(model, _policy(press, budget=24)):
        model(IDS)
    assert not hasattr(press, "given")
    with kvpolicy.attach(model, _policy(press, budget=20)):
        model(IDS, attention_mask=MASK)  # the second row has 15 tokens
    assert len(press.ratios) == 3


def test_says_what_it_is() -> None:
    press = Knorm()
    first = KVPressScorer(press)
    second = KVPressScorer(press)
    assert first == second and hash(first) == hash(second)
    assert first != KVPressScorer(Knorm()) and first != KVPressScorer(press, decode="evict")
    words = str(_policy(press))
    assert "KVPressScorer(Knorm(compression_ratio=0.25), decode='grow'" in words
    with pytest.raises(ValueError):
        kvpolicy.Policy.parse(words)


def test_refuses_what_is_no_scorer() -> None:
    with pytest.raises(TypeError, match="must be an instance, got the class Knorm"):
        KVPressScorer(Knorm)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match=r"must have a method score\(module, .*, got a object"):
        KVPressScorer(object())  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"window must be at least 1, .* got 0"):
        KVPressScorer(Knorm(), window=0)
    with pytest.raises(TypeError, match=r"window must be an integer, got 2\.5"):
        KVPressScorer(Knorm(), window=2.5)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"decode must be one of 'evict', 'grow', got 'slide'"):
        KVPressScorer(Knorm(), decode="slide")  # pyright: ignore[reportArgumentType]


@torch.no_grad()
@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (None, r"a score per token, \(2, 2, 24\), got NoneType"),
        (lambda keys: keys[:, 0, :, 0], r"a score per token, \(2, 2, 24\), got \(2, 24\)"),
        (lambda keys: keys[..., 0] * float("nan"), "must return numbers, got NaN"),
        (lambda keys: keys.view(7), "Says.score must score the 24 tokens of layer 0, got an error: "),
    ],
)
def test_a_wrong_answer_is_one_sentence(model: Any, answer: Any, message: str) -> None:
    with kvpolicy.attach(model, _policy(Says(answer))), pytest.raises((ValueError, RuntimeError), match=message):
        model(IDS)
    assert not hasattr(model.model.layers[0].self_attn, "rotary_emb")


OWN = ("CUR", "Cap", "Compactor", "ExpectedAttention", "KeyDiff", "Knorm", "LagKV", "LeverageScore", "NonCausalAttn")
OTHERS = ("ObservedAttention", "PyramidKV", "SnapKV", "StreamingLLM", "TOVA")


@torch.no_grad()
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [*OWN, *OTHERS])
def test_real_presses_run(model: Any, name: str) -> None:
    kvpress = pytest.importorskip("kvpress")
    torch.manual_seed(0)
    ids = torch.randint(1, 99, (2, 300))
    mask = torch.ones(2, 300, dtype=torch.long)
    mask[1, :80] = 0
    policy = _policy(getattr(kvpress, f"{name}Press")(), budget=0.5, attentions=name == "ObservedAttention")
    with kvpolicy.attach(model, policy) as handle:
        torch.manual_seed(1)
        places = (mask.cumsum(-1) - 1).clamp_min(0)
        model(ids, attention_mask=mask, position_ids=places)
        batch = handle.cache
        torch.manual_seed(1)
        model(ids[1:, 80:])
    assert [len(head) for head in _kept(batch, 0, 1)] == [110, 110]
    if name != "Compactor":  # draws for the first row first
        assert [_kept(batch, i, 1) for i in range(2)] == [_kept(handle.cache, i) for i in range(2)]
