"""Keys and values in host memory: the same numbers, the planned bytes in both places, and copies that are counted."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import kvpolicy
from kvpolicy import ExactTopK, KVPolicyError, Policy, PolicyCache, Reuse
from kvpolicy.engine.link import Link, StepBytes, load_slots, pins, to_host
from kvpolicy.planning.result import plan_from_dict, plan_to_dict
from kvpolicy.protocols import Index, Reader, ReaderTraits
from tests.conformance.models import build
from tests.conformance.play import forward, make_batch, talk
from tests.engine.filled import attached, prompted, steps
from tests.engine.parts import Floats, index_of
from tests.readers.bench import DIM, HEADS, Layer, draw
from tests.sampling import each_once, product

ROOT = Path(__file__).parents[2]
NUMBER = 4
"""Bytes of a number in fp32."""

BASES = ["full", "window", "snapkv", "h2o", "h2o+regress"]
READERS = [
    "quest:read=6:page=2:dense=0:resort=3",
    "labels:read=6:channels=3:dense=0",
    "retrieval:recent=1:read=6:cluster=3:sinks=2:rebuild=5",
    "shadowkv:read=6:page=2:rank=3:sinks=1:recent=2:rebuild=5",
]
ELSEWHERE = [
    "full+labels:read=900:dense=0:host=true",
    "h2o+labels:read=6:channels=3:dense=0:host=true@0.5",
    "h2o+retrieval:recent=1:read=6:cluster=3:rebuild=5:host=true@0.5",
    "full+shadowkv:read=6:page=2:rank=3:sinks=1:recent=2:rebuild=5:host=true",
    "streaming+shadowkv:joint=true:read=6:page=2:rank=3:sinks=1:recent=2:rebuild=3:host=true@0.5",
    "snapkv+quest:read=6:page=2:dense=0:resort=3:host=true@0.5",
    "full+quest:read=6:page=2:dense=0",
]
REUSE = ["reuse:every=2:dense=0/exact:read=6", "reuse:every=2:dense=0:full=false/quest:read=6:page=2:dense=0"]


def policies(base: str, reader: str) -> tuple[str, str]:
    """A policy, and the same with keys and values in host memory."""
    budget = "" if base == "full" else "@0.5"
    host = reader.replace("/", ":host=true/") if "/" in reader else f"{reader}:host=true"
    return f"{base}+{reader}{budget}", f"{base}+{host}{budget}"


PAIRS = [
    *(("h2o", reader) for reader in READERS),
    *zip(["full", "window", "snapkv", "h2o+regress"], READERS, strict=True),
]


@product("base,reader", BASES, READERS, sample=PAIRS)
def test_outputs_and_bytes_are_those_of_the_device(base: str, reader: str) -> None:
    """Bit for bit: over padded rows, steps that evict or grow, another prompt, and slots that are sorted again."""
    pair = [Layer(text, [26, 17] if base == "full" else [13, 9], new=3) for text in policies(base, reader)]
    valid = torch.arange(26) >= torch.tensor([[0], [9]])
    assert torch.equal(*(layer.prompt(*draw(26, 1, batch=2), valid) for layer in pair))
    for step in range(14):
        if step == 7:
            for layer in pair:
                layer.budgets = [budget + 6 for budget in layer.budgets]
            assert torch.equal(*(layer.prompt(*draw(6, 90, batch=2)) for layer in pair))
        now = draw(1, 20 + step, batch=2)
        mask = torch.tensor([[True], [step % 3 > 0]])
        assert torch.equal(*(layer.step(*now, valid=mask) for layer in pair))
        plain, host = (layer.store.step_bytes for layer in pair)
        assert plain == (host.moved, 0, 0)
        assert (host.loaded, host.stored) == copied(pair[1], rows=2)
        for layer in pair:
            layer.between()


def copied(layer: Layer, rows: int) -> tuple[int, int]:
    """The bytes that a step copies to the device and from it, by the options of the reader alone."""
    reader: Any = layer.policy.reader
    page = getattr(reader, "page", 1)
    slots = layer.store.tensors.positions.shape[-1]
    count = -(-reader.read // page) * page
    each = rows * HEADS * DIM * NUMBER
    if count >= slots:
        return each * 2 * slots, each * 2
    # Of chosen keys that are rebuilt, only those that are read as they are stored.
    keys = reader.recent + reader.sinks if reader.traits.rebuilds else count
    return each * (keys + count + page), each * 2  # the keys of the page that was written, to bound it again


@pytest.mark.parametrize("policy", REUSE)
@pytest.mark.parametrize("base", ["full", "snapkv"])
def test_layers_that_follow_are_in_host_memory(policy: str, base: str) -> None:
    """And those that look at every key to choose, or read everything themselves, are on the device."""
    plain, host = (conversation(text, build("llama", layers=4)) for text in policies(base, policy))
    assert torch.equal(plain[1], host[1])
    places = [layer.store.spec.host for layer in host[0].policy_layers]
    assert places == ([False, True] * 2 if "exact" in policy else [True] * 4)
    for layer in host[0].policy_layers:
        shape = index_of(layer.store).shape
        assert shape is not None
        heads = layer.keys.shape[1]
        dim = layer.keys.shape[-1]
        keys = 2 if layer.store.tensors.reads and layer.store.tensors.reads.index else 0
        expected = heads * dim * NUMBER * (2 * shape.slots + keys) if layer.store.spec.host else 0
        assert layer.store.step_bytes.loaded == expected
    assert host[0].report().loaded == sum(layer.store.step_bytes.loaded for layer in host[0].policy_layers) > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reader", READERS[:2])
@pytest.mark.parametrize("family", ["deepseek_v2", "kimi_linear", "mimo_v2_flash"])
def test_values_that_are_a_part_of_keys_or_of_another_size(family: str, reader: str, dtype: torch.dtype) -> None:
    plain, host = (conversation(policy, build(family, dtype)) for policy in policies("h2o", reader))
    assert torch.equal(plain[1], host[1])
    assert any(layer.store.step_bytes.loaded for layer in host[0].policy_layers)


def conversation(policy: str, model: Any) -> tuple[PolicyCache, Tensor]:
    """A cache after a prompt, steps and another prompt, and the logits."""
    turns = [40, 1, 1, 1, 7, 1, 1, 1]
    ids, mask = make_batch([40], turns)
    with kvpolicy.attach(model, policy):
        cache = PolicyCache(model, new=sum(turns[1:]))
        return cache, talk(model, ids, mask, turns, cache)


PLANNED = [*REUSE, *READERS, "labels:read=0.2:channels=3:dense=1"]


@product("base,policy", BASES[:3], PLANNED, sample=each_once(BASES[:3], PLANNED))
def test_both_places_hold_what_was_planned(base: str, policy: str) -> None:
    _, text = policies(base, policy)
    with attached(text, [40, 33], [40] + [1] * 6, layers=4) as (model, ids, mask):
        cache = prompted(model, ids, mask, 40, new=6)
        steps(model, ids, mask, 40, 46, cache)
    plan = kvpolicy.plan(model.config, text, batch=2, prompt=[40, 33], new=6, dtype=torch.float32)
    report = cache.report()
    assert [layer.held() for layer in cache.policy_layers] == [layer.nbytes for layer in plan.layers]
    held = [layer for layer in cache.policy_layers if layer.store.spec.host]
    vectors = sum(layer.keys.nbytes + layer.values.nbytes for layer in held)
    assert plan.host_nbytes == cache.host_nbytes == report.host_nbytes == report.as_dict()["host_nbytes"] == vectors > 0
    assert plan.device_nbytes == plan.nbytes - vectors == report.device_nbytes
    counted = [layer.store.contents.link.counted for layer in cache.policy_layers]
    assert counted == [StepBytes(layer.moved, layer.loaded, layer.stored) for layer in plan.layers]
    assert (report.loaded, report.stored) == (plan.loaded, plan.stored)
    assert "are in host memory and" in str(report) and "are in host memory and" in str(plan)


def test_dense_layers_stay_on_the_device() -> None:
    cache, _ = conversation("full+quest:read=6:page=2:dense=1:host=true", build("llama", layers=2))
    first, second = (layer.held() for layer in cache.policy_layers)
    assert "host" not in first and first["exact"] == second["host"] > 0 == second["exact"]


def test_a_budget_in_bytes_bounds_the_device() -> None:
    """So that more tokens fit, and no fewer than the budget has room for."""
    sizes: dict[str, Any] = {"prompt": 400, "new": 8, "dtype": torch.float32}
    reader = "labels:read=16:channels=4:dense=0"
    config = build("llama", layers=4).config
    plain = kvpolicy.plan(config, f"snapkv+{reader}@48KiB", **sizes)
    host = kvpolicy.plan(config, f"snapkv+{reader}:host=true@48KiB", **sizes)
    assert host.device_nbytes <= 48 * 1024 < host.nbytes and plain.nbytes <= 48 * 1024
    assert host.layers[0].tokens > plain.layers[0].tokens
    tokens = host.layers[0].tokens
    more = kvpolicy.plan(config, f"snapkv+{reader}:host=true@{tokens + 1}", **sizes)
    assert more.device_nbytes > 48 * 1024
    later = dataclasses.replace(host, prefill=None, peak_nbytes=0)  # once the prompt is prefilled
    assert later.largest_batch(2**20) == 2**20 // host.device_nbytes > 2**20 // host.nbytes
    by_layer = Policy.by_layer([f"snapkv+{reader}:host=true@0.5", f"h2o+{reader}@0.5"] * 2, budget="48KiB")
    plan = kvpolicy.plan(config, by_layer, **sizes)
    assert plan.device_nbytes <= 48 * 1024 < plan.nbytes


def test_plans_of_earlier_files_copy_nothing() -> None:
    policy = Policy.parse("full+labels:read=16:channels=4:dense=1:host=true")
    plan = kvpolicy.plan(build("llama", layers=2).config, policy, prompt=400, dtype=torch.float32)
    content: dict[str, Any] = plan_to_dict(plan) | {"columns": None}
    no_prefill: Any = None  # what a plan without the length of its prompt does not ask for
    assert plan_from_dict(policy, content, no_prefill).loaded == plan.loaded > 0 < plan.stored
    for layer in content["layers"]:
        del layer["loaded"], layer["stored"]
    older = plan_from_dict(policy, content, no_prefill)
    assert (older.loaded, older.stored, older.moved) == (0, 0, plan.moved)


def test_chunks_are_beside_what_the_device_holds() -> None:
    config = build("llama", layers=4).config
    policy = "full+labels:read=16:channels=4:dense=1:host=true"
    plan = kvpolicy.plan(config, policy, prompt=400, chunk=100, dtype=torch.float32)
    each = plan.layers[0].nbytes["exact"] // 400  # of a token, in a layer that is not in host memory
    assert plan.peak_nbytes == plan.device_nbytes + 100 * each


def test_a_prompt_that_waits_is_on_the_device() -> None:
    """Until its last chunk, the layer has no slots, and a step would copy nothing."""
    policy = "snapkv+labels:read=6:channels=3:dense=0:host=true@0.5"
    with attached(policy, [20], [20, 10], layers=2, chunks="hold") as (model, ids, mask):
        cache = prompted(model, ids, mask, 20, prompt=30)
        waiting = cache.report()
        assert (waiting.host_nbytes, waiting.loaded, waiting.stored) == (0, 0, 0)
        assert waiting.layers[0].nbytes["waiting prompt"] > 0
        forward(model, ids, mask, 20, 30, cache)
        assert cache.report().host_nbytes > 0 and "waiting prompt" not in cache.report().layers[0].nbytes


def test_beams_resets_and_files(tmp_path: Path) -> None:
    """What a cache can do otherwise, it can do with host memory, to the last bit."""
    file = tmp_path / "cache.safetensors"
    made: list[list[Tensor]] = []
    for policy in policies("h2o", READERS[1]):
        with attached(policy, [30, 21], [30] + [1] * 8, layers=2) as (model, ids, mask):
            cache = PolicyCache(model, new=8)
            logits = [forward(model, ids, mask, 0, 30, cache)]
            cache.reset()
            logits.append(forward(model, ids, mask, 0, 30, cache))
            cache.reorder_cache(torch.tensor([1, 0]))
            ids, mask = ids.flip(0), mask.flip(0)
            logits.append(forward(model, ids, mask, 30, 31, cache))
            cache.mark(3)
            logits.append(steps(model, ids, mask, 31, 34, cache))
            cache.rollback(1)
            cache.save(file)
            loaded = PolicyCache.load(model, file)
            assert loaded.host_nbytes == cache.host_nbytes == loaded.report().host_nbytes
            assert (cache.host_nbytes > 0) == ("host" in policy) and loaded.plan == cache.plan
            logits += [forward(model, ids, mask, 32, 33, each) for each in (cache, loaded)]
            assert torch.equal(*logits[-2:])
            made.append([*logits, model.generate(ids[:1, :12], max_new_tokens=6, num_beams=3, do_sample=False)])
    assert all(map(torch.equal, *made))


@pytest.mark.parametrize("reader", READERS)
def test_shifts(reader: str) -> None:
    made: list[Tensor] = []
    for policy in policies("full", reader):
        with attached(policy, [30], [30] + [1] * 8, layers=2) as (model, ids, mask):
            cache = prompted(model, ids, mask, 30, new=8)
            logits = [steps(model, ids, mask, 30, 34, cache)]
            cache.shift(20, -4)
            made.append(torch.cat([*logits, steps(model, ids[:, 4:], mask[:, 4:], 30, 33, cache)], 1))
            assert (cache.host_nbytes > 0) == ("host" in policy)
    assert torch.equal(*made)


@dataclasses.dataclass(frozen=True)
class Scan(Reader):
    """A reader that looks at every key."""

    @property
    def traits(self) -> ReaderTraits:
        """Of keys in host memory."""
        return ReaderTraits(scan=ExactTopK(), host=True)

    def score(self, index: Index, queries: Tensor, products: Callable[[Tensor], Tensor]) -> Tensor:
        """The products with every key."""
        return products(queries)


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("tokenwise+quest:host=true", "The codec must be plain for the reader quest"),
        ("h2o+merge+labels:host=true@0.5", "The merger must not merge while decoding for the reader labels"),
        ("full+exact:host=true", "The options of 'exact' must be among read, dense, recent, got 'host'"),
        ("full+quest:host=1", "must be true or false, got '1'"),
    ],
)
def test_what_would_copy_everything_is_refused(policy: str, message: str) -> None:
    with pytest.raises(KVPolicyError, match=message):
        Policy.parse(policy)


def test_a_reader_of_every_key_is_refused() -> None:
    with pytest.raises(KVPolicyError, match="A reader must choose by an index to leave keys and values in host memory"):
        Policy(reader=Scan())
    assert Policy(reader=Reuse(base=Scan())).reader.traits.host


def test_mergers_of_prompts_and_of_caches_that_grow_are_taken() -> None:
    for text in ("h2o+regress+labels:host=true@0.5", "h2o:decode=grow+merge+labels:host=true@0.5"):
        assert str(Policy.parse(text)) == text


def test_the_link_counts_what_lies_in_host_memory() -> None:
    source = torch.arange(24.0).view(1, 2, 4, 3)
    link = Link(host=True)
    link.start()
    got = link.rows(source, torch.tensor([[[3, 0], [1, 1]]]))
    assert torch.equal(got[0, 0], source[0, 0, [3, 0]]) and torch.equal(got[0, 1], source[0, 1, [1, 1]])
    got.zero_()
    assert float(source.sum()) == 276  # a copy
    assert link.counted == (48, 48, 0)
    link.whole(source)
    link.count_stored(source, 2)
    assert link.counted == (48 + 96, 48, 48)
    assert link.all_vectors((source, source), source.device)[0] is source
    assert link.counted == (48 + 288, 48 + 192, 48)
    link.count_stored(source[:, :, :0], 1)
    link.stop()
    link.count_stored(source, 1)
    assert link.counted == (48 + 288, 48 + 192, 48)


def test_memory_is_pinned_for_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    held = torch.ones(2)
    assert to_host(held, torch.device("cpu")) is held
    meta = held.to("meta")
    assert to_host(meta, meta.device) is meta
    assert not pins(torch.device("cpu"))
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    assert pins(torch.device("cuda")) and not pins(torch.device("cpu")) and not pins(torch.device("meta"))
    slots = torch.tensor([[[2, 0]]])
    one, other = load_slots((torch.eye(3)[None, None], torch.eye(3)[None, None] + 1), slots)
    assert one.tolist() == [[[[0, 0, 1], [1, 0, 0]]]] == (other - 1).tolist()


def test_another_device_than_the_host() -> None:
    """Nothing that a layer does mixes tensors of both places; see `places.py`."""
    command = [sys.executable, "-m", "tests.engine.places", *ELSEWHERE]
    found = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True, timeout=300, check=False)
    assert found.returncode == 0, found.stderr[-2000:]
    assert found.stdout.split() == [word for policy in ELSEWHERE for word in ("same", policy)]


def test_a_stage_is_counted_by_slots_and_by_groups() -> None:
    per_slot = torch.zeros(1, 2, 8, 4)
    per_group = torch.zeros(1, 2, 2, 4)
    whole = torch.zeros(1, 2, 1, 4)
    for page, groups in ((1, 2), (4, 1)):
        link = Link()
        link.start()
        link.count_stage(Floats(per_slot, per_group, whole), 8, 3, 4, page)
        assert link.moved == 4 * (2 * 3 * 4 + 2 * groups * 4 + 2 * 4)
