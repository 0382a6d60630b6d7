"""Q-Filters: which keys its sign keeps, the filters of a rank's heads, and steps that find them in the state."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import kvpolicy
from kvpolicy import KVCrush, QFilters
from kvpolicy.calibration import query_filters
from kvpolicy.calibration.qfilters import sample_queries
from kvpolicy.engine.state import map_state
from kvpolicy.protocols import ChecksModel, HeadShape, ModelInfo, Ranks, View
from kvpolicy.selectors.filter_files import FILTER_FILES, FilterFile
from kvpolicy.statistics import Candidates, Results, Vectors
from tests.conformance.bench import Bench, draw, padding
from tests.conformance.calibration import filters

Write = Callable[[FilterFile], str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write a filter file; its path."""

    def write(content: FilterFile) -> str:
        path = tmp_path / "filters.safetensors"
        FILTER_FILES.save(path, content)
        return str(path)

    return write


def scored(selector: QFilters, keys: Tensor, **fields: Any) -> Any:
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


def test_the_vector(write: Write) -> None:
    selector = QFilters(file=write(FilterFile({0: torch.tensor([[-0.6, 0.8]])})))
    got = scored(selector, torch.tensor([[1.0, 0.0], [0.0, 1.0], [3.0, -4.0], [0.0, 0.0]])[None, None])
    assert got.score[0, 0].tolist() == pytest.approx([0.6, -0.8, 5.0, 0.0])


@pytest.mark.parametrize("sign", [1, -1])
def test_keys_along_the_main_direction_of_queries_are_kept(sign: int, write: Write) -> None:
    """Those with the largest products with the mean query, whichever way it points."""
    generator = torch.Generator().manual_seed(0)
    direction = sign * torch.nn.functional.normalize(torch.randn(8, generator=generator), dim=0)
    queries = 5 * direction + torch.randn(4, 200, 8, generator=generator)
    selector = QFilters(file=write(FilterFile({0: query_filters(queries, heads=2)})))
    keys = torch.randn(1, 2, 50, 8, generator=generator)
    products = keys @ queries.mean((0, 1))
    rank = torch.corrcoef(torch.stack([scored(selector, keys).score.flatten(), products.flatten()]))[0, 1]
    assert rank > 0.99
    bench = Bench(kvpolicy.Policy(selector=selector, budget=5), [5])
    bench.forward(draw(50, 0)[0], keys, keys)
    for head, kept in enumerate(bench.turns[0].kept[0]):
        best = products[0, head, :49].topk(4).indices.tolist()
        assert len({*kept} & {*best}) >= 3 and 49 in kept


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
        order = scored(QFilters(), keys[None], layer_idx=layer.layer_idx).score[0].argsort(-1)
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
    every = scored(selector, keys, layer_idx=3)
    assert torch.equal(every.filters, whole.filters[3].expand(2, -1, -1))
    ranks = [Ranks(rank=rank, size=2, heads=(3, 1), queries=(6, 2)) for rank in range(2)]
    parts = [scored(selector, keys[:, own.held], layer_idx=3, ranks=own) for own in ranks]
    assert torch.equal(torch.cat([part.filters for part in parts], 1), every.filters)
    torch.testing.assert_close(torch.cat([part.score for part in parts], 1), every.score)


def test_a_state_shares_no_memory_with_the_file(write: Write) -> None:
    selector = QFilters(file=write(filters(heads=2)))
    state = scored(selector, draw(9, 0)[1])
    map_state(lambda tensor: tensor.zero_(), state)
    assert bool(FILTER_FILES.load(selector.file).filters[0].any())


def test_equal_keys_keep_the_earliest_and_the_newest(write: Write) -> None:
    bench = Bench(f"qfilters:file={write(filters())}", [4])
    for size in (9, 1, 1):
        q, k, v = draw(size, size)
        bench.forward(q, torch.ones_like(k), v)
    assert bench.turns[0].kept[0][0] == [0, 1, 2, 8] and bench.turns[-1].kept[0][0] == [0, 1, 2, 10]


def test_rows_take_their_filters_with_them(write: Write) -> None:
    """As in a beam search, which selects and repeats rows."""
    bench = Bench(f"qfilters:file={write(filters(2))}", [12, 9])
    bench.forward(*draw(20, 0, batch=2), padding(20, 20, 13))
    before: Any = bench.layer.tensors.state
    bench.layer.map_rows(lambda t: t[torch.tensor([1, 1, 0])])
    after: Any = bench.layer.tensors.state
    assert torch.equal(after.filters, before.filters[[1, 1, 0]]) and bool(after.filters.any())
    bench.layer.append(*draw(1, 5, batch=3), None, bench.turns[0].kernel)


def test_it_asks_for_a_file_of_the_model() -> None:
    info = ModelInfo(layers=8, heads=4, head_dim=32)
    for selector in (QFilters(), KVCrush(base=QFilters(file="tiny-4k"))):
        assert isinstance(selector, ChecksModel)
        selector.check(info)
        with pytest.raises(kvpolicy.KVPolicyError, match="made for another model"):
            selector.check(info._replace(heads=2))
    with pytest.raises(kvpolicy.KVPolicyError, match="must be a file or 'tiny', got an empty string"):
        QFilters(file="")
