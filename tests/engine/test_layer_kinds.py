"""Layers with a state, with latent vectors, or with the keys of earlier layers do what all layers do.

That is: plans, rows, forks, marks, files, resets, shared prefixes and compiled steps.
"""

from __future__ import annotations

import copy
import itertools
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kvpolicy
from kvpolicy.hf import cache_file
from kvpolicy.hf.cache_names import cache_argument
from kvpolicy.hf.dense_cache import skeleton
from kvpolicy.hf.forward_calls import check_step
from kvpolicy.hf.latent import LatentSlots
from kvpolicy.hf.projection import matrix_of
from kvpolicy.hf.states import States
from kvpolicy.tuning.tap import tapped
from tests.conformance.masked import differences
from tests.conformance.models import LATENT, SHARED, build
from tests.conformance.play import TURNS, forward, make_batch
from tests.engine.filled import prefilled, step, text

STATES = ["qwen3_5", "granite_hybrid", "falcon_h1", "lfm2", "nemotron_h"]
"""Linear attention, a state space model, both in one layer, convolutions, and layers that hold nothing."""
FAMILIES = [*STATES, *LATENT, *SHARED]
SNAPKV = "snapkv@0.5"
CODED = ["h2o+kivi:group_size=4:residual_length=4@0.5", "full+tokenwise:bits=8"]


@pytest.fixture(autouse=True)
def without_gradients() -> Any:
    with torch.no_grad():
        yield


def states(cache: Any) -> list[Tensor]:
    """Copies of all states of a cache."""
    return [state for layer in cache.layers if isinstance(layer, States) for state in layer.copy_states()]


@pytest.mark.parametrize(
    ("family", "policy"),
    [
        *((family, SNAPKV) for family in [*FAMILIES, "mimo_v2_flash"]),
        *((family, policy) for family in [*LATENT, "mimo_v2_flash"] for policy in CODED),
    ],
)
def test_planned_bytes_are_held(family: str, policy: str) -> None:
    model = build(family)
    planned = kvpolicy.plan(model.config, policy, batch=2, prompt=20, new=8)
    with kvpolicy.attach(model, policy):
        cache = prefilled(model)
        sizes = [state.nbytes for state in states(cache)]
        for _ in range(8):
            step(model, cache)
        assert (cache.nbytes, cache.full_nbytes) == (planned.nbytes, planned.full_nbytes)
        assert [state.nbytes for state in states(cache)] == sizes, "states do not grow"
        report = cache.report()
    assert sum(layer.nbytes.get("state", 0) for layer in report.layers) == sum(sizes)
    assert cache.nbytes == report.nbytes == sum(sum(layer.nbytes.values()) for layer in report.layers)


@pytest.mark.parametrize(
    ("family", "policy"),
    [
        *((family, SNAPKV) for family in FAMILIES),
        ("deepseek_v3", "h2o+tokenwise:bits=8:residual_length=2:block_size=2@0.6"),
    ],
)
def test_rows_are_selected_repeated_forked_and_saved(family: str, policy: str, tmp_path: Path) -> None:
    model = build(family)
    path = str(tmp_path / "cache.safetensors")
    with kvpolicy.attach(model, policy):
        cache = prefilled(model, rows=3)
        fork = cache.fork([2, 0])
        repeated = cache.fork([1, 1])
        other = cache.fork([1])
        other.batch_repeat_interleave(2)
        cache.save(path)
        loaded = kvpolicy.PolicyCache.load(model, path)
        assert loaded.nbytes == cache.nbytes
        for token in (5, 6):
            expected = step(model, cache, token)
            assert torch.equal(step(model, loaded, token), expected)
            assert torch.allclose(step(model, fork, token), expected[[2, 0]], atol=1e-5)
            assert torch.equal(step(model, repeated, token), step(model, other, token))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("accepted", [0, 2, 3])
