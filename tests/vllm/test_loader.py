"""What the process of a rank writes into blocks, and which blocks it reports."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvpolicy import KVPolicyError
from kvpolicy.hf.cache_file import read
from kvpolicy.hf.dense_cache import dense_layers
from kvpolicy_vllm import loading, read_document
from kvpolicy_vllm.loading import Heads, Loader, check_own, layers_of
from kvpolicy_vllm.requests import Load
from tests.vllm.models import Saved, make_text, save

BLOCK = 16
LAYERS = 3
HEADS = 2
DIM = 32
WHOLE = Heads(0, HEADS)
BLOCKS = (7, 2, 5)
"""Blocks of a document of 35 tokens."""


class Pool:
    """The blocks of an engine, and what writes to them."""

    def __init__(self, heads: int = HEADS) -> None:
        self.keys = torch.full((LAYERS, 8 * BLOCK, heads, DIM), torch.nan)
        self.values = self.keys.clone()
        self.writes = 0
        self.broken = -1

    def write(self, layer_idx: int, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        if layer_idx == self.broken:
            raise RuntimeError("out of memory")
        assert keys.is_contiguous() and values.is_contiguous() and len(slots) == len(keys)
        self.writes += 1
        self.keys[layer_idx, slots] = keys
        self.values[layer_idx, slots] = values

    def written(self) -> list[int]:
        """Slots that all layers have."""
        return (~self.keys.isnan()).all(0).all(-1).all(-1).nonzero().flatten().tolist()


def loader_of(saved: Saved, pool: Pool, heads: Heads = WHOLE, layers: Any = range(LAYERS)) -> Loader:
    return Loader(saved.engine, heads, BLOCK, layers, pool.write)


def load_of(saved: Saved, start: int = 0, blocks: tuple[int, ...] = BLOCKS, **fields: Any) -> Load:
    found = read_document(saved.path)
    defaults: dict[str, Any] = {"request_id": "r", "path": str(saved.path), "digest": found.digest, "kept": found.kept}
    merged: dict[str, Any] = defaults | {"start": start, "blocks": blocks} | fields
    return Load(**merged)


def slots_of(start: int, stop: int = 35, blocks: tuple[int, ...] = BLOCKS) -> list[int]:
    return [blocks[token // BLOCK] * BLOCK + token % BLOCK for token in range(start, stop)]


@pytest.mark.parametrize("start", [0, 16, 32])
def test_tokens_are_in_the_slots_of_their_blocks(saved: Saved, start: int) -> None:
    """And nothing is in the blocks of the question."""
    pool = Pool()
    assert loader_of(saved, pool).load([load_of(saved, start, (*BLOCKS, 0, 1))]) == set()
    assert pool.written() == sorted(slots_of(start))
    for layer in dense_layers(read(saved.path), saved.engine.skeleton, "doc"):
        for found, wanted in ((pool.keys, layer.keys), (pool.values, layer.values)):
            assert torch.equal(found[layer.layer_idx, slots_of(start)], wanted[:, start:].transpose(0, 1))


def test_tails_come_from_memory(saved: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole blocks are shared by the prefix cache, and what is behind them is written for every request."""
    reads: list[Path] = []

    def read_and_count(path: Path, **options: Any) -> Any:
        reads.append(path)
        return read(path, **options)

    monkeypatch.setattr(loading, "read", read_and_count)
    pool = Pool()
    again = Pool()
    loader = loader_of(saved, pool)
    loader.load([load_of(saved), load_of(saved, 32, (7, 2, 1))])
    assert len(reads) == 1
    loader_of(saved, again).load([load_of(saved, 32, (7, 2, 1))])
    assert again.written() == slots_of(32, blocks=(7, 2, 1))
    assert torch.equal(pool.keys[:, again.written()], again.keys[:, again.written()])
    loader.load([load_of(saved, 16)])  # not the whole of it is in the tail
    assert len(reads) == 3


