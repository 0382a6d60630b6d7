"""Layers that read the keys of earlier ones: they attend to their owner's slots, and hold nothing.

`test_layer_kinds.py` has what a cache with such layers does as all others.
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import kvpolicy
from kvpolicy.engine.layer_store import LayerStore
from kvpolicy.hf.cache_names import cache_argument
from kvpolicy.statistics.windows import ScoreTransform
from kvpolicy_eval.families.conversation import held_by
from kvpolicy_eval.families.oracle import oracle
from tests.conformance.models import SHARED, build
from tests.conformance.test_models import compare
from tests.engine.filled import prefilled, step, text

FAMILIES = [*SHARED]
TURNS = [(30, 0), (1, 1), (1, 2), (1, 3), (6, 4), (1, 5), (1, 6)]
"""Columns and seed of each forward: a prompt, steps, a second turn, steps."""


def off(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.std())


def mask_of(padding: list[int], columns: int) -> Tensor:
    mask = torch.ones(len(padding), columns, dtype=torch.int64)
    for row, count in enumerate(padding):
        mask[row, :count] = 0
    return mask


def played(model: Any, policy: str, padding: list[int], **options: Any) -> tuple[list[Tensor], list[dict[int, Tensor]]]:
    """Logits of all turns under a policy, and what each could see of the columns before."""
    logits: list[Tensor] = []
    seen: list[dict[int, Tensor]] = []
    with kvpolicy.attach(model, policy, **options):
        cache = kvpolicy.PolicyCache(model)
        for columns, seed in TURNS:
            before = held_by(cache, torch.tensor(padding)) if cache.is_initialized else {}
            mask = mask_of(padding, cache.get_seq_length() + columns)
            out = model(text(len(padding), columns, seed), attention_mask=mask, cache=cache)
            logits.append(out.logits[:, -1])
            seen.append(held_by(cache, torch.tensor(padding)) if columns == 1 else before)
    return logits, seen


def stock(model: Any, seen: list[dict[int, Tensor]], padding: list[int]) -> list[Tensor]:
    """The same of the stock model, which is shown the same columns."""
    logits: list[Tensor] = []
    cache = DynamicCache(config=model.config)
    total = 0
    with oracle(model) as read:
        for (columns, seed), now in zip(TURNS, seen, strict=True):
            total += columns
            read(now)
            given = {"attention_mask": mask_of(padding, total), **cache_argument(model.model, cache)}
            logits.append(model(text(len(padding), columns, seed), **given).logits[:, -1])
    return logits


@pytest.fixture(autouse=True)
def without_gradients() -> Any:
    with torch.no_grad():
        yield


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("padding", [[0, 0], [0, 5]])
@pytest.mark.parametrize(
    "policy", ["snapkv@0.5", "window@0.5", "h2o@0.4", "uniform/adakv+snapkv@0.4", "squeeze+kvcrush/snapkv@0.4"]
)
def test_layers_that_read_see_what_their_owner_holds(family: str, padding: list[int], policy: str) -> None:
    model = build(family)
    logits, seen = played(model, policy, padding)
    expected = stock(model, seen, padding)
    everything = stock(model, [{} for _ in TURNS], padding)
    assert max(map(off, logits, expected)) < 1e-4
    assert max(map(off, everything, expected)) > 0.05


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kept", [0, 1, 3])
@pytest.mark.parametrize("padding", [[0, 0], [0, 5]])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_full_is_stock_however_many_logits_are_asked_for(
    family: str, kept: int, padding: list[int], attention: str
) -> None:
    """Gemma 4 cuts the tokens of its reading layers to those, which it does in its own masks alone."""
    model = build(family)
    model.set_attn_implementation(attention)
    try:
        for columns in (10, 30):  # within a sliding window, and beyond it
            inputs = {"input_ids": text(2, columns), "attention_mask": mask_of(padding, columns)}
            expected = model(**inputs, logits_to_keep=kept).logits[:, -1]
            with kvpolicy.attach(model, "full"):
                assert off(model(**inputs, logits_to_keep=kept).logits[:, -1], expected) < 2e-5
                assert off(model(**inputs, logits_to_keep=kept, use_cache=False).logits[:, -1], expected) < 2e-5
    finally:
        model.set_attn_implementation("eager")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("policy", ["window@0.5", "snapkv@0.5", "kivi+h2o@0.5", "full"])
def test_the_last_token_alone_goes_through_reading_layers_if_no_other_query_counts(family: str, policy: str) -> None:
    model = build(family)
    last = model.model.layers[-1]
    cuts = "logits_to_keep" in inspect.signature(model.model.forward).parameters
    assert not (cuts and family == "gemma3n")
    seen: list[int] = []
    hook = last.mlp.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[-2]))
    with kvpolicy.attach(model, policy):
        model.generate(text(2, 20), max_new_tokens=2, do_sample=False)
    hook.remove()
    assert seen == [1 if cuts and policy in ("window@0.5", "full") else 20, 1]


@pytest.mark.parametrize("family", FAMILIES)
def test_reading_layers_hold_nothing(family: str) -> None:
    model = build(family)
    with kvpolicy.attach(model, "snapkv@0.5"):
        reading = prefilled(model).report().layers[4:]
    assert [layer.note for layer in reading] == [f"reads the keys of layer {owner}" for owner in (2, 3, 2, 3)]
    assert not any(sum(layer.nbytes.values()) for layer in reading)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_full_cache_holds_as_many_bytes_as_the_stock_one(family: str) -> None:
    model = build(family)
    stock_cache: Any = DynamicCache(config=model.config)
    model(text(2, 20), **cache_argument(model.model, stock_cache))
    held = [(layer.keys, layer.values) for layer in stock_cache.layers]
    nbytes = sum(t.nbytes for pair in held for t in pair if t is not None)
    with kvpolicy.attach(model, "full"):
        assert prefilled(model).full_nbytes == nbytes


@pytest.mark.parametrize("family", FAMILIES)
def test_budgets_are_those_of_layers_with_keys(family: str) -> None:
    model = build(family)
    with kvpolicy.attach(model, "squeeze+window@0.5"):
        cache = prefilled(model)
        assert cache.cosines().shape == (2, 2)
        assert [layer.layer_idx for layer in cache.policy_layers] == [1, 3]
        assert int(sum(int(layer.budget[0]) for layer in cache.policy_layers)) == 20


@pytest.mark.parametrize("family", FAMILIES)
def test_codes_are_read_by_all(family: str) -> None:
    """In 8 bits, so that keys which a layer should have read and did not would be seen."""
    model = build(family)
    logits, seen = played(model, "tokenwise:bits=8+h2o@0.5", [0, 0])
    assert max(map(off, logits, stock(model, seen, [0, 0]))) < 0.1


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("hold", ["plain", "codes"])
def test_held_chunks_keep_what_one_piece_keeps(family: str, hold: Any) -> None:
    model = build(family)
    policy = "tokenwise:bits=8+snapkv@0.5" if hold == "codes" else "snapkv@0.5"
    kept: list[list[Tensor]] = []
    for sizes in ([20], [9, 11]):
        with kvpolicy.attach(model, policy, chunks="hold", hold=hold):
            cache = kvpolicy.PolicyCache(model, prompt=20, new=4)
            *before, last = text(2, 20).split(sizes, 1)
            for part in before:
                model(part, cache=cache)
            logits = model(last, cache=cache).logits[:, -1]
            kept.append([logits, *(layer.head_positions.sort().values for layer in cache.policy_layers)])
    if hold == "plain":  # else what is attended to was decoded
        assert torch.allclose(kept[0][0], kept[1][0], atol=1e-4)
        assert all(map(torch.equal, kept[0][1:], kept[1][1:]))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("padding", [[0, 0], [0, 5]])
@pytest.mark.parametrize("policy", ["squeeze+h2o@0.5", "uniform/adakv+snapkv@0.5", "rotate+snapkv@0.5"])
def test_tiles_keep_what_one_piece_keeps(family: str, attention: str, padding: list[int], policy: str) -> None:
    """In a prompt and in a second turn, with layers' metrics and largest activations, too."""
    model = build(family)
    model.set_attn_implementation(attention)
    found: list[list[Tensor]] = []
    try:
        for tile in (None, 7):
            logits, seen = played(model, policy, padding, tile=tile)
            found.append([*logits, *(heads for each in seen for heads in each.values())])
    finally:
        model.set_attn_implementation("eager")
    for whole, tiled in zip(*found, strict=True):
        assert torch.equal(whole, tiled) if whole.dtype == torch.bool else off(tiled, whole) < 1e-4