def test_steps_are_undone_bit_for_bit(family: str, accepted: int) -> None:
    model = build(family)
    with kvpolicy.attach(model, "h2o@8"):
        cache = prefilled(model)
        other = cache.fork()
        before = cache.nbytes
        cache.mark(most=3)
        for token in (5, 6, 7):
            step(model, cache, token)
        assert cache.nbytes > before + 3 * sum(state.nbytes for state in states(cache))
        cache.rollback(accepted)
        assert cache.nbytes == before
        for token in (5, 6, 7)[:accepted]:
            step(model, other, token)
        assert all(torch.equal(*pair) for pair in zip(states(cache), states(other), strict=True))
        assert torch.equal(step(model, cache), step(model, other))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_reset_cache_takes_another_number_of_rows(family: str) -> None:
    model = build(family)
    with kvpolicy.attach(model, SNAPKV):
        cache = prefilled(model, rows=2)
        cache.reset()
        cache.expect(20, 8)
        again = model(text(3, 20), cache=cache).logits[:, -1]
        assert torch.equal(again, model(text(3, 20), cache=kvpolicy.PolicyCache(model, prompt=20, new=8)).logits[:, -1])


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_that_share_a_prefix_answer_as_one_alone(family: str) -> None:
    model = build(family)
    with kvpolicy.attach(model, "full"):  # what is shared is never evicted
        cache = prefilled(model, rows=1)
        alone = cache.fork()
        shared = cache.fork([0, 0], shared=True)
        for turn in (text(1, 5, 1), text(1, 1, 2), text(1, 1, 3)):
            expected = model(turn, cache=alone).logits[:, -1]
            found = model(turn.expand(2, -1), cache=shared).logits[:, -1]
            assert torch.allclose(expected.expand_as(found), found, atol=1e-4)


@pytest.mark.parametrize(
    ("family", "backend"),
    [("granite_hybrid", "eager"), ("deepseek_v3", "aot_eager"), *((family, "eager") for family in SHARED)],
)
def test_a_compiled_step_is_one_graph(family: str, backend: str) -> None:
    model = build(family)
    with kvpolicy.attach(model, SNAPKV):
        eager = prefilled(model)
        compiled = prefilled(model)
        run = torch.compile(model, backend=backend, fullgraph=True)
        for token in (5, 6, 7):
            expected = step(model, eager, token)
            found = run(torch.full((2, 1), token), **cache_argument(model, compiled)).logits[:, -1]
            compiled.tick()
            assert torch.allclose(found, expected, atol=1e-5)
    torch.compiler.reset()


@pytest.mark.parametrize("family", ["deepseek_v3", *SHARED])
def test_beams_are_those_of_the_stock_cache(family: str) -> None:
    model = build(family)
    mask = torch.ones(2, 20, dtype=torch.int64)
    options: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 6, "num_beams": 3, "do_sample": False}
    expected = model.generate(text(2, 20), pad_token_id=0, **options)
    with kvpolicy.attach(model, "window@64"):
        assert torch.equal(model.generate(text(2, 20), pad_token_id=0, **options), expected)


def test_a_file_without_its_states_is_refused(tmp_path: Path) -> None:
    model = build("falcon_h1")
    path = tmp_path / "cache.safetensors"
    with kvpolicy.attach(model, "snapkv@0.5"):
        prefilled(model).save(path)
        content = cache_file.read(path)
        del content.tensors["layers.1.recurrent.0"]
        cache_file.write(path, content, deflates=False)
        with pytest.raises(kvpolicy.KVPolicyError):
            kvpolicy.PolicyCache.load(model, path)


@pytest.mark.parametrize("family", STATES)
def test_a_replay_leaves_states_as_they_are(family: str) -> None:
    model = build(family)
    with kvpolicy.attach(model, "full"):
        expected = states(prefilled(model))
    with kvpolicy.attach(model, "kvzip:chunk=8@0.6"):
        found = states(prefilled(model))
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


