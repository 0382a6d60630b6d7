"""Selectors that are calibrated, KVzap and Q-Filters: gates of the definition, files of their own, ranks and bytes."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import kvpolicy
from kvpolicy import KVzap, Policy, PolicyCache, QFilters
from kvpolicy.calibration.qfilters import sample_queries
from kvpolicy.engine.state import map_state
from kvpolicy.protocols import HeadShape, Ranks, View
from kvpolicy.selectors.filter_files import FILTER_FILES, FilterFile
from kvpolicy.selectors.gate_files import GATE_FILES, GateFile, Inner, LayerGate
from kvpolicy.statistics import Candidates, InputScores, NewScores, Results, Vectors
from tests.conformance.bench import Bench, draw
from tests.conformance.calibration import filters, gates
from tests.conformance.models import build
from tests.conformance.play import forward, make_batch

Write = Callable[[GateFile | FilterFile], str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write a file of filters or gates; its path."""

    def write(content: GateFile | FilterFile) -> str:
        path = tmp_path / "file.safetensors"
        if isinstance(content, FilterFile):
            FILTER_FILES.save(path, content)
        else:
            GATE_FILES.save(path, content)
        return str(path)

    return write


def slow_scores(gate: LayerGate, inputs: list[list[float]]) -> list[list[float]]:
    """The score of each token [n][hidden] by each head, in Python numbers."""

    def affine(weight: Tensor, bias: Tensor, vector: list[float]) -> list[float]:
        pairs = zip(weight.double().tolist(), bias.double().tolist(), strict=True)
        return [sum(w * x for w, x in zip(row, vector, strict=True)) + b for row, b in pairs]

    found = []
    for vector in inputs:
        units = vector
        if isinstance(gate.inner, Inner):
            units = [x / 2 * (1 + math.erf(x / math.sqrt(2))) for x in affine(*gate.inner, vector)]
        found.append(affine(gate.weight, gate.bias, units))
    return found


