"""Layers whose codecs differ: some store a part of what they hold together, others have ranks of their own."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import kvpolicy
from kvpolicy import Policy, PolicyCache
from kvpolicy.calibration import calibrate_lowrank
from kvpolicy.codecs._files import load, save
from kvpolicy.codecs.minicache import MiniCache, MiniCacheLayer
from kvpolicy.codecs.plain import Plain
from kvpolicy.codecs.shared_directions import interpolate, unit_vectors
from kvpolicy.distortion import group_distortion
from kvpolicy.engine.layer_group import Block, LayerGroup
from kvpolicy.engine.state import tensors
from kvpolicy.policy import ModelPolicy, for_model
from kvpolicy.protocols import ModelInfo, Selector, StageStore, View
from kvpolicy.testing import check_cache
from kvpolicy.text.errors import KVPolicyError
from tests.conformance.access import attending
from tests.conformance.models import VOCABULARY, build
from tests.conformance.play import forward, make_batch, play, talk
from tests.conformance.policies import spec_of
from tests.conformance.replay import replay
from tests.engine.filled import prompted

SIZES = "keep=0.2:residual_length=3:block_size=4"
EVICTING = f"streaming:sinks=2+minicache:start=1:{SIZES}@0.5"
POLICIES = [
    f"full+minicache:start=1:{SIZES}",
    EVICTING,
    f"window:decode=grow+minicache:start=0.3:t=0.2:{SIZES}@0.5",
]
TURNS = [26, 1, 1, 1, 1, 1, 7, 1, 1, 1, 1, 1, 1]
ALIKE = 2e-3
"""Of the norm of a vector: what the rounding of directions and norms to fp16 loses."""


def model_of() -> Any:
    """A model of four layers, of which the policies here pair the second and the third."""
    return build("llama", layers=4)


class Seen:
    """The keys and values of every layer, as attention is given them, by position: [B, H, positions, D]."""

    def __init__(self) -> None:
        self.keys: dict[int, list[Tensor]] = {}
        self.values: dict[int, list[Tensor]] = {}

    def around(self, real: Any) -> Any:
        def attend(cache: PolicyCache, layer_idx: int, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
            self.keys.setdefault(layer_idx, []).append(k.detach().clone())
            self.values.setdefault(layer_idx, []).append(v.detach().clone())
            return real(cache, layer_idx, q, k, v, *rest)

        return attend

    def of(self, layer_idx: int) -> tuple[Tensor, Tensor]:
        return torch.cat(self.keys[layer_idx], 2), torch.cat(self.values[layer_idx], 2)


def run(policy: Policy | str, turns: list[int] = TURNS, model: Any = None) -> tuple[PolicyCache, Seen]:
    model = model or model_of()
    seen = Seen()
    ids, mask = make_batch([turns[0]], turns)
    with kvpolicy.attach(model, policy), attending(seen.around):
        cache = PolicyCache(model, new=sum(turns[1:]))
        talk(model, ids, mask, turns, cache)
        check_cache(cache)
    return cache, seen


def stores_of(cache: PolicyCache, *layers: int) -> list[Any]:
    return [cache.policy_layers[layer].store for layer in layers]


@pytest.mark.parametrize("policy", POLICIES)
def test_both_layers_read_a_direction_between_theirs_with_their_own_norms(policy: str) -> None:
    cache, seen = run(policy)
    codec: Any = cache.policy.codec
    pair = stores_of(cache, 1, 2)
    assert [type(store.spec.codec) for store in stores_of(cache, 0, 3)] == [Plain, Plain]
    exact = pair[0].layout.exact
    positions = pair[0].tensors.positions[..., exact:]
    assert bool((positions >= 0).any(-1).all())
    shared = pair[0].tensors.codes[0].shared
    read = [store.slots.codes.view().read(torch.float32)[0] for store in pair]
    for side, table in ((0, shared.whole_key_slots), (1, shared.whole_value_slots)):
        for head in range(positions.shape[1]):
            slots = (positions[0, head] >= 0).nonzero().flatten()
            given = [seen.of(layer)[side][0, head, positions[0, head, slots].long()] for layer in (1, 2)]
            units = [unit_vectors(x)[0] for x in given]
            direction = interpolate(units[0], units[1], codec.t)
            is_whole = torch.isin(slots, table[0, head].long())
            assert 0 < int(is_whole.sum()) < len(slots)
            for layer in (0, 1):
                found = read[layer][side][0, head, slots].double()
                norm = given[layer].double().norm(dim=-1, keepdim=True)
                want = torch.where(is_whole[:, None], given[layer].double(), direction * norm)
                assert bool(((found - want).norm(dim=-1) <= ALIKE * norm.squeeze(-1)).all())
    assert cache.plan is not None and cache.nbytes == cache.plan.nbytes
    moved = [layer.moved for layer in cache.policy_layers]
    assert moved == [layer.moved for layer in cache.plan.layers] and moved[1] == moved[2]
    both = [t.data_ptr() for store in pair for t in tensors(store.tensors.codes) if t.numel()]
    assert len(set(both)) == len(both), "nothing is stored twice"
    held = [sum(t.nbytes for t in tensors(store.tensors.codes)) for store in pair]
    kinds = [store.nbytes_by_kind() for store in pair]
    assert [kind["codes"] + kind["scales"] for kind in kinds] == held and held[1] < held[0] / 2


def test_a_copy_goes_on_by_itself_and_a_reset_cache_begins_anew() -> None:
    """Each has a group of its own, so that steps of one change no tensor of the other."""
    model = model_of()
    ids, mask = make_batch([26], TURNS)
    with kvpolicy.attach(model, EVICTING):
        cache = PolicyCache(model, new=sum(TURNS[1:]))
        first = talk(model, ids, mask, TURNS[:3], cache)
        other = cache.fork()
        before = [t.clone() for layer in other.policy_layers for t in tensors(layer.store.tensors.codes)]
        wanted = talk_on(model, ids, mask, cache, TURNS[3:])
        after = [t for layer in other.policy_layers for t in tensors(layer.store.tensors.codes)]
        assert all(torch.equal(one, two) for one, two in zip(before, after, strict=True))
        assert torch.equal(talk_on(model, ids, mask, other, TURNS[3:]), wanted)
        check_cache(other)
        cache.reset()
        cache.expect(None, sum(TURNS[1:]))
        assert torch.equal(talk(model, ids, mask, TURNS, cache), torch.cat([first, wanted], 1))
        check_cache(cache)


def talk_on(model: Any, ids: Tensor, mask: Tensor, cache: PolicyCache, turns: list[int]) -> Tensor:
    """Logits of further turns."""
    start = int(cache.policy_layers[0].store.tensors.columns)
    found: list[Tensor] = []
    for size in turns:
        found.append(forward(model, ids, mask, start, start + size, cache))
        start += size
    return torch.cat(found, 1)


@pytest.mark.parametrize("how", [{"tile": 5}, {"chunks": "hold"}])
def test_tiles_and_held_chunks_encode_what_a_whole_prompt_does(how: dict[str, Any]) -> None:
    model = model_of()
    ids, mask = make_batch([40], [40, 1, 1])
    codes: list[list[Tensor]] = []
    for given, turns in (({}, [40, 1, 1]), (how, [40, 1, 1] if "tile" in how else [15, 25, 1, 1])):
        with kvpolicy.attach(model, EVICTING, **given):
            cache = PolicyCache(model, prompt=40, new=2)
            talk(model, ids, mask, turns, cache)
            check_cache(cache)
            codes.append([*tensors([store.tensors.codes for store in stores_of(cache, 1, 2)])])
    for one, two in zip(*codes, strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=2e-2 if one.is_floating_point() else 0)


def test_a_block_of_the_first_layer_waits_and_is_counted() -> None:
    """Between the two layers of a pair, keys and values of the tokens that wait are held, and no more."""
    model = model_of()
    waiting = []

    def around(real: Any) -> Any:
        def attend(cache: PolicyCache, layer_idx: int, *given: Any) -> Tensor:
            layer = cache.policy_layers[1]
            waiting.append((layer_idx, layer.held().get("waiting prompt", 0) if layer.is_initialized else 0))
            return real(cache, layer_idx, *given)

        return attend

    ids, mask = make_batch([40], [40])
    with kvpolicy.attach(model, EVICTING), attending(around):
        cache = prompted(model, ids, mask, 40, new=4)
    kept = 20 - 3  # half of the prompt, less the residual
    shape = stores_of(cache, 1)[0].shape
    assert dict(waiting) == {0: 0, 1: 0, 2: kept * shape.token_nbytes, 3: 0}
    assert "waiting prompt" not in cache.policy_layers[1].held()


def block(keys: Tensor) -> Block:
    slots = torch.zeros(keys.shape[:3], dtype=torch.int64, device=keys.device)
    return Block(0, lambda: StageStore(()), keys, keys, slots, slots == 0, slots == 1)


def test_a_view_that_waits_is_copied_so_that_the_prompt_may_be_freed() -> None:
    group = LayerGroup(2)
    group.write(0, block(torch.ones(1, 1, 100, 3)[:, :, :2]))
    (waiting,) = group._waiting[0]
    assert waiting.keys.untyped_storage().nbytes() == waiting.keys.nbytes == 24


def test_layers_on_several_devices_are_refused() -> None:
    group = LayerGroup(2)
    for number in (0, 1):
        group.join(number, SimpleNamespace(spec=SimpleNamespace(layer_idx=number + 4)))  # pyright: ignore
    group.write(0, block(torch.ones(1, 1, 2, 3, device="meta")))
    with pytest.raises(KVPolicyError, match=r"on one device, got \['cpu', 'meta'\] for the layers \[4, 5\]; try"):
        group.write(1, block(torch.ones(1, 1, 2, 3)))


def test_a_policy_is_grouped_for_a_model() -> None:
    model = model_of()
    with kvpolicy.attach(model, EVICTING) as handle:
        cache = PolicyCache(model)
        policy = cache.policy
    assert isinstance(policy, ModelPolicy) and policy == Policy.parse(EVICTING) and str(policy) == EVICTING
    assert policy.layer_groups == ((1, 2),)
    codecs = [policy.at(layer).codec for layer in range(4)]
    pair = policy.codec
    assert codecs == [Plain(), *(MiniCacheLayer(pair=pair, number=n) for n in (0, 1)), Plain()]  # pyright: ignore
    assert [own.codec for own in policy.distinct] == [codecs[0], codecs[1], codecs[2]]
    assert handle.policy == policy
    for other in (copy.copy(policy), copy.deepcopy(policy)):
        assert isinstance(other, ModelPolicy) and other == policy and hash(other) == hash(policy)
        assert other.layer_groups == policy.layer_groups and other.at(2) == policy.at(2)


def test_a_grouped_policy_is_attached_to_another_model() -> None:
    policy = for_model(Policy.parse(EVICTING), ModelInfo(8, 2, 8))
    assert policy.layer_groups == ((1, 2), (3, 4), (5, 6))
    with kvpolicy.attach(model_of(), policy) as handle:
        assert handle.policy.layer_groups == ((1, 2),)


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("h2o+minicache@0.5", "The selector must keep the same tokens"),
        ("kvcrush/streaming+minicache@0.5", "The selector must keep the same tokens"),
        ("pyramid+window+minicache@0.5", "The allocator must give every layer"),
        ("full+minicache+quest", "The reader must read every token"),
    ],
)
def test_parts_that_may_keep_other_tokens_in_one_layer_are_refused(policy: str, message: str) -> None:
    with pytest.raises(KVPolicyError, match=f"^{message}.*, got .*; try "):
        Policy.parse(policy)
    with pytest.raises(KVPolicyError, match=r"The codec of a layer must encode it by itself.*layer 1.*; try tokenwise"):
        Policy.by_layer(["full", "minicache"], budget=0.5)


def test_a_crop_is_refused() -> None:
    cache, _ = run(POLICIES[0], [26, 1])
    with pytest.raises(KVPolicyError, match=r"must not be cropped under the codec minicache"):
        cache.crop(-1)


def test_the_distortion_of_a_pair() -> None:
    x, y = torch.randn(2, 1, 2, 120, 16, generator=torch.Generator().manual_seed(0))
    alike = group_distortion(MiniCache(), [(x, x), (x, 2 * x)])
    assert max(each.keys for each in alike) < 1e-6 > max(each.values for each in alike)
    apart = group_distortion(MiniCache(keep=0.0), [(x, x), (y, y)])
    assert 0.5 < apart[0].keys < 1.5 and 0.1 < apart[1].keys < apart[0].keys  # t = 0.6 is nearer to the second
    assert apart[0].bits == 16 + 16 / 16 and apart[1].bits == 16 / 16
    with pytest.raises(KVPolicyError, match="must be more tokens than"):
        group_distortion(MiniCache(residual_length=200), [(x, x), (y, y)])


def test_a_selector_of_ones_own_may_say_that_it_looks_at_positions_alone() -> None:
    @dataclass(frozen=True, kw_only=True, slots=True)
    class Even(Selector):
        """Keep even positions first."""

        positions_only: bool = True

        def priority(self, state: Any, view: View) -> Tensor:
            return -(view.positions % 2).float().masked_fill(view.newest(1), -torch.inf)

    policy = Policy(selector=Even(), codec=MiniCache(start=1, residual_length=3, block_size=4), budget=0.5)
    run(policy)
    with pytest.raises(KVPolicyError, match="must keep the same tokens"):
        Policy(selector=Even(positions_only=False), codec=MiniCache(), budget=0.5)


BLOCKS = "residual_length=3:block_size=4"

LAYERS = 3
HEADS = 2


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
    "energy": f"snapkv+lowrank:rank=4:ranks=energy:{BLOCKS}:calibration=FOLDER@0.5",
    "threshold": f"lowrank:rank=3:value_rank=5:ranks=threshold:key_space=unrotated:{BLOCKS}:calibration=FOLDER",
    "fisher": f"h2o+lowrank:rank=4:ranks=fisher:calibration=FOLDER/tokenwise:bits=8:{BLOCKS}@0.6",
    "scores": "streaming+lowrank:rank=4:ranks=energy:basis=scores:calibration=FOLDER/kivi:bits=8:group_size=4@0.6",
    "joint": f"window+lowrank:rank=3:head_group=2:{BLOCKS}:calibration=FOLDER@0.5",
    "joint-unrotated": f"lowrank:rank=4:head_group=2:key_space=unrotated:{BLOCKS}:calibration=FOLDER",
    "joint-tova": f"tova+lowrank:rank=4:head_group=2:calibration=FOLDER/tokenwise:bits=8:{BLOCKS}@0.6",
    "joint-energy": f"streaming:decode=grow+lowrank:rank=4:ranks=energy:head_group=2:{BLOCKS}:calibration=FOLDER@0.5",
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
    cache, seen = run(policy, model=build("llama"))
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


def test_a_budget_in_bytes_counts_every_layer(folder: str) -> None:
    model = build("llama")
    full = kvpolicy.plan(model.config, "full", batch=1, prompt=200, new=0, dtype=torch.float32).nbytes
    policy = f"{spec('energy', folder).partition('@')[0]}@{full // 3}B"
    planned = kvpolicy.plan(model.config, policy, batch=1, prompt=200, new=0, dtype=torch.float32)
    one_token = planned.nbytes // planned.layers[0].tokens
    assert full // 3 - one_token < planned.nbytes <= full // 3
    assert len({sum(layer.nbytes.values()) for layer in planned.layers[1:]}) > 1