@pytest.mark.parametrize("family", ["qwen3_5", "falcon_h1"])
def test_padded_tiles_keep_what_one_piece_keeps(family: str) -> None:
    model = build(family)
    mask = torch.ones(2, 20, dtype=torch.int64)
    mask[0, :5] = 0
    found: list[Any] = []
    for tile in (None, 7):
        with kvpolicy.attach(model, "snapkv@0.5", tile=tile) as handle:
            logits = model(text(2, 20), attention_mask=mask).logits[:, -1]
            assert handle.cache is not None
            found.append((logits, [layer.head_positions.sort().values for layer in handle.cache.policy_layers]))
    assert torch.allclose(found[0][0], found[1][0], atol=1e-4)
    assert all(map(torch.equal, found[0][1], found[1][1]))


@pytest.mark.parametrize("family", [*STATES, "kimi_linear"])
@pytest.mark.parametrize("begun", [True, False])
def test_rows_without_a_token_keep_their_states(family: str, begun: bool) -> None:
    """In a step and in a chunk, of a row with tokens before, and of one that is padding alone so far."""
    model = build(family)
    ids = text(2, 37)
    mask = torch.ones_like(ids)
    mask[1, 20 if begun else 0 : 26] = 0
    columns = [0, 20, 21, 26, 36, 37]
    with kvpolicy.attach(model, "full"):
        cache = kvpolicy.PolicyCache(model)
        pieces = [forward(model, ids, mask, start, end, cache) for start, end in itertools.pairwise(columns)]
        for row, found in enumerate(torch.cat(pieces, 1)):
            seen = mask[row].bool()
            expected = model(ids[row, seen][None]).logits[0]
            assert torch.allclose(found[seen], expected, atol=1e-3)


@pytest.mark.parametrize(("first", "row"), [([[1, 0, 1], [1, 1, 1]], 0), ([[0, 0, 1], [0, 1, 1]], None)])
def test_padding_between_tokens_would_move_states(first: list[list[int]], row: int | None) -> None:
    """Within a forward, and in front of the later tokens of a row, but not before all."""
    model = build("lfm2")
    ids, mask = text(2, 5), torch.tensor([[*line, 1, 1] for line in first])
    start, end = 0, 3
    with kvpolicy.attach(model, "full"):
        cache = kvpolicy.PolicyCache(model)
        if row is None:
            forward(model, ids, mask, 0, 3, cache)
            row, start, end = 1, 3, 5
            mask[1, 3] = 0
        before = states(cache)
        with pytest.raises(kvpolicy.KVPolicyError, match=f"between the tokens of a row .* in row {row}; try rows with"):
            forward(model, ids, mask, start, end, cache)
        assert all(map(torch.equal, before, states(cache)))


def test_questions_behind_a_shared_text_have_states_before_them() -> None:
    model = build("lfm2")
    ids, mask = text(1, 14).expand(2, -1), torch.ones(2, 14, dtype=torch.int64)
    mask[1, 8:10] = 0
    with kvpolicy.attach(model, "full"):
        cache = kvpolicy.PolicyCache(model)
        model(ids[:1, :8], cache=cache)
        for shared in (True, False):
            with pytest.raises(kvpolicy.KVPolicyError, match=r"between the tokens of a row .* in row 1; try rows with"):
                forward(model, ids, mask, 8, 14, cache.fork([0, 0], shared=shared))


@pytest.mark.parametrize(("family", "row", "times"), [("lfm2", [1, 0], 1), ("lfm2", [0, 0], 0), ("llama", [1, 0], 0)])
def test_padding_behind_the_last_token_is_warned_of_once(family: str, row: list[int], times: int) -> None:
    model = build(family)
    ids = text(2, 2)
    mask = torch.tensor([[1, 1], row])
    with kvpolicy.attach(model, "full"), warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(2):
            forward(model, ids, mask, 0, 2, kvpolicy.PolicyCache(model))
    assert sum("must not go on; pad in front" in str(each.message) for each in found) == times


