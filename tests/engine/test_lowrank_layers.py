"""Caches whose layers have different ranks, or whose heads share latent vectors: steps, plans, files and beams."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import kvpolicy
from kvpolicy import Policy, PolicyCache
from kvpolicy.calibration import calibrate_lowrank
from kvpolicy.codecs._files import load, save
from kvpolicy.policy import ModelPolicy
from kvpolicy.testing import check_cache
from kvpolicy.text.errors import KVPolicyError
from tests.conformance.access import attending
from tests.conformance.models import VOCABULARY, build
from tests.conformance.play import TURNS, forward, make_batch, play, talk
from tests.conformance.policies import spec_of
from tests.conformance.replay import replay
from tests.engine.test_layer_group import (
    Seen,
    check_tiles_and_chunks,
    talk_on,
)

SIZES = "residual_length=3:block_size=4"
LAYERS = 3
HEADS = 2
DIM = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A calibration of the model of these tests."""
    out = tmp_path_factory.mktemp("lowrank")
    texts = [torch.randint(3, VOCABULARY, (80,), generator=torch.Generator().manual_seed(n)) for n in range(2)]
    calibrate_lowrank(build("llama"), texts, out, head_groups=[2], fisher=True)
    # Random weights use all directions alike. The energies of trained ones fall, in some layers faster than in others.
    file = load(str(out), "lowrank")
    falling = {
        name: t * (0.9 - 0.2 * int(name[-1])) ** torch.arange(t.shape[-1])
        for name, t in file.tensors.items()
        if ".energy." in name
    }
    save(out, "lowrank", file.meta, file.tensors | falling)
    return str(out)


SPECS = {
    "energy": f"snapkv+lowrank:rank=4:ranks=energy:{SIZES}:calibration=FOLDER@0.5",
    "threshold": f"lowrank:rank=3:value_rank=5:ranks=threshold:key_space=unrotated:{SIZES}:calibration=FOLDER",
    "fisher": f"h2o+lowrank:rank=4:ranks=fisher:calibration=FOLDER/tokenwise:bits=8:{SIZES}@0.6",
    "scores": "streaming+lowrank:rank=4:ranks=energy:basis=scores:calibration=FOLDER/kivi:bits=8:group_size=4@0.6",
    "joint": f"window+lowrank:rank=3:head_group=2:{SIZES}:calibration=FOLDER@0.5",
    "joint-unrotated": f"lowrank:rank=4:head_group=2:key_space=unrotated:{SIZES}:calibration=FOLDER",
    "joint-tova": f"tova+lowrank:rank=4:head_group=2:calibration=FOLDER/tokenwise:bits=8:{SIZES}@0.6",
    "joint-energy": f"streaming:decode=grow+lowrank:rank=4:ranks=energy:head_group=2:{SIZES}:calibration=FOLDER@0.5",
}


def spec(name: str, folder: str) -> str:
    return SPECS[name].replace("FOLDER", folder.replace("/", "%2F"))


@pytest.mark.parametrize("name", SPECS)
def test_a_cache_holds_what_was_planned(name: str, folder: str) -> None:
    """After a prompt of two rows, one of them padded, steps, a continuation and steps."""
    policy = Policy.parse(spec(name, folder))
    _, cache, _ = play(build("llama"), policy, [26, 11])
    check_cache(cache)
    assert cache.plan is not None and cache.nbytes == cache.plan.nbytes
    assert [layer.moved for layer in cache.policy_layers] == [layer.moved for layer in cache.plan.layers]
    assert cache.policy == policy and str(cache.policy) == str(policy)
    if "energy" in name or name in ("threshold", "fisher", "scores"):
        assert isinstance(cache.policy, ModelPolicy)
        ranks = [(codec.rank, codec.value_rank) for codec in (cache.policy.at(n).codec for n in range(LAYERS))]  # pyright: ignore
        assert len({*ranks}) > 1
        assert sum(map(sum, ranks)) == LAYERS * 8


@pytest.mark.parametrize("name", ["same", "energy"])
def test_every_layer_is_that_of_the_slow_version(name: str, tmp_path: Path) -> None:
    bases = spec_of("lowrank").rpartition("calibration=")[2]
    sizes = f"residual_length=2:block_size=3:calibration={bases}"
    policy = Policy.parse(f"h2o+lowrank:rank=3:value_rank=4:ranks={name}:{sizes}@0.6")
    tape, cache, _ = play(build("llama"), policy, [26, 11])
    ranks: set[tuple[int, int]] = set()
    for layer, turns in tape.items():
        own: Any = cache.policy.at(layer)
        ranks.add((own.codec.rank, own.codec.value_rank))
        assert replay(own, {layer: turns}).turns > 0
    assert (len(ranks) > 1) == (name == "energy")


