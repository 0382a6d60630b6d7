"""Tiles beside what else happens to a model: generation, compiled steps, offloaded weights, hooks, errors."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

import kvpolicy
from kvpolicy import KVPolicyError, KVPolicyTypeError, Policy, PolicyCache
from kvpolicy.hf import tile_size
from kvpolicy.hf.attachment import attachment_of
from kvpolicy.protocols import State, View
from kvpolicy.selectors.window import SlidingWindow
from kvpolicy.statistics import Forward, ModuleCall, Results, Statistic
from kvpolicy.text.errors import KVPolicyStateError
from tests.conformance.models import build
from tests.conformance.play import make_batch

PROMPT = 40


def prompt(rows: int = 1) -> Tensor:
    return make_batch([PROMPT] * rows, [PROMPT])[0]


def whole_and_tiled(model: Any, policy: Policy | str, tile: int, run: Callable[[], Any]) -> list[Any]:
    """What a run under a policy gives, with a prompt in one piece and in tiles."""
    found: list[Any] = []
    for each in (None, tile):
        with kvpolicy.attach(model, policy, tile=each), torch.no_grad():
            found.append(run())
    return found


@pytest.mark.parametrize(
    ("policy", "tile", "how"),
    [("h2o@0.5", 16, {"num_beams": 2}), ("snapkv:window=4:kernel=3@0.5", 5, {"prefill_chunk_size": 17})],
    ids=["padding-and-beams", "chunks"],
)
def test_generate(policy: str, tile: int, how: dict[str, Any]) -> None:
    """With padding and beams, and in chunks, each of which is compressed as without tiles."""
    model = build("llama")
    ids, mask = make_batch([PROMPT, PROMPT if "prefill_chunk_size" in how else 23], [PROMPT])
    how = how | {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False}
    assert torch.equal(*whole_and_tiled(model, policy, tile, lambda: model.generate(ids, **how)))


def test_steps_compile_once_behind_tiles() -> None:
    model = copy.deepcopy(build("llama", layers=2))
    torch.compiler.reset()
    counter = CompileCounter()
    with kvpolicy.attach(model, "squeeze+h2o@0.5", tile=7), torch.no_grad():
        cache = PolicyCache(model, new=4)
        model(prompt(), cache=cache)
        compiled = torch.compile(model, backend=counter, fullgraph=True)
        for _ in range(3):
            compiled(torch.tensor([[5]]), cache=cache)
            cache.tick()
    assert counter.frame_count == 1


def test_hidden_states_and_hooks_see_a_layer_once() -> None:
    model = build("gemma3")
    seen: Counter[int] = Counter()
    hooks = [
        layer.register_forward_hook(lambda *_, n=n: seen.update([n])) for n, layer in enumerate(model.model.layers)
    ]
    states = whole_and_tiled(model, "window@0.5", 9, lambda: model(prompt(), output_hidden_states=True).hidden_states)
    for hook in hooks:
        hook.remove()
    assert set(seen.values()) == {2}
    assert len(states[0]) == len(states[1]) == len(model.model.layers) + 1
    for whole, tiled in zip(*states, strict=True):
        torch.testing.assert_close(tiled, whole, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_layers_are_measured_over_all_tiles(family: str) -> None:
    model = build(family)
    ids, mask = make_batch([PROMPT, 23], [PROMPT])
    found = whole_and_tiled(model, "squeeze+window@0.5", 13, lambda: model(ids, attention_mask=mask).cache.cosines())
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-5)


def test_masks_of_windows_are_those_of_a_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("gemma3")
    sizes: list[tuple[int, ...]] = []
    for name in ("eager", "sdpa"):
        make: Any = ALL_MASK_ATTENTION_FUNCTIONS[name]

        def noting(make: Any = make, **kwargs: Any) -> Any:
            mask = make(**kwargs)
            sizes.append((kwargs["q_length"], kwargs["kv_length"]) if mask is None else tuple(mask.shape[2:]))
            return mask

        monkeypatch.setitem(ALL_MASK_ATTENTION_FUNCTIONS._global_mapping, name, noting)
    with kvpolicy.attach(model, "window@0.5", tile=9), torch.no_grad():
        model(prompt())
    window = model.config.sliding_window
    assert sizes and all(rows <= 9 and columns <= window - 1 + 9 for rows, columns in sizes)


def test_a_model_around_the_decoder_may_make_the_masks() -> None:
    """Also where there is no cache in the end, so that layers take all tokens at once."""
    model = build("gemma3_pictures")
    with torch.no_grad():
        alone = model(prompt(), use_cache=False).logits
        with kvpolicy.attach(model, "window@0.5", tile=9):
            found = model(prompt(), use_cache=False).logits
    torch.testing.assert_close(found, alone, atol=1e-5, rtol=1e-5)


def test_an_error_in_a_layer_leaves_no_trace() -> None:
    model = build("gemma3")
    with kvpolicy.attach(model, "window@0.5", tile=9), torch.no_grad():
        cache = PolicyCache(model)
        hook = model.model.layers[2].mlp.register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(prompt(), cache=cache)
        hook.remove()
        assert cache.tile is None
        with pytest.raises(KVPolicyStateError, match="was interrupted"):
            model(prompt(), cache=cache)
        cache.reset()
        after = model(prompt(), cache=cache).logits
        expected = model(prompt(), cache=PolicyCache(model)).logits
    assert torch.equal(after, expected)
    with torch.no_grad():
        model(prompt())  # a model without a policy makes its masks at once
    assert not any("forward" in vars(module) for module in model.modules())


def test_no_gradient_flows_through_tiles() -> None:
    model = build("llama", layers=2)
    with kvpolicy.attach(model, "window@0.5", tile=16):
        out = model(prompt())
        with pytest.raises(KVPolicyStateError, match="Gradients cannot flow"):
            out.logits.sum().backward()
    model.zero_grad()


def test_offloaded_weights_move_once_for_all_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerate: Any = pytest.importorskip("accelerate")
    whole = build("llama")
    with kvpolicy.attach(whole, "h2o@0.5"), torch.no_grad():
        expected = whole(prompt()).logits
    model = accelerate.cpu_offload(copy.deepcopy(whole), execution_device=torch.device("cpu"))
    moved: Counter[tuple[Any, str]] = Counter()
    place = accelerate.hooks.set_module_tensor_to_device

    def counting(module: Any, name: str, device: Any, value: Any = None, **kwargs: Any) -> None:
        if value is not None:
            moved.update([(module, name)])
        place(module, name, device, value=value, **kwargs)

    monkeypatch.setattr(accelerate.hooks, "set_module_tensor_to_device", counting)
    with kvpolicy.attach(model, "h2o@0.5", tile=7), torch.no_grad():
        cache = PolicyCache(model)
        found = model(prompt(), cache=cache).logits
        inside = set(model.model.layers.modules())
        times = {count for (module, _), count in moved.items() if module in inside}
        assert times == {1} and model.model.layers[0].mlp.up_proj.weight.is_meta
        model(torch.tensor([[5]]), cache=cache)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert {count for (module, _), count in moved.items() if module in inside} == {2}


NOTED: list[Forward] = []


@dataclass(frozen=True, kw_only=True, slots=True)
class Noting(SlidingWindow):
    """A selector that is given the arguments of the attention module."""

    @property
    def statistics(self) -> tuple[Statistic[Any], ...]:
        """The arguments."""
        return (ModuleCall(),)

    def observe(self, state: State, seen: Results, view: View) -> State:
        """Note them."""
        NOTED.append(seen[ModuleCall])
        return state


def test_a_scorer_is_given_the_arguments_for_the_whole_prompt() -> None:
    model = build("llama", layers=2)
    ids, mask = make_batch([PROMPT, 23], [PROMPT])
    noting = Policy(selector=Noting(), budget=0.5)
    # The last of the tiles has a single token.
    calls = whole_and_tiled(model, noting, 13, lambda: (model(ids, attention_mask=mask), NOTED[-1])[1])
    whole, tiled = calls
    assert whole.queries is not None and tiled.queries is not None
    assert whole.valid is not None and tiled.valid is not None and torch.equal(whole.valid, tiled.valid)
    real = mask.bool()
    torch.testing.assert_close(tiled.hidden_states[real], whole.hidden_states[real], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(
        tiled.queries.mT[real.nonzero()[:, 0]], whole.queries.mT[real.nonzero()[:, 0]], atol=9, rtol=9
    )
    assert tiled.kwargs.keys() == whole.kwargs.keys()
    for own, all_at_once in zip(tiled.kwargs["position_embeddings"], whole.kwargs["position_embeddings"], strict=True):
        assert torch.equal(own, all_at_once)


@pytest.mark.parametrize(
    ("free", "expected"), [(None, None), (8_000_000, None), (7_000_000, 2048), (3_000_000, 1024), (1000, 512)], ids=str
)
def test_auto_takes_the_largest_tile_that_fits_into_half_of_the_free_memory(
    free: int | None, expected: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build("llama", layers=2)
    monkeypatch.setattr(tile_size, "free_bytes", lambda device: free)
    monkeypatch.setattr(tile_size, "_needed", lambda policy, model, shape, tile: 1000 * (tile or shape[1]))
    with kvpolicy.attach(model, "snapkv@0.5", tile="auto"):
        attachment = attachment_of(model)
        assert attachment.tile_size(torch.zeros(1, 4000, dtype=torch.int64)) == expected
        assert attachment.tile_size(torch.zeros(1, 512, dtype=torch.int64)) is None


def test_auto_needs_what_a_plan_says() -> None:
    model = build("llama", layers=2)
    with kvpolicy.attach(model, "full", tile="auto"):
        attachment = attachment_of(model)
        needed = tile_size._needed(attachment.policy, attachment.model_shape, (1, 4000), 512)
    plan = kvpolicy.plan(model, "full", prompt=4000, tile=512)
    assert needed == plan.activation_nbytes + 4000 * 2 * 2 * 8 * 4


@pytest.mark.parametrize(
    ("tile", "message"),
    [
        (0, "tile must be between 1 and 2.40, got 0"),
        (-3, "tile must be between 1 and 2.40, got -3"),
        ("big", "tile must be a number of tokens, 'auto' or None, got 'big'"),
        (True, "tile must be an integer, 'auto' or None, got True"),
        (1.5, "tile must be an integer, 'auto' or None, got 1.5"),
    ],
)
def test_errors(tile: Any, message: str) -> None:
    model = build("llama", layers=2)
    with pytest.raises((KVPolicyError, KVPolicyTypeError), match=message):
        kvpolicy.attach(model, "window@0.5", tile=tile)
    kvpolicy.attach(model, "window@0.5").detach()


def test_an_argument_with_a_column_for_each_token_is_refused() -> None:
    model = build("llama", layers=2)
    refused = pytest.raises(KVPolicyError, match="argument 'per_token' has a column for each token")
    with kvpolicy.attach(model, "window@0.5", tile=16), torch.no_grad(), refused:
        model(prompt(), per_token=torch.zeros(1, PROMPT))


def test_the_log_says_what_auto_chose(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama", layers=2)
    monkeypatch.setattr(tile_size, "SIZES", (16, 8))
    monkeypatch.setattr(tile_size, "free_bytes", lambda device: 0)
    with caplog.at_level("INFO", "kvpolicy"), kvpolicy.attach(model, "window@0.5", tile="auto"), torch.no_grad():
        cache = model(prompt()).cache
        model(torch.tensor([[5]]), cache=cache)
    assert caplog.text.count("a prompt of 40 tokens is read in tiles of 8") == 1
    assert cache.tile_size is None, "a step has one token"


def test_a_norm_that_stays_in_fp32_gives_fp32() -> None:
    model = copy.deepcopy(build("llama", layers=2)).to(torch.bfloat16)
    model.model.norm.float()
    model.lm_head.float()
    found = whole_and_tiled(model, "window@0.5", 16, lambda: model(prompt()).logits)
    assert found[1].dtype == torch.float32
    torch.testing.assert_close(found[1], found[0], atol=0.05, rtol=0.05)


def test_an_error_before_the_decoder_leaves_no_masks_for_later() -> None:
    model = build("gemma3_pictures")
    with torch.no_grad():
        with kvpolicy.attach(model, "full"):
            expected = model(prompt()).logits
        with kvpolicy.attach(model, "full", tile=9), pytest.raises(ValueError, match="exactly one"):
            model(prompt(), inputs_embeds=torch.zeros(1, PROMPT, 32))
        with kvpolicy.attach(model, "full"):
            assert torch.equal(model(prompt()).logits, expected)


def test_wrappers_of_a_layer_are_run_and_left() -> None:
    """One that was there before attaching, and one that was put around the layer since."""
    model = copy.deepcopy(build("llama", layers=2))
    layer: Any = model.get_submodule("model.layers.0")
    inner = layer.forward
    layer.forward = lambda x, *args, **kwargs: inner(x, *args, **kwargs) * 1.5
    found = whole_and_tiled(model, "h2o@0.5", 16, lambda: model(prompt()).logits)
    torch.testing.assert_close(found[1], found[0], atol=1e-5, rtol=1e-5)
    calls: list[int] = []
    with kvpolicy.attach(model, "h2o@0.5", tile=7):
        attached = layer.forward
        layer.forward = lambda *args, **kwargs: (calls.append(1), attached(*args, **kwargs))[1]
    with torch.no_grad():
        model(prompt())
    assert calls == [1]


def test_a_layer_may_count_positions_from_the_cache() -> None:
    """Llama 4 scales queries of layers without a rotary embedding by it."""
    config: Any = transformers.Llama4TextConfig(
        vocab_size=48,
        hidden_size=32,
        intermediate_size=48,
        intermediate_size_mlp=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        pad_token_id=0,
        layer_types=["chunked_attention", "full_attention", "chunked_attention"],
        attention_chunk_size=8,
        no_rope_layers=[1, 0, 1],
        moe_layers=[],
        num_local_experts=2,
        floor_scale=4,
    )
    torch.manual_seed(0)
    model: Any = transformers.Llama4ForCausalLM(config).eval()
    ids, mask = make_batch([PROMPT, 27], [PROMPT])

    def steps() -> list[Tensor]:
        cache = PolicyCache(model)
        found = [model(ids[:, :20], attention_mask=mask[:, :20], cache=cache).logits]
        return [*found, model(ids[:, 20:], attention_mask=mask, cache=cache).logits]

    with torch.no_grad():
        stock = model(ids, attention_mask=mask).logits
    whole, tiled = (torch.cat(each, 1) for each in whole_and_tiled(model, "full", 7, steps))
    seen = mask.bool()
    torch.testing.assert_close(whole[seen], stock[seen], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(tiled[seen], stock[seen], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("policy", ["full", "h2o@0.5"])
def test_pictures_are_looked_at_in_one_piece(policy: str) -> None:
    """The part of the model that looks at them makes a mask of its own."""
    sizes: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    text = sizes | {"model_type": "llama", "vocab_size": 48, "num_key_value_heads": 2, "pad_token_id": 0}
    vision = sizes | {"intermediate_size": 48, "image_size": 28, "patch_size": 14}
    torch.manual_seed(0)
    config = transformers.Idefics3Config(text_config=text, vision_config=vision, scale_factor=2, image_token_id=47)
    model: Any = transformers.Idefics3ForConditionalGeneration(config).eval()
    ids = torch.cat([prompt()[:, :3] % 47, torch.tensor([[47]]), prompt() % 47], 1)
    pixels = torch.randn(1, 1, 3, 28, 28, generator=torch.Generator().manual_seed(0))

    def steps() -> list[Tensor]:
        out = model(input_ids=ids, pixel_values=pixels)
        return [out.logits, model(input_ids=ids[:, :1], cache=out.cache).logits]

    with torch.no_grad():
        stock = steps()
    found = whole_and_tiled(model, policy, 16, steps)
    for whole, tiled, expected in zip(*found, stock, strict=True):
        torch.testing.assert_close(tiled, whole, atol=1e-5, rtol=1e-5)
        if policy == "full":
            torch.testing.assert_close(tiled, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("mask", [None, torch.ones(1, 10, dtype=torch.bool)], ids=["none", "padding"])
def test_ready_made_masks_of_windows_are_refused(mask: Tensor | None) -> None:
    """A prompt that is shorter than the window needs none in one piece, and each of its tiles does."""
    model = build("gemma3")
    masks: Any = {"full_attention": None, "sliding_attention": mask}
    with kvpolicy.attach(model, "full", tile=4), torch.no_grad():
        with pytest.raises(KVPolicyError, match="tile must be None if ready-made masks of sliding windows"):
            model(prompt()[:, :10], attention_mask=masks)
        model(prompt()[:, :10])


def test_detaching_leaves_the_hooks_that_accelerate_has_added_since() -> None:
    accelerate: Any = pytest.importorskip("accelerate")
    model = copy.deepcopy(build("llama", layers=2))
    with torch.no_grad():
        expected = model(prompt()).logits
        handle = kvpolicy.attach(model, "h2o@0.5", tile=7)
        model = accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
        model(prompt())
        handle.detach()
        assert torch.equal(model(prompt()).logits, expected)
    accelerate.hooks.remove_hook_from_module(model, recurse=True)
    assert all("kvpolicy" not in str(vars(module).get("forward")) for module in model.modules())


@pytest.mark.parametrize("family", ["mixtral", "jetmoe", "afmoe"])
def test_recorded_router_logits_are_those_of_a_prompt(family: str) -> None:
    model = build(family)
    ids, mask = make_batch([PROMPT, PROMPT], [PROMPT])
    how: dict[str, Any] = {"attention_mask": mask, "output_router_logits": True}
    found = whole_and_tiled(model, "full", 13, lambda: model(ids, **how).router_logits)
    assert len(found[0]) == len(found[1]) > 0
    for whole, tiled in zip(*found, strict=True):
        torch.testing.assert_close(tiled, whole, atol=1e-4, rtol=1e-4)