def test_the_fewest_tails_are_forgotten_first(saved: Saved, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(loading, "TAILS", 2)
    loader = loader_of(saved, Pool())
    paths = [
        save(saved.model, "keydiff@35", make_text(saved.model, 70, n), tmp_path / f"{n}.safetensors") for n in (1, 2, 3)
    ]
    loads = [load_of(saved, path=str(path), digest=read_document(path).digest) for path in paths]
    loader.load([loads[0], loads[1]])
    loader.load([load_of(saved, 32, path=loads[0].path, digest=loads[0].digest), loads[2]])
    assert [*loader._tails] == [loads[0].digest, loads[2].digest]


@pytest.mark.parametrize("start", [0, 16, 32])
def test_a_write_that_fails_reports_the_blocks_of_its_load(saved: Saved, start: int) -> None:
    pool = Pool()
    loader = loader_of(saved, pool)
    pool.broken = 1
    assert loader.load([load_of(saved, start, (*BLOCKS, 0))]) == {*BLOCKS[start // BLOCK :]}
    pool.broken = -1
    assert loader.load([load_of(saved, start)]) == set()
    assert pool.written() == sorted(slots_of(start))


def test_loads_fail_alone(saved: Saved, tmp_path: Path) -> None:
    pool = Pool()
    bad = load_of(saved, path=str(tmp_path / "missing"), blocks=(0, 1, 3))
    refused = Load("r", "", "", 17, 16, (6, 4), "a reason")
    failed = loader_of(saved, pool).load([bad, load_of(saved), refused])
    assert failed == {0, 1, 3, 4}
    assert pool.written() == sorted(slots_of(0))


def test_other_content_than_the_prompt_was_made_for_fails(
    saved: Saved, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = save(saved.model, "keydiff@35", make_text(saved.model, 70, 5), tmp_path / "d.safetensors")
    pool = Pool()
    assert loader_of(saved, pool).load([load_of(saved, path=str(other))]) == {*BLOCKS}
    assert "must be the one that the prompt was made for, got an edited file; try the request again" in caplog.text
    content = bytearray(saved.path.read_bytes())
    content[-1] ^= 1
    other.write_bytes(bytes(content))
    assert loader_of(saved, pool).load([load_of(saved, path=str(other))]) == {*BLOCKS}
    assert loader_of(saved, pool).load([load_of(saved, kept=34)]) == {*BLOCKS}
    assert "must hold 34 tokens, got 35; save it again" in caplog.text
    assert pool.written() == []


def test_layers_of_other_ranks_are_left_out(saved: Saved, caplog: pytest.LogCaptureFixture) -> None:
    pool = Pool()
    assert loader_of(saved, pool, layers=[1]).load([load_of(saved)]) == set()
    assert [bool(layer.isnan().all()) for layer in pool.keys] == [True, False, True]
    assert loader_of(saved, pool, layers=[1, 3]).load([load_of(saved)]) == {*BLOCKS}
    assert "must have the layers [1, 3], got [1]; make it with the model that is served" in caplog.text


def test_ranks_write_their_own_heads(saved: Saved) -> None:
    whole = Pool()
    parts = [Pool(1), Pool(1)]
    loader_of(saved, whole).load([load_of(saved)])
    for rank, pool in enumerate(parts):
        loader = loader_of(saved, pool, Heads.of(HEADS, rank, 2))
        assert loader.load([load_of(saved), load_of(saved, 32)]) == set()
    assert torch.equal(torch.cat([pool.keys for pool in parts], 2).nan_to_num(), whole.keys.nan_to_num())
    assert torch.equal(torch.cat([pool.values for pool in parts], 2).nan_to_num(), whole.values.nan_to_num())


@pytest.mark.parametrize(("total", "size"), [(8, 1), (8, 2), (8, 8), (2, 4), (1, 8), (4, 8)])
def test_heads_are_divided_or_repeated(total: int, size: int) -> None:
    """As vLLM divides the weights: a rank has some heads, or ranks beside each other have the same one."""
    held = [[*range(first, first + number)] for first, number in (Heads.of(total, rank, size) for rank in range(size))]
    assert [*itertools.chain(*held)] == [head for head in range(total) for _ in range(max(size // total, 1))]


@pytest.mark.parametrize(("total", "size"), [(8, 3), (6, 4), (4, 6)])
def test_heads_that_cannot_be_divided_are_refused(total: int, size: int) -> None:
    with pytest.raises(KVPolicyError, match=f"must divide the {total} KV heads or be a multiple of them, got {size}"):
        Heads.of(total, 0, size)


def attention(**fields: Any) -> SimpleNamespace:
    impl = SimpleNamespace(do_kv_cache_update=print, alibi_slopes=fields.pop("alibi", None))
    return SimpleNamespace(**({"kv_cache": None, "sliding_window": None, "impl": impl} | fields))


NO_UPDATE = "write .* by do_kv_cache_update .*, got the backend SimpleNamespace; try"


def index_of(name: str) -> int:
    return int(name.split(".")[1])


def test_layers_are_found_by_their_index() -> None:
    modules = {"layers.4.attn": attention(), "layers.0.attn": attention(), "layers.0.mlp": SimpleNamespace()}
    found = layers_of(modules, index_of)
    assert found == {4: modules["layers.4.attn"], 0: modules["layers.0.attn"]}


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (attention(sliding_window=128), "be full attention for documents, got a sliding window"),
        (attention(alibi=[0.5]), "have rotary positions for documents, got ALiBi"),
        (attention(kv_sharing_target_layer_name="layers.0.attn"), "have its own cache .*, got a shared one"),
        *((module, NO_UPDATE) for module in (attention(impl=SimpleNamespace()), SimpleNamespace(kv_cache=None))),
    ],
)
def test_layers_that_are_refused(module: Any, message: str) -> None:
    with pytest.raises(KVPolicyError, match=f"The attention of layers.1.attn must {message}"):
        layers_of({"layers.0.attn": attention(), "layers.1.attn": module}, index_of)


def test_two_layers_of_one_index_are_refused() -> None:
    with pytest.raises(KVPolicyError, match="must be the only one of layer 1 for documents, got two"):
        layers_of({"layers.1.attn": attention(), "draft.1.attn": attention()}, index_of)


def test_caches_of_another_engine_are_refused() -> None:
    """They would be left as they are, and documents written to those of the first engine."""
    modules = {f"layers.{n}.attn": attention(kv_cache=torch.zeros(3)) for n in range(2)}
    caches = {name: module.kv_cache for name, module in modules.items()}
    check_own(modules, caches)
    for others in ({"layers.1.attn": torch.zeros(3)}, {"layers.7.attn": torch.zeros(3)}):
        with pytest.raises(KVPolicyError, match="must be alone in its process for documents, got another one's cache"):
            check_own(modules, caches | others)