@pytest.mark.parametrize("layer", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gate_is_that_of_the_definition(layer: int, dtype: torch.dtype) -> None:
    gate = gates(heads=2).gates[layer]
    inputs = torch.randn(2, 7, 32, generator=torch.Generator().manual_seed(0)).to(dtype)
    got = gate.score(inputs)
    assert got.dtype == torch.float32 and got.shape == (2, 2, 7)
    for row in range(2):
        want = torch.tensor(slow_scores(gate, inputs[row].double().tolist())).T
        torch.testing.assert_close(got[row], want, atol=1e-4, rtol=1e-4)


def test_equal_inputs_have_equal_scores_in_any_company() -> None:
    gate = gates(heads=3, hidden=96).gates[0]
    inputs = torch.randn(1, 1, 96).expand(1, 70, -1)
    scores = torch.cat([gate.score(inputs[:, :count]) for count in (1, 2, 7, 31, 70)], 2)
    assert bool((scores == scores[..., :1]).all())


def test_the_window_is_at_most_half_the_budget(write: Write) -> None:
    content = GateFile({0: LayerGate(torch.zeros(1, 32), torch.zeros(1))})  # all tokens are equal
    path = write(content)
    for window, budget, kept in ((3, 7, [0, 1, 2, 3, 17, 18, 19]), (128, 5, [0, 1, 2, 18, 19]), (128, 1, [19])):
        bench = Bench(f"kvzap:file={path}:window={window}", [budget])
        bench.forward(*draw(20, 0))
        assert bench.turns[0].kept[0][0] == kept


def test_a_rank_has_the_gates_of_its_heads(write: Write) -> None:
    selector = KVzap(file=write(gates(heads=4)))
    inputs = torch.randn(2, 5, 32)
    whole = selector.score_inputs(selector.load_gate(3, "cpu"), inputs)
    parts = [selector.score_inputs(selector.load_gate(3, "cpu", own), inputs) for own in (slice(0, 3), slice(3, 4))]
    torch.testing.assert_close(torch.cat(parts, 1), whole)
    shared = gates(heads=1).gates[0]
    assert shared.of_heads(slice(1, 3)) is shared and shared.score(inputs).shape == (2, 1, 5)


def test_plans_count_the_bytes_of_the_scores_and_the_gates_apart() -> None:
    model, _ = kvpolicy.tiny()
    ids = torch.arange(3, 67)[None]
    with torch.no_grad(), kvpolicy.attach(model, "kvzap@0.5"):
        cache = PolicyCache(model)
        model(ids, cache=cache)
        assert cache.plan is not None and cache.nbytes == cache.plan.nbytes
        assert cache.resident_nbytes == cache.plan.resident_nbytes == 8 * (4 * 128 + 4) * 4
        held = [layer.held() for layer in cache.policy_layers]
    assert all(kinds["statistics"] == 4 * 4 * 32 for kinds in held)


def test_no_input_of_a_prompt_is_held(write: Write) -> None:
    """A prompt that waits holds a score for each token and head, and nothing of the size of its inputs."""
    model = build("llama", layers=2)
    path = write(gates(heads=2))
    ids, mask = make_batch([26, 17], [26])
    sizes = []
    for policy in (f"kvzap:file={path}@0.5", "window@0.5"):
        with kvpolicy.attach(model, policy, chunks="hold"):
            cache = PolicyCache(model, prompt=[50, 50], new=1)
            forward(model, ids, mask, 0, 26, cache)
            pending = cache.policy_layers[0].pending
            assert pending is not None and pending.forward is None
            sizes.append(pending.nbytes)
    assert sizes[0] - sizes[1] == 2 * 2 * 26 * 4


def test_expected_attention_is_the_exponential_of_the_score() -> None:
    selector = KVzap()
    positions = torch.arange(3, dtype=torch.int32).expand(1, 2, -1)
    new = NewScores(torch.tensor([[[0.0, -1.0, 99.0]]]), positions >= 0)
    view = View(positions, torch.tensor([3]), torch.tensor([3]), 0)
    state = selector.observe(selector.alloc(1, 2, 3, "cpu"), Results({InputScores: new}), view)
    found = selector.attention(state)
    assert found.shape == (1, 2, 3) and bool(found.isfinite().all())
    assert found[0, 0, :2].tolist() == pytest.approx([1.0, math.exp(-1)])


def test_copies_of_a_cache_share_the_gates(write: Write) -> None:
    model = build("llama", layers=2)
    ids, mask = make_batch([26], [26])
    with kvpolicy.attach(model, f"kvzap:file={write(gates(heads=2))}@0.5"):
        cache = PolicyCache(model, new=4)
        forward(model, ids, mask, 0, 26, cache)
        one, other = (each.policy_layers[1].store for each in (cache, cache.fork()))
    assert one.contents.gate is other.contents.gate
    assert one.tensors.state.score is not other.tensors.state.score


def test_a_saved_cache_needs_the_same_gates(write: Write, tmp_path: Path) -> None:
    model = build("llama", layers=2)
    path = write(gates(heads=2))
    ids, mask = make_batch([26], [26, 1])
    with kvpolicy.attach(model, f"kvzap:file={path}@0.5"):
        cache = PolicyCache(model, new=4)
        forward(model, ids, mask, 0, 26, cache)
        cache.save(tmp_path / "cache.safetensors")
        loaded = PolicyCache.load(model, tmp_path / "cache.safetensors")
        outs = [forward(model, ids, mask, 26, 27, each) for each in (cache, loaded)]
        assert torch.equal(*outs)
        first, second = (each.policy_layers[0].store.tensors.state.score for each in (cache, loaded))
        assert torch.equal(first, second)
    others = {layer: gate._replace(bias=gate.bias + 1) for layer, gate in gates(heads=2).gates.items()}
    GATE_FILES.save(path, GateFile(others))
    with (
        kvpolicy.attach(model, f"kvzap:file={path}@0.5"),
        pytest.raises(kvpolicy.KVPolicyError, match="calibrat"),
    ):
        PolicyCache.load(model, tmp_path / "cache.safetensors")


def test_it_predicts_what_a_replay_finds() -> None:
    """In text of the embedded model's kind, tokens that the gate keeps get more of the replay than those it evicts."""
    model, tokenizer = kvpolicy.tiny()
    ids = tokenizer("tiger=4821\nfalcon=1937\nlion=2261\nwolf=7764\nwhat is lion? " * 4, return_tensors="pt").input_ids
    found: dict[str, list[Tensor]] = {}
    for spec in ("kvzap", "kvzip:plus=true"):
        with torch.no_grad(), kvpolicy.attach(model, f"{spec}@1.0"):
            cache = PolicyCache(model)
            model(ids, cache=cache)
        selector: Any = Policy.parse(spec + "@1.0").selector
        found[spec] = [selector.attention(layer.store.tensors.state)[0].log() for layer in cache.policy_layers]
    better = 0
    for mine, its in zip(found["kvzap"], found["kvzip:plus=true"], strict=True):
        for head in range(4):
            better += float(torch.corrcoef(torch.stack([mine[head], its[head]]))[0, 1]) > 0.3
    assert better >= 24


def filtered(selector: QFilters, keys: Tensor, **fields: Any) -> Any:
    batch, heads, count, dim = keys.shape
    given: dict[str, Any] = {"layer_idx": 0} | fields
    view = View(
        torch.arange(count, dtype=torch.int32).expand(batch, heads, -1),
        torch.full((batch,), count),
        torch.full((batch,), 2),
        **given,
    )
    state = selector.alloc(batch, heads, count, "cpu", HeadShape(1, dim))
    return selector.observe(state, Results({Vectors: Candidates(keys, keys, 1.0)}), view)


def test_kept_keys_of_the_embedded_model_get_larger_products() -> None:
    """In most heads, keys of the best scores have larger products with the mean query, in text of another kind."""
    model, tokenizer = kvpolicy.tiny()
    ids = tokenizer("tiger=4821\nfalcon=1937\nlion=2261\nwolf=7764\n" * 8, return_tensors="pt").input_ids
    with torch.no_grad(), kvpolicy.attach(model, "full"):
        cache = kvpolicy.PolicyCache(model)
        model(ids, cache=cache)
    queries = sample_queries(model, [ids[0]], tokens=ids.shape[1])
    better = []
    for layer in cache.policy_layers:
        keys = layer.keys[0].float()
        order = filtered(QFilters(), keys[None], layer_idx=layer.layer_idx).score[0].argsort(-1)
        products = (keys @ queries[layer.layer_idx].unflatten(0, (4, 2)).mean((1, 2))[..., None]).squeeze(-1)
        count = order.shape[-1] // 5
        best = products.gather(-1, order[:, -count:]).mean(-1)
        rest = products.gather(-1, order[:, :-count]).mean(-1)
        better += (best > rest).tolist()
    assert len(better) == 32 and sum(better) >= 24


def test_a_rank_has_the_filters_of_its_heads(write: Write) -> None:
    whole = filters(heads=4)
    selector = QFilters(file=write(whole))
    keys = draw(9, 0, batch=2, heads=4)[1]
    every = filtered(selector, keys, layer_idx=3)
    assert torch.equal(every.filters, whole.filters[3].expand(2, -1, -1))
    ranks = [Ranks(rank=rank, size=2, heads=(3, 1), queries=(6, 2)) for rank in range(2)]
    parts = [filtered(selector, keys[:, own.held], layer_idx=3, ranks=own) for own in ranks]
    assert torch.equal(torch.cat([part.filters for part in parts], 1), every.filters)
    torch.testing.assert_close(torch.cat([part.score for part in parts], 1), every.score)


def test_a_state_shares_no_memory_with_the_file(write: Write) -> None:
    selector = QFilters(file=write(filters(heads=2)))
    state = filtered(selector, draw(9, 0)[1])
    map_state(lambda tensor: tensor.zero_(), state)
    assert bool(FILTER_FILES.load(selector.file).filters[0].any())