def test_what_a_state_does_not_allow_is_refused() -> None:
    model = build("qwen3_5")
    with kvpolicy.attach(model, "full"):
        shared = prefilled(model, rows=1).fork([0, 0], shared=True)
        model(text(2, 1), cache=shared)
        with pytest.raises(kvpolicy.KVPolicyError, match="which has moved on"):
            shared.reset()
        cache = prefilled(model)
        with pytest.raises(kvpolicy.KVPolicyError, match="layers with a state"):
            cache.shift(10, -2)
        with pytest.raises(kvpolicy.KVPolicyError, match="the state of layer 0"):
            cache.crop(-1)
        cache.mark(most=2)
        with pytest.raises(kvpolicy.KVPolicyError, match="must not be compiled under a mark"):
            check_step(model.model, (), {"input_ids": torch.full((2, 1), 7), "cache": cache})
    with pytest.raises(kvpolicy.KVPolicyError, match="a state in layer 0"):
        kvpolicy.speculate(model, "window@0.5", text(1, 20), max_new_tokens=4)


@pytest.mark.parametrize(
    ("family", "policy"),
    [
        *itertools.product(LATENT, ["snapkv:window=6:kernel=3@0.5", "h2o@8", "squeeze+window@0.4"]),
        ("mimo_v2_flash", "snapkv:window=6:kernel=3@0.5"),
        ("mimo_v2_flash", "uniform/adakv+snapkv:window=6:kernel=3@0.5"),
    ],
)
def test_evicting_equals_the_masked_stock_model(family: str, policy: str) -> None:
    ids, mask = make_batch([26, 26] if family == "kimi_linear" else [26, 11])
    found = differences(build(family), policy, ids, mask, TURNS)
    assert found["policy"] < 1e-4 and found["unmasked"] > 0.05, found


@pytest.mark.parametrize("family", LATENT)
def test_a_token_is_held_once(family: str) -> None:
    """As many numbers as in the stock cache: the latent vector and the rotated key."""
    model = build(family)
    stock = model(text(2, 20)).cache
    with kvpolicy.attach(model, "full"):
        cache = prefilled(model, new=0)
    for own, other in zip(cache.layers, stock.layers, strict=True):
        if isinstance(own, LatentSlots):
            assert own.held()["exact"] == other.keys.nbytes + other.values.nbytes
            assert own.keys.shape[1] == 1 and own.values.shape[3] == 0
            assert vars(own).get("_given") is None  # of the prompt


def test_codes_hold_no_values() -> None:
    with kvpolicy.attach(build("deepseek_v3"), "full+tokenwise:bits=8:residual_length=2:block_size=2"):
        layer = prefilled(build("deepseek_v3")).policy_layers[0]
        (codes,) = layer.store.tensors.codes
    assert codes.keys.shape[2] > 0 and not sum(t.numel() for t in (codes.values, codes.value_scale, codes.value_zero))


def test_norms_of_values_are_those_behind_both_weights() -> None:
    """What a latent vector adds to the residual stream, against the expanded values of the stock model."""
    model = build("deepseek_v3")
    attention: Any = model.model.layers[0].self_attn
    with kvpolicy.attach(model, "critical/h2o@0.5") as handle:
        prefilled(model)
        assert handle.cache is not None
        projection = handle.cache.attachment.projections[0]()
    latent = torch.randn(1, 1, 5, attention.kv_lora_rank)
    _, values = attention.expand_kv(latent, torch.zeros(1, 1, 5, attention.qk_rope_head_dim))
    weight = attention.o_proj.weight.unflatten(1, (-1, attention.v_head_dim))
    expected = torch.einsum("bhpd,mhd->bhpm", values, weight)
    found = torch.einsum("bpr,mhr->bhpm", latent[:, 0], projection.unflatten(1, (-1, attention.kv_lora_rank)))
    assert torch.allclose(found, expected, atol=1e-4)


class _Scaled(nn.Linear):
    """A module whose weight has a scale beside it, as where it is quantized."""

    def forward(self, input: Tensor) -> Tensor:
        return nn.functional.linear(input, self.weight.to(input.dtype) * 4)


def test_the_matrix_of_a_weight_in_fp8_is_read_off() -> None:
    part = _Scaled(3, 5, bias=False)
    part.weight = nn.Parameter(torch.randn(5, 3).to(torch.float8_e4m3fn), requires_grad=False)
    found = matrix_of(part, torch.zeros(1, 3), "a test")
    assert torch.equal(found, part.weight.float() * 4)