def test_a_reading_layer_that_is_left_out_is_noticed() -> None:
    model = build("gemma3n")
    attention = model.model.layers[7].self_attn
    with kvpolicy.attach(model, "snapkv@0.5"):
        cache = prefilled(model)
        before = dict(attention._forward_pre_hooks)
        attention._forward_pre_hooks.clear()
        with pytest.raises(kvpolicy.KVPolicyError, match="without layer 7"):
            step(model, cache)
        attention._forward_pre_hooks.update(before)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("selector", ["kvzip", "snapkv", "h2o", "defensive", "critical/snapkv"])
def test_layers_that_read_count_where_tokens_are_ranked(family: str, selector: str) -> None:
    """As the reference ranks, to which the queries of all layers that read the same keys are those of one layer."""
    compare("uniform", selector, "plain", family, "padded", "fp32")


def test_what_cannot_be_exact_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("gemma4_shared")
    with pytest.raises(kvpolicy.KVPolicyError, match="keys of its own on several ranks"):
        kvpolicy.plan(model.config, "snapkv@0.5", prompt=20, tp=2)
    with kvpolicy.attach(model, "snapkv@0.5"):
        with pytest.raises(kvpolicy.KVPolicyError, match="return_shared_kv_states must be False"):
            model(text(1, 20), return_shared_kv_states=True)
        model(text(1, 20), return_shared_kv_states=True, use_cache=False)
    attention = model.model.layers[-1].self_attn
    monkeypatch.setattr(attention, "scaling", 2 * attention.scaling)  # other tests have the same model
    with kvpolicy.attach(model, "h2o@0.5"), pytest.raises(kvpolicy.KVPolicyError, match="scores into attention alike"):
        model(text(1, 20))


@pytest.mark.parametrize("family", FAMILIES)
def test_each_layer_chooses_what_it_reads(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its own queries, as if it were a layer whose slots these are."""
    model = build(family)
    layers: list[LayerStore] = []

    def read(self: LayerStore, q: Tensor, transform: ScoreTransform, step: Any) -> Any:
        out, step = original(self, q, transform, step)
        assert self.slots is not None
        torch.testing.assert_close(out, self.slots.reads.attend(q, transform, False)[0])
        layers.append(self)
        return out, step

    original = LayerStore.read
    monkeypatch.setattr(LayerStore, "read", read)
    with kvpolicy.attach(model, "quest:read=0.5:page=1:dense=0+window@12"):
        cache = prefilled(model)
        for token in (5, 6, 7):
            step(model, cache, token)
    assert len(layers) == 3 * 2
