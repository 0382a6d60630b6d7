"""A cache of a prompt with a picture goes on at its own positions (M-RoPE), whatever the model ran before."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import kvpolicy
from kvpolicy import KVPolicyError, PolicyCache
from kvpolicy.hf import cache_file
from kvpolicy.hf.cache_names import CACHE
from tests.conformance import pictures

STEPS = 4


def fresh(name: str) -> Any:
    """The model as another process loads it."""
    model = copy.deepcopy(pictures.build(name))
    model.model.rope_deltas = None
    return model


def run(model: Any, cache: PolicyCache, **given: Any) -> Tensor:
    """The logits of a forward."""
    return model(**given, **{CACHE: cache}, use_cache=True).logits


def go_on(model: Any, cache: PolicyCache, ids: Tensor | None = None) -> Tensor:
    """The logits of a second turn and some steps, [B, N, V]."""
    ids = pictures.words(3 + STEPS, 1, 5) if ids is None else ids
    return torch.cat([run(model, cache, input_ids=piece) for piece in (ids[:, :3], *ids[:, 3:].split(1, 1))], 1)


def asked(given: dict[str, Any], ids: Tensor) -> dict[str, Any]:
    """The inputs of a prompt with other ids, in which the picture is as before."""
    return given | {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "mm_token_type_ids": (ids == pictures.IMAGE).int(),
    }


def mixed() -> dict[str, Any]:
    """A prompt of two rows of the same length: one with a picture, and one without."""
    one = pictures.prompt()
    return asked(one, torch.cat([one["input_ids"], pictures.words(one["input_ids"].shape[1], seed=8)]))


@pytest.mark.parametrize("name", pictures.NAMES)
@pytest.mark.parametrize("policy", ["full", "uniform/adakv+snapkv@0.5"])
def test_a_loaded_cache_goes_on_bit_for_bit(name: str, policy: str, path: Path) -> None:
    first = fresh(name)
    with torch.no_grad(), kvpolicy.attach(first, policy):
        cache = PolicyCache(first)
        run(first, cache, **pictures.prompt())
        assert cache.policy_layers[0].rope_deltas is not None
        cache.save(path)
        expected = go_on(first, cache)
    second = fresh(name)
    with torch.no_grad(), kvpolicy.attach(second, policy):
        loaded = PolicyCache.load(second, path)
        assert torch.equal(go_on(second, loaded), expected)
        lost = PolicyCache.load(second, path)
        lost.policy_layers[0].rope_deltas = None
        assert float((go_on(second, lost) - expected).abs().max()) > 0.3, "positions must matter"


@pytest.mark.parametrize("name", pictures.NAMES)
def test_generate_from_a_loaded_cache(name: str, path: Path) -> None:
    first = fresh(name)
    given = pictures.prompt()
    more = asked({}, torch.cat([given["input_ids"], pictures.words(4)], 1))
    how: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "output_logits": True}
    how |= {"return_dict_in_generate": True, "eos_token_id": None}
    stock = first.generate(**given | more, **how)
    with torch.no_grad(), kvpolicy.attach(first, "full"):
        cache = PolicyCache(first)
        run(first, cache, **given)
        cache.save(path, tokens=given["input_ids"])
    second = fresh(name)
    with torch.no_grad(), kvpolicy.attach(second, "full"):
        loaded = PolicyCache.load(second, path)
        out = second.generate(**more, **{CACHE: loaded}, **how)
    assert torch.equal(out.sequences, stock.sequences)
    assert torch.allclose(torch.stack(out.logits), torch.stack(stock.logits), atol=1e-4)


@pytest.mark.parametrize("name", ["qwen2_5_vl", "glm4v"])
def test_caches_take_turns_on_one_model(name: str) -> None:
    """Of a text as of a prompt with a picture, each is as on a model of its own."""
    given = {"picture": pictures.prompt(), "text": {"input_ids": pictures.words(20)}}
    steps = [pictures.words(1, seed=step) for step in range(3)]
    alone: dict[str, list[Tensor]] = {}
    model = fresh(name)
    with torch.no_grad(), kvpolicy.attach(model, "full"):
        for kind, prompt in given.items():
            other = fresh(name)
            with kvpolicy.attach(other, "full"):
                cache = PolicyCache(other)
                run(other, cache, **prompt)
                alone[kind] = [run(other, cache, input_ids=ids) for ids in steps]
        caches = {kind: PolicyCache(model) for kind in given}
        for kind, prompt in given.items():
            run(model, caches[kind], **prompt)
        for number, ids in enumerate(steps):
            for kind in given:
                assert torch.equal(run(model, caches[kind], input_ids=ids), alone[kind][number]), kind


@pytest.mark.parametrize("name", pictures.NAMES)
@pytest.mark.parametrize("whole", [True, False])
def test_masks_behind_a_picture(name: str, whole: bool) -> None:
    """The model would count positions from all columns of the mask; without one it is right."""
    model = fresh(name)
    given = pictures.prompt(2)
    with torch.no_grad(), kvpolicy.attach(model, "full"):
        cache = PolicyCache(model)
        run(model, cache, **given)
        shared = cache.fork([0]).fork([0, 0], shared=True)
        for each in (cache, shared):
            masked = each.fork()
            seen = given["attention_mask"].shape[1] if whole else 0
            for ids in (pictures.words(3, 2, 5), pictures.words(1, 2, 6)):
                expected = run(model, each, input_ids=ids)
                seen += ids.shape[1] if whole else 0
                mask = torch.ones(2, seen or ids.shape[1], dtype=torch.int64)
                found = run(model, masked, input_ids=ids, attention_mask=mask)
                assert torch.allclose(found, expected, atol=1e-4)


def test_padding_behind_a_picture_takes_no_position() -> None:
    model = fresh("qwen2_5_vl")
    given = pictures.prompt(2)
    ids = pictures.words(4, 2, 5)
    mask = torch.cat([given["attention_mask"], torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]])], 1)
    with torch.no_grad(), kvpolicy.attach(model, "full"):
        cache = PolicyCache(model)
        run(model, cache, **given)
        own = cache.fork([1])
        found = run(model, cache, input_ids=ids, attention_mask=mask)[1, 2:]
        assert torch.allclose(found, run(model, own, input_ids=ids[1:, 2:])[0], atol=1e-4)


def test_rows_keep_their_offsets() -> None:
    model = fresh("qwen2_5_vl")
    with torch.no_grad(), kvpolicy.attach(model, "full"):
        cache = PolicyCache(model)
        run(model, cache, **mixed())
        deltas = cache.policy_layers[0].rope_deltas
        assert deltas is not None and deltas == [-12, 0]
        alone = [go_on(model, cache.fork([row])) for row in range(2)]
        repeated = cache.fork()
        repeated.batch_repeat_interleave(2)
        beams = cache.fork()
        beams.reorder_cache(torch.tensor([1, 0]))
        shared = cache.fork([0]).fork([0, 0], shared=True)
        for changed, rows in (
            (cache.fork([1, 0, 0]), [1, 0, 0]),
            (repeated, [0, 0, 1, 1]),
            (beams, [1, 0]),
            (shared, [0, 0]),
        ):
            ids = pictures.words(3 + STEPS, len(rows), 5)
            found = go_on(model, changed, ids)
            for row, source in enumerate(rows):
                expected = go_on(model, cache.fork([source]), ids[row : row + 1])
                assert torch.allclose(found[row : row + 1], expected, atol=1e-4), (rows, row)
        shared.reset()
        assert shared.policy_layers[0].rope_deltas is not None
        cache.reset()
        assert cache.policy_layers[0].rope_deltas is None
    assert float((alone[0] - alone[1]).abs().max()) > 0.3


def test_beams_and_several_answers() -> None:
    model = fresh("glm4v")
    given = pictures.prompt()
    for how in ({"num_beams": 3}, {"num_return_sequences": 2, "num_beams": 2}):
        stock = model.generate(**given, max_new_tokens=5, do_sample=False, **how)
        with kvpolicy.attach(model, "full") as handle:
            assert torch.equal(model.generate(**given, max_new_tokens=5, do_sample=False, **how), stock)
            assert handle.cache is not None
            deltas = handle.cache.policy_layers[0].rope_deltas
            assert deltas is not None and deltas == [-12] * handle.cache.batch_size


def test_crops_bring_offsets_back() -> None:
    model = fresh("qwen2_5_vl")
    given = pictures.prompt()
    columns = given["input_ids"].shape[1]
    with torch.no_grad(), kvpolicy.attach(model, "full"):
        cache = PolicyCache(model)
        run(model, cache, **given)
        expected = go_on(model, cache)
        cache.crop(-3 - STEPS)
        assert torch.equal(go_on(model, cache), expected)
        with pytest.raises(KVPolicyError, match="pictures must be cropped as a whole") as error:
            cache.crop(-3 - STEPS - 2)
        assert f"crop({-3 - STEPS - columns})" in str(error.value)
        assert torch.equal(
            run(model, cache.fork(), input_ids=pictures.words(1)), run(model, cache, input_ids=pictures.words(1))
        )
        text = PolicyCache(model)
        run(model, text, input_ids=pictures.words(9))
        copied = text.fork()
        more = asked(given, torch.cat([pictures.words(9), given["input_ids"]], 1))
        model.generate(**more, **{CACHE: text}, max_new_tokens=1)
        assert text.policy_layers[0].rope_deltas is not None
        text.crop(-columns)
        # In another number of slots, sums are in another order.
        torch.testing.assert_close(go_on(model, text), go_on(model, copied), rtol=0, atol=1e-5)


@pytest.mark.usefixtures("fresh_compiler")
def test_a_picture_through_a_compiled_model_leaves_its_offsets() -> None:
    """Though the forward of a prompt is not compiled, the hooks around it begin in a call that is."""
    model = fresh("qwen2_5_vl")
    with torch.no_grad(), kvpolicy.attach(model, "full"):
        compiled = torch.compile(model, backend="eager")
        for _ in range(2):
            ours, theirs = PolicyCache(model), PolicyCache(model)
            run(model, theirs, **pictures.prompt())
            run(compiled, ours, **pictures.prompt())
            assert ours.policy_layers[0].rope_deltas == theirs.policy_layers[0].rope_deltas != [0]
            torch.testing.assert_close(go_on(model, ours), go_on(model, theirs), rtol=0, atol=1e-5)


@pytest.mark.parametrize("how", ["forward", "generate"])
def test_offsets_are_no_bytes_of_the_cache(how: str) -> None:
    """Plan and report agree to the byte with a picture, too."""
    model = fresh("qwen2_5_vl")
    with torch.no_grad(), kvpolicy.attach(model, "h2o@0.5") as handle:
        if how == "forward":
            run(model, PolicyCache(model), **mixed())
        else:
            model.generate(**pictures.prompt(), max_new_tokens=3)
        assert handle.cache is not None and handle.plan is not None
        assert handle.cache.policy_layers[0].rope_deltas is not None
        assert handle.cache.nbytes == handle.report().nbytes == handle.plan.nbytes


def test_steps_copy_no_offsets() -> None:
    """Between the device and the host they are copied when they change, and not in steps."""
    model = fresh("qwen2_5_vl")
    with torch.no_grad(), kvpolicy.attach(model, "full"):
        cache = PolicyCache(model)
        run(model, cache, **mixed())
        shown = model.model.rope_deltas
        deltas = cache.policy_layers[0].rope_deltas
        for _ in range(3):
            run(model, cache, input_ids=pictures.words(1, 2))
            assert model.model.rope_deltas is shown and cache.policy_layers[0].rope_deltas is deltas


def test_a_file_must_say_where_its_text_goes_on(path: Path) -> None:
    model = fresh("qwen2_5_vl")
    with torch.no_grad(), kvpolicy.attach(model, "full"):
        cache = PolicyCache(model)
        run(model, cache, **pictures.prompt())
        cache.save(path)
        content = cache_file.read(path)
        assert content.header["has_rope_deltas"]
        old = {key: value for key, value in content.header.items() if key != "has_rope_deltas"}
        cache_file.write(path, cache_file.CacheFile(old, content.tensors))
        with pytest.raises(KVPolicyError, match="must say at which positions"):
            PolicyCache.load(model, path)
        for tensors in ({}, {"rope_deltas": torch.zeros(2, dtype=torch.int64)}):
            kept = {key: value for key, value in content.tensors.items() if key != "rope_deltas"}
            cache_file.write(path, content._replace(tensors=kept | tensors))
            with pytest.raises(KVPolicyError, match="must have the tensor rope_deltas"):
                PolicyCache.load(model, path)
        cache_file.write(path, content)
    text = model.model.language_model
    with torch.no_grad(), kvpolicy.attach(text, "full"), pytest.raises(KVPolicyError, match="the whole model"):
        PolicyCache.load(text, path)