@pytest.mark.parametrize("name", ["joint", "joint-unrotated", "joint-tova", "joint-energy"])
def test_heads_read_the_projection_of_all_of_them(name: str, folder: str) -> None:
    """What every head reads of a slot is its part of the projected long vector of what attention was given."""
    policy = Policy.parse(spec(name, folder))
    model = build("llama")
    seen = Seen()
    ids, mask = make_batch([26], TURNS)
    with kvpolicy.attach(model, policy), attending(seen.around):
        cache = PolicyCache(model, new=sum(TURNS[1:]))
        talk(model, ids, mask, TURNS, cache)
    for layer in range(LAYERS):
        store: Any = cache.policy_layers[layer].store
        exact = store.layout.exact
        positions = store.tensors.positions[0, :, exact:]
        assert (positions == positions[:1]).all() and bool((positions >= 0).any())
        slots = (positions[0] >= 0).nonzero().flatten()
        codec: Any = cache.policy.at(layer).codec
        projections = store.contents.calibrations[0]
        keys, values = (x[:, :, positions[0, slots].long()] for x in seen.of(layer))
        if codec.key_space == "unrotated":
            keys = store.slots.codes.in_key_space(keys, positions[None, :, slots])
        stage = store.slots.codes.stage_store(0)
        every = slice(0, positions.shape[1])
        read = codec.keys(stage, every), codec.values(stage, every)
        for found, given, one in zip(read, (keys, values), (projections.keys, projections.values), strict=True):
            long = (given - one.mean)[0].transpose(0, 1).flatten(1).double()
            encode = one.encode[0].flatten(0, 1).double()
            want = (long @ encode @ one.decode[0].transpose(0, 1).flatten(1).double()).unflatten(1, (HEADS, -1))
            want = want.transpose(0, 1) + one.mean[0]
            rounding = (2e-2 if codec.base.stages else 3e-3) * float(want.abs().max())
            torch.testing.assert_close(found[0, :, slots].double(), want, rtol=0, atol=rounding)


def test_a_step_compiles_once_and_is_that_of_eager_code(folder: str) -> None:
    from torch._dynamo.testing import CompileCounter

    policy = Policy.parse(spec("joint-energy", folder))
    turns = [20, 1, 1, 1, 1]
    ids, mask = make_batch([20], turns)
    counter = CompileCounter()
    found: list[Tensor] = []
    for compiled in (False, True):
        model = build("llama")
        with kvpolicy.attach(model, policy):
            cache = PolicyCache(model, new=len(turns))
            forward(model, ids, mask, 0, 20, cache)
            step: Any = torch.compile(model, backend=counter, fullgraph=True) if compiled else model
            logits: list[Tensor] = []
            for start in range(20, 24):
                logits.append(forward(step, ids, mask, start, start + 1, cache))
                cache.tick()
            found.append(torch.cat(logits, 1))
    assert counter.frame_count == 1
    torch.testing.assert_close(*found, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["energy", "joint-tova"])
def test_a_saved_cache_goes_on_bit_for_bit(name: str, folder: str, tmp_path: Path) -> None:
    model = build("llama")
    ids, mask = make_batch([26, 20], TURNS)
    with kvpolicy.attach(model, spec(name, folder)):
        cache = PolicyCache(model, new=sum(TURNS[1:]))
        talk(model, ids, mask, TURNS[:4], cache)
        cache.save(tmp_path / "cache.safetensors")
        loaded = PolicyCache.load(model, tmp_path / "cache.safetensors")
        check_cache(loaded)
        assert loaded.nbytes == cache.nbytes
        assert torch.equal(*(talk_on(model, ids, mask, each, TURNS[4:]) for each in (loaded, cache)))


def test_a_saved_cache_is_refused_once_its_ranks_are_others(folder: str, tmp_path: Path) -> None:
    file = load(folder, "lowrank")
    save(tmp_path / "own", "lowrank", file.meta, file.tensors)
    model = build("llama")
    policy = spec("energy", str(tmp_path / "own"))
    ids, mask = make_batch([26], TURNS)
    with kvpolicy.attach(model, policy):
        cache = PolicyCache(model, new=sum(TURNS[1:]))
        talk(model, ids, mask, TURNS[:4], cache)
        cache.save(tmp_path / "cache.safetensors")
        flat = {name: torch.ones_like(t) if name == "values.energy.0" else t for name, t in file.tensors.items()}
        save(tmp_path / "own", "lowrank", file.meta, flat)
        with pytest.raises(KVPolicyError):
            PolicyCache.load(model, tmp_path / "cache.safetensors")


@pytest.mark.parametrize("name", ["fisher", "joint-unrotated"])
def test_rows_are_selected_and_steps_are_undone(name: str, folder: str) -> None:
    model = build("llama")
    ids, mask = make_batch([26, 15], TURNS)
    order = torch.tensor([1, 0, 1])
    with kvpolicy.attach(model, spec(name, folder)):
        cache = PolicyCache(model, new=sum(TURNS[1:]))
        talk(model, ids, mask, TURNS[:4], cache)
        undone = cache.fork()
        undone.mark(most=4)
        talk_on(model, ids.flip(1), mask, undone, [1] * 4)
        undone.rollback(0)
        selected = cache.fork()
        selected.batch_select_indices(order)
        wanted, again = (talk_on(model, ids, mask, each, TURNS[4:]) for each in (cache, undone))
        found = talk_on(model, ids[order], mask[order], selected, TURNS[4:])
        check_cache(undone)
        check_cache(selected)
    torch.testing.assert_close(again, wanted, rtol=0, atol=1e-5)
    torch.testing.assert_close(found, wanted[order], rtol=0, atol=2e-3)


@pytest.mark.parametrize("how", [{"tile": 5}, {"chunks": "hold"}])
def test_tiles_and_held_chunks_encode_what_a_whole_prompt_does(how: dict[str, Any], folder: str) -> None:
    check_tiles_and_chunks(spec("joint-energy", folder), how, (0, 1, 2), build("llama"))


def test_a_budget_in_bytes_counts_every_layer(folder: str) -> None:
    model = build("llama")
    full = kvpolicy.plan(model.config, "full", batch=1, prompt=200, new=0, dtype=torch.float32).nbytes
    policy = f"{spec('energy', folder).partition('@')[0]}@{full // 3}B"
    planned = kvpolicy.plan(model.config, policy, batch=1, prompt=200, new=0, dtype=torch.float32)
    one_token = planned.nbytes // planned.layers[0].tokens
    assert full // 3 - one_token < planned.nbytes <= full // 3
    assert len({sum(layer.nbytes.values()) for layer in planned.layers[1:]}) > 1
