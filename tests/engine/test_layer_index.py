"""The index of a layer: always that of its slots, counted, and the bytes of a step as planned."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import kvpolicy
from kvpolicy import DoubleSparsity, PolicyCache
from kvpolicy.engine import layer_slots
from kvpolicy.engine.layer_index import StepReads
from kvpolicy.engine.layer_spec import LayerSpec
from kvpolicy.engine.layer_store import LayerStore
from kvpolicy.engine.reading import by_entry, row_entries
from kvpolicy.engine.state import map_state, slot_tensors, tensors
from kvpolicy.hf import cache_file
from kvpolicy.registry import names
from kvpolicy.text.tables import format_bytes
from tests.conformance.fakes import Fake
from tests.conformance.models import build
from tests.conformance.play import make_batch, talk
from tests.conformance.policies import CODECS, GROUPING, RANKED, REBUILDING, spec_of, words
from tests.engine.filled import attached
from tests.engine.parts import index_of
from tests.readers.bench import DIM, HEADS, Layer, draw
from tests.sampling import each_once, product

READERS = [name for name in names("reader") if name not in ("all", "reuse")]
"""`reuse` takes two layers: tests/readers/test_reuse.py."""
READ = [name for name in CODECS if name not in GROUPING]
"""Codecs of which a reader may leave slots unread."""
INDEXED = [name for name in READERS if name != "exact"]
TILES = [2, 8, 24]
EVICTING = ["snapkv", "h2o", "snapkv+merge", "h2o+compensate", "h2o+d2o"]
STEPS = 12


def takes(row: tuple[Any, ...]) -> bool:
    """Whether a reader is combined with the codec in a base, or of this name."""
    reader, base = row[:2]
    return reader not in REBUILDING or base in ("plain", "full", *EVICTING)


def policy(base: str, reader: str) -> str:
    return f"{base}+{spec_of(reader)}" + ("@0.5" if base in EVICTING else "")


def live_entries(layer: Layer) -> list[Tensor]:
    """The tensors of the index, 0 where an entry holds no token."""
    store = layer.store
    shape = index_of(store).shape
    assert shape is not None and store.tensors.reads
    live = (by_entry(shape, store.tensors.positions) >= 0).any(-1)
    return [
        t * live[..., None] if t.shape[2] == shape.entries else t.clone() for t in tensors(store.tensors.reads.index)
    ]


@product("slots,reader", TILES, INDEXED, sample=[*((8, reader) for reader in INDEXED), (2, "quest"), (24, "quest")])
def test_an_index_is_the_same_in_tiles(slots: int, reader: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the last tile has a single entry."""
    layer = Layer(policy("full", reader), [26], new=0)
    layer.prompt(*draw(26, 1))
    shape = index_of(layer.store).shape
    assert shape is not None
    assert slots != 8 or shape.entries % max(slots // shape.page, 1) == (1 if shape.page == 2 else 2)
    whole = live_entries(layer)
    reads: Any = layer.store.tensors.reads
    for t in tensors(reads.index):
        if t.shape[2] == shape.entries:
            t.zero_()
    monkeypatch.setattr(layer_slots, "REBUILD_SLOTS", slots)
    index_of(layer.store).rebuild()
    assert all(torch.equal(one, other) for one, other in zip(whole, live_entries(layer), strict=True))


def test_the_index_of_a_codec_whose_first_stage_has_no_slots() -> None:
    """After each step, it is what it would be if it were made anew."""
    layer = Layer("full+quest:read=6:page=2:dense=0", [26], new=STEPS)
    parts = layer.policy
    layer.store = LayerStore(
        LayerSpec(0, parts.selector, Fake(caps=(0,), block=3), parts.decode, parts.merger, parts.reader)
    )
    layer.prompt(*draw(26, 1))
    assert layer.store.layout.coded[0] == 0 < layer.store.layout.coded[1]
    for step in range(STEPS):
        layer.step(*draw(1, 20 + step))
        layer.between()


def test_a_row_that_is_given_slots_reads_more() -> None:
    """Also where the layer has so many slots already, for another row."""
    layer = Layer("full+exact:read=0.25", [40, 12], new=2)
    q, k, v = draw(40, 1, batch=2)
    layer.prompt(q, k, v, torch.arange(40) >= torch.tensor([[0], [28]]))
    reads: Any = layer.store.tensors.reads
    limits = set[int]()
    for step in range(16):
        layer.step(*draw(1, 20 + step, batch=2), valid=torch.tensor([[False], [True]]))
        layer.between()
        shape = index_of(layer.store).shape
        assert shape is not None and layer.store.layout.slots == 42
        want = row_entries(layer.policy.reader, layer.policy.codec, shape, layer.store.contents.expected_len)
        assert reads.limit.tolist() == want
        limits.add(want[1])
    assert len(limits) > 1


@pytest.mark.parametrize("base", ["snapkv", "snapkv+merge", "h2o+compensate"])
def test_slots_are_sorted_again_and_nothing_else_changes(base: str) -> None:
    one, other = (Layer(f"{base}+quest:read=6:page=2:dense=0:resort={n}@0.5", [13], new=STEPS) for n in (4, 99))
    for layer in (one, other):
        layer.prompt(*draw(26, 3))
    for step in range(STEPS):
        now = draw(1, 30 + step)
        for layer in (one, other):
            layer.step(*now)
            layer.between()
        for head in range(HEADS):
            held = one.store.tensors.positions[0, head].tolist()
            assert sorted(held) == sorted(other.store.tensors.positions[0, head].tolist())
            if step % 4 == 3:
                assert held == sorted(held)
    past: Any = one.store.past(), other.store.past()
    order = one.store.tensors.positions.argsort(-1), other.store.tensors.positions.argsort(-1)
    for a, b in zip(past[0][:2], past[1][:2], strict=True):
        sides = [t.gather(2, o[..., None].expand(-1, -1, -1, DIM)) for t, o in zip((a, b), order, strict=True)]
        assert torch.equal(*sides)


def test_slots_that_are_sorted_take_their_statistics_and_counts_along() -> None:
    layer = Layer("h2o+merge+quest:read=6:page=2:dense=0@0.5", [13])
    q, k, v = draw(26, 3)
    layer.prompt(q, k + 3, v)  # keys that are similar enough to be merged
    store = layer.store
    of_slots = slot_tensors((store.tensors.state, store.tensors.counts))
    held = [store.tensors.keys, store.tensors.values, store.tensors.positions, *of_slots]
    before = [t.clone() for t in held]
    assert store.tensors.log_counts is not None and len(store.tensors.log_counts.unique()) > 2
    assert torch.equal(held[2], held[2].sort(-1).values)
    for tensor in held:
        tensor.copy_(tensor.flip(2))
    index_of(store).sort_slots()
    assert all(map(torch.equal, held, before))


def test_a_row_is_fitted_to_its_first_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not to a prompt in which it has nothing but padding, nor to a later one."""
    layer = Layer("full+labels:read=6:channels=2:dense=0", [10, 10], new=60)
    fit = DoubleSparsity.fit
    fitted = list[list[bool]]()

    def noted(self: DoubleSparsity, index: Any, salience: Tensor, first: Tensor) -> None:
        fitted.append(first.tolist())
        fit(self, index, salience, first)

    monkeypatch.setattr(DoubleSparsity, "fit", noted)
    q, k, v = draw(20, 4, batch=2)
    k[0, :, :10, [1, 5]] *= 50
    k[0, :, 10:, [0, 2]] *= 500
    k[1, ..., [3, 4]] *= 50
    for columns, there in ((slice(10), [True, False]), (slice(10, 20), [True, True])):
        valid = torch.tensor(there)[:, None].expand(-1, 10)
        layer.prompt(q[:, :, columns], k[:, :, columns], v[:, :, columns], valid)
    assert fitted == [[True, False], [False, True]]
    reads: Any = layer.store.tensors.reads
    assert reads.index.channels.tolist() == [[[1, 5]] * HEADS, [[3, 4]] * HEADS]


def test_channels_outlast_a_layer_that_was_too_short_to_be_indexed() -> None:
    """At first everything is read; once the cache grows, labels have the channels of the prompt."""
    layer = Layer("full+labels:read=20:channels=2:dense=0", [10], new=2)
    q, k, v = draw(10, 6)
    k[..., [3, 4]] *= 50
    layer.prompt(q, k, v)
    assert index_of(layer.store).shape is None
    for step in range(40):
        layer.step(*draw(1, 60 + step))
        layer.between()
    assert index_of(layer.store).shape is not None
    reads: Any = layer.store.tensors.reads
    assert reads.index.channels.tolist() == [[[3, 4]] * HEADS]
    assert layer.read is not None and len(layer.positions_read(0, 0)) == 20


def test_unread_slots_get_no_attention() -> None:
    layer = Layer("h2o+labels:read=4:dense=0@0.9", [24], new=4)
    layer.prompt(*draw(26, 9))
    before: Any = map_state(torch.clone, layer.store.tensors.state)
    layer.step(*draw(1, 10))
    for head in range(HEADS):
        read = layer.positions_read(0, head)
        after: Any = layer.store.tensors.state
        for slot, position in enumerate(layer.store.tensors.positions[0, head].tolist()):
            changed = float(after[0][0, head, slot]) != float(before[0][0, head, slot])
            assert changed <= (position in read), "only what was read has attention"


CODED = [codec for codec in READ if codec != "plain"]


def text_of(reader: str, codec: str) -> str:
    """A policy of a cache that grows."""
    if codec not in RANKED:
        return f"full+{spec_of(codec)}+{spec_of(reader)}"
    return f"h2o:decode=grow+{spec_of(codec)}+{spec_of(reader).replace('page=2', 'page=1')}@0.8"


@product("reader,codec", READERS, CODED, sample=[row for row in each_once(READERS, CODED) if takes(row)], allowed=takes)
def test_only_chosen_slots_are_decoded(reader: str, codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage is asked for no more slots than are read, in every step."""
    asked: list[int] = []
    model = build("llama", layers=1)
    turns = [40] + [1] * 6
    ids, mask = make_batch([40], turns)
    policy = kvpolicy.Policy.parse(text_of(reader, codec))
    scans = policy.reader.traits.scan is not None
    attend = StepReads.attend
    inside: list[bool] = []
    for kind in {type(each) for each in policy.codec.stages}:
        for name in ("keys", "values"):
            original = getattr(kind, name)

            def counted(self: Any, store: Any, at: Any, original: Any = original) -> Tensor:
                if inside:
                    assert isinstance(at, Tensor) or scans
                    if isinstance(at, Tensor):
                        asked.append(at.shape[-1])
                return original(self, store, at)

            monkeypatch.setattr(kind, name, counted)

    def watched(self: StepReads, *given: Any) -> Any:
        inside.append(True)
        try:
            return attend(self, *given)
        finally:
            inside.clear()

    monkeypatch.setattr(StepReads, "attend", watched)
    with kvpolicy.attach(model, policy):
        cache = PolicyCache(model, new=6)
        talk(model, ids, mask, turns, cache)
    shape = index_of(cache.policy_layers[0].store).shape
    assert shape is not None
    assert asked and max(asked) == shape.slots


DEALT = [row for row in each_once(READERS, READ, ["padded", "one"]) if row[0] not in REBUILDING]
WITH_PLAIN = [*itertools.product(REBUILDING, ["plain"], ["one", "padded"])]


@product("reader,codec,rows", READERS, READ, ["one", "padded"], sample=[*DEALT, *WITH_PLAIN], allowed=takes)
def test_held_and_moved_are_planned(reader: str, codec: str, rows: str) -> None:
    check_bytes(text_of(reader, codec), [40] if rows == "one" else [40, 21])


EVICTED = (READERS, ["0.5", "16", "24KiB"], ["snapkv", "h2o", "snapkv+merge", "h2o+compensate"])


@product("reader,budget,selector", *EVICTED, sample=each_once(*EVICTED))
def test_held_and_moved_are_planned_under_eviction(reader: str, budget: str, selector: str) -> None:
    cache = check_bytes(words(selector, spec_of(reader), budget=budget), [40, 33])
    if budget == "24KiB":
        assert cache.nbytes <= 24 * 1024


@pytest.mark.parametrize(("selector", "codec"), [("snapkv", "tokenwise"), ("h2o+compensate", "staircase")])
def test_held_and_moved_are_planned_where_coded_slots_are_emptied(selector: str, codec: str) -> None:
    check_bytes(words(selector, codec, "sparq", budget="0.6"), [40, 21])


def check_bytes(text: str, rows: list[int]) -> PolicyCache:
    model = build("llama", layers=2)
    turns = [40] + [1] * 6
    ids, mask = make_batch(rows, turns)
    with kvpolicy.attach(model, text):
        cache = PolicyCache(model, new=6)
        talk(model, ids, mask, turns, cache)
    plan = kvpolicy.plan(model.config, text, batch=len(rows), prompt=rows, new=6, dtype=torch.float32)
    assert cache.nbytes == plan.nbytes
    assert [layer.held() for layer in cache.policy_layers] == [layer.nbytes for layer in plan.layers]
    moved = [layer.moved for layer in cache.policy_layers]
    assert moved == [layer.moved for layer in plan.layers]
    assert moved == [layer.store.contents.link.moved for layer in cache.policy_layers]
    report = cache.report()
    assert report.moved == plan.moved == sum(moved) == report.as_dict()["moved"]
    assert report.all_moved == sum(layer.all_moved for layer in plan.layers)
    assert "compression" not in str(report) and f"moves {format_bytes(report.moved)}," in str(report)
    return cache


def test_first_layers_read_everything_and_have_no_index() -> None:
    model = build("llama", layers=2)
    turns = [40] + [1] * 3
    ids, mask = make_batch([40], turns)
    with kvpolicy.attach(model, "labels:read=4:dense=1"):
        cache = PolicyCache(model, new=3)
        talk(model, ids, mask, turns, cache)
    first, second = cache.policy_layers
    assert first.held()["index"] == 0 < second.held()["index"]
    assert first.moved > second.moved


def test_a_basis_belongs_to_the_model(tmp_path: Path) -> None:
    """It is no part of the cache, and the layer that reads everything has none."""
    path = tmp_path / "cache.safetensors"
    with attached(spec_of("loki").replace("dense=0", "dense=1"), [40], [40], layers=2) as (model, ids, mask):
        cache = PolicyCache(model)
        talk(model, ids, mask, [40], cache)
        assert cache.plan is not None
        assert cache.resident_nbytes == cache.plan.resident_nbytes == DIM * 3 * 4
        cache.save(path)
        assert cache_file.read(path).header["calibrations"]
        PolicyCache.load(model, path)


@pytest.mark.parametrize("reader", READERS)
def test_turns_and_unannounced_growth(reader: str) -> None:
    """A second prompt, and steps that nobody announced: the index follows the layout."""
    layer = Layer(policy("full", reader), [14], new=1)
    layer.prompt(*draw(14, 11))
    for step in range(20):
        layer.step(*draw(1, 100 + step))
        layer.between()
    layer.budgets = [50]
    layer.prompt(*draw(15, 12))
    layer.step(*draw(1, 13))
    reads: Any = layer.store.tensors.reads
    shape = index_of(layer.store).shape
    assert shape is not None and reads.limit.tolist() == [shape.chosen]