@pytest.mark.parametrize("how", ["scaled", "offloaded"])
def test_the_matrix_is_read_off_where_the_weight_is_another(how: str) -> None:
    model = copy.deepcopy(build("deepseek_v3"))
    ids = text(2, 20)
    expected = model(ids).logits
    if how == "offloaded":
        pytest.importorskip("accelerate").cpu_offload(model, execution_device="cpu")
    for layer in model.model.layers if how == "scaled" else ():
        own = layer.self_attn.kv_b_proj
        layer.self_attn.kv_b_proj = _Scaled(own.in_features, own.out_features, bias=False)
        layer.self_attn.kv_b_proj.weight.copy_(own.weight / 4)
    with kvpolicy.attach(model, "full"):
        cache = kvpolicy.PolicyCache(model)
        found = torch.cat([model(part, cache=cache).logits for part in ids.split([15, 5], 1)], 1)
    assert (found - expected).abs().max() < 3e-5 * expected.std()


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        ("uniform/adakv+h2o+tokenwise@0.5", "The codec must be plain with budgets of heads for values of 8"),
        ("uniform/adakv+snapkv@0.5", "Heads must have no budgets of their own for latent attention"),
        ("expected@0.5", "must not be undone for latent attention .* got the selector of expected"),
        ("h2o+gear@0.5", "must encode keys and values separately for latent attention .* got gear"),
        ("h2o+rotate@0.5", "must encode keys and values separately"),
        ("h2o+blend@0.5", "must merge keys for latent attention .* got blend"),
        ("h2o+regress@0.5", "must merge keys for latent attention .* got regress"),
        ("h2o+merge@0.5", "must merge keys for latent attention .* got merge"),
        ("streaming+shadowkv@0.5", "must not be undone"),
    ],
)
def test_what_is_refused_is_refused_by_plan_too(policy: str, words: str) -> None:
    model = build("mimo_v2_flash" if "values of 8" in words else "deepseek_v3")
    with pytest.raises(kvpolicy.KVPolicyError, match=words):
        kvpolicy.attach(model, policy)
    with pytest.raises(kvpolicy.KVPolicyError, match=words):
        kvpolicy.plan(model.config, policy, prompt=20)
    assert torch.isfinite(model(text(1, 5)).logits).all()


def test_what_latent_vectors_do_not_allow_is_refused() -> None:
    model = build("deepseek_v3")
    with kvpolicy.attach(model, "full"):
        cache = prefilled(model)
        with pytest.raises(kvpolicy.KVPolicyError, match="for tokens to be moved"):
            cache.shift(10, -2)
    with pytest.raises(kvpolicy.KVPolicyError, match="Values must have the size of keys for hold='codes'"):
        kvpolicy.attach(model, "h2o+tokenwise@0.5", hold="codes")
    with pytest.raises(kvpolicy.KVPolicyError, match="Values must have the size of keys to be measured"), tapped(model):
        pass
    assert torch.isfinite(model(text(1, 5)).logits).all()
    with pytest.raises(kvpolicy.KVPolicyError, match="got deepseek_v3 with latent attention"):
        skeleton(model.config)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # by PEFT itself
def test_adapters_of_the_expansion_count() -> None:
    """LoRA on `kv_b_proj`, one for all rows and one for each row."""
    peft = pytest.importorskip("peft")
    model = copy.deepcopy(build("deepseek_v3"))
    config = peft.LoraConfig(target_modules=["kv_b_proj"], r=4, init_lora_weights=False)
    adapted = peft.get_peft_model(model, config, adapter_name="one").eval()
    adapted.add_adapter("two", config)
    ids = text(2, 20)
    for given in ({}, {"adapter_names": ["two", "one"]}):
        expected = adapted(input_ids=ids, **given).logits
        with kvpolicy.attach(model, "full"):
            cache = kvpolicy.PolicyCache(model)
            parts = (slice(15), slice(15, 16), slice(16, 20))
            found = torch.cat([adapted(input_ids=ids[:, at], cache=cache, **given).logits for at in parts], 1)
        assert (found - expected).abs().max() < 1e-4 * expected.std(), given
