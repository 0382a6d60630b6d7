"""Budgets of heads: AdaKV against its slow version, DuoAttention too, and files that say which heads stream."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import kvpolicy
from kvpolicy.allocators.adakv import AdaKV
from kvpolicy.allocators.duo import DuoAttention, _lowest
from kvpolicy.allocators.head_files import HEAD_FILES, HeadFile
from kvpolicy.protocols import HeadRequest, ModelInfo, View
from tests.reference.head_allocators import Room, divide, duo


def request(worths: list[list[list[float]]], pages: list[int], size: list[int], most: list[int]) -> HeadRequest:
    """What is divided, given what the tokens of each row and head are worth; heads may hold different numbers."""
    count = max(len(head) for row in worths for head in row)
    priority = torch.tensor([[[-torch.inf] * (count - len(head)) + head for head in row] for row in worths])
    positions = torch.arange(count, dtype=torch.int32).expand_as(priority).masked_fill(priority == -torch.inf, -1)
    length = torch.full((len(worths),), count)
    view = View(positions, length, torch.tensor(pages) // len(worths[0]) * torch.tensor(size), 0)
    return HeadRequest(priority, view, torch.tensor(pages), torch.tensor(size), torch.tensor(most))


@pytest.mark.parametrize("safeguard", [0.0, 0.07, 0.29, 0.58, 0.9, 1.0])
def test_adakv_divides_as_the_slow_version(safeguard: float) -> None:
    """Also where a head holds fewer tokens than its safe part, and where tokens tie."""
    dice = random.Random(3)
    for _ in range(60):
        heads = dice.choice([1, 2, 3])
        worths = [
            [[dice.randint(0, 9) / 8 for _ in range(dice.randint(3, 40))] for _ in range(heads)] for _ in range(2)
        ]
        size = [dice.choice([4, 8]) for _ in worths]
        pages = [heads * dice.randint(1, 6) + dice.randrange(heads) for _ in worths]
        most = [max(-(-40 // each), count // heads) for each, count in zip(size, pages, strict=True)]
        found = AdaKV(safeguard=safeguard).divide(request(worths, pages, size, most))
        rooms = [Room(*row) for row in zip(size, pages, [0, 0], most, strict=True)]
        want = [divide("adakv", {"safeguard": safeguard}, *row) for row in zip(worths, rooms, strict=True)]
        assert found.tolist() == want


def test_a_safe_part_is_not_rounded_down_by_a_floating_point_error() -> None:
    """0.29 * 200 / 2 is 29, and slightly less in floating point; the tokens of the second head are worth more."""
    given = request([[[0.0] * 200, [1.0] * 200]], pages=[200], size=[1], most=[200])
    assert AdaKV(safeguard=0.29).divide(given).tolist() == [[29, 171]]


def test_every_head_has_room_for_what_any_head_must_keep() -> None:
    """Representatives, of which heads may have different numbers; the first head is worth one page."""
    must = [torch.inf] * 9
    given = request([[[0.0] * 40, [*must, *[1.0] * 31]]], pages=[10], size=[4], most=[10])
    assert AdaKV(safeguard=0.0).divide(given).tolist() == [[3, 7]]


def written(path: Path, scores: list[list[float]]) -> str:
    HEAD_FILES.save(path, HeadFile(tuple(map(tuple, scores)), sinks=2, recent=6))
    return str(path)


@pytest.mark.parametrize("sparsity", [0.0, 0.1, 0.25, 0.29, 0.5, 0.75, 0.99, 1.0])
def test_streaming_heads_are_those_below_the_quantile(sparsity: float) -> None:
    dice = np.random.default_rng(3)
    scores = dice.random((5, 3))
    found = np.array(_lowest(tuple(map(tuple, scores.tolist())), sparsity))
    threshold = {0.0: -1.0, 1.0: 2.0}.get(sparsity, np.quantile(scores, sparsity))
    assert (found == (scores < threshold)).all(), "as in the authors' code, without noise"
    for tied in (np.round(scores, 1), np.zeros((2, 4)), np.ones((1, 1))):
        rows = tied.tolist()
        assert [list(row) for row in _lowest(tuple(map(tuple, rows)), sparsity)] == duo.streams(rows, sparsity)


def test_a_quantile_that_is_a_score_is_not_rounded_up() -> None:
    """0.28 * 25 is 7, and slightly more in floating point: the quantile is the score of rank 7, and 7 are below it."""
    scores = tuple(number / 26 for number in range(26))
    assert _lowest((scores[:13], scores[13:]), 0.28) == ((True,) * 7 + (False,) * 6, (False,) * 13)


def test_duo_divides_as_the_slow_version(tmp_path: Path) -> None:
    dice = random.Random(5)
    for case in range(60):
        heads = dice.choice([1, 2, 3, 8])
        scores = [[dice.choice([0.1, 0.2, 0.2, 0.7]) for _ in range(heads)] for _ in range(3)]
        sizes: dict[str, Any] = {
            "sparsity": dice.choice([0.0, 0.3, 0.5, 1.0]),
            "sinks": dice.choice([0, 4]),
            "recent": dice.choice([1, 30, 500]),
        }
        pages = [heads * dice.randint(1, 20) + dice.randrange(heads) for _ in range(2)]
        size = [dice.choice([4, 8]) for _ in pages]
        most = [max(count // heads, dice.randint(1, 40)) for count in pages]
        protected = dice.choice([0, 3, 17])
        layer = dice.randrange(3)
        priority = torch.rand(2, heads, 30)
        priority[..., 30 - protected :] = torch.inf
        view = View(torch.arange(30).expand(2, heads, -1), torch.tensor([30, 30]), torch.tensor([9, 9]), layer)
        given = HeadRequest(priority, view, *(torch.tensor(column) for column in (pages, size, most)))
        found = DuoAttention(file=written(tmp_path / f"{case}", scores), **sizes).divide(given)
        config = {"scores": scores, "layer": layer, **sizes}
        rows = zip(pages, size, most, strict=True)
        assert found.tolist() == [duo.pages(config, protected, *row) for row in rows]
        assert found.sum(-1).tolist() == pages and int(found.min()) >= 1


def test_sizes_are_those_of_the_file_unless_given(tmp_path: Path) -> None:
    view = View(torch.arange(9).expand(1, 2, -1), torch.tensor([9]), torch.tensor([8]), 0)
    given = HeadRequest(torch.rand(1, 2, 9), view, *(torch.tensor([n]) for n in (12, 4, 100)))
    path = written(tmp_path / "heads.json", [[0.2, 0.8]])
    assert DuoAttention(file=path).divide(given).tolist() == [[2, 10]]  # 2 + 6 tokens
    assert DuoAttention(file=path, recent=9).divide(given).tolist() == [[3, 9]]
    assert DuoAttention(file=path, sinks=0, recent=1).divide(given).tolist() == [[1, 11]]
    HEAD_FILES.save(path, HeadFile(((0.2, 0.8),)))
    assert DuoAttention(file=path).divide(given).tolist() == [[6, 6]]  # 64 + 256 tokens are more than there are


def test_streaming_heads_keep_sinks_and_recent_tokens() -> None:
    model = kvpolicy.tiny()[0]
    with torch.no_grad(), kvpolicy.attach(model, "uniform/duo+streaming@0.4") as handle:
        out = model(torch.arange(5, 205)[None])
        model(torch.tensor([[7]]), cache=out.cache)
    assert handle.cache is not None and handle.plan is not None
    assert handle.cache.nbytes == handle.plan.nbytes
    streams = DuoAttention().streaming_heads(4)
    layer = next(layer for layer, row in enumerate(streams) if 0 < sum(row) < 4)
    held: Any = handle.cache.layers[layer]
    kept = [set(head[head >= 0].tolist()) for head in held.head_positions[0]]
    for head, positions in enumerate(kept):
        if streams[layer][head]:  # as in the file of the embedded model
            assert positions == {*range(4), *range(201 - 28, 201)}
        else:
            assert len(positions) > 80


ROWS = ((0.25, 0.5), (1.0, 0.0), (0.125, 0.75))
WEIGHTS = torch.linspace(-1, 1, 64)
MODEL = {"name": "m", "type": "llama", "layers": 3, "heads": 2, "head_dim": 4, "weights": WEIGHTS.tolist()}
INFO = ModelInfo(layers=3, heads=2, head_dim=4, weights=WEIGHTS)


def test_the_least_that_a_file_may_say(tmp_path: Path) -> None:
    path = tmp_path / "heads.json"
    path.write_text(json.dumps({"format": 1, "model": "a name", "kind": "score", "heads": [[1, 0]]}))
    assert HEAD_FILES.load(str(path)) == HeadFile(((1.0, 0.0),))


def test_files_of_duoattention(tmp_path: Path) -> None:
    (tmp_path / "full_attention_heads.tsv").write_text("2.5e-01\t1.2\n-0.1\t5e-1\n")
    assert HEAD_FILES.load(str(tmp_path)) == HeadFile(((0.25, 1.0), (0.0, 0.5)))
    facts: dict[str, Any] = {"sink_size": 128, "recent_size": 256, "deploy_sink_size": None, "lr": 0.02}
    (tmp_path / "config.json").write_text(json.dumps(facts))
    found = HEAD_FILES.load(str(tmp_path / "full_attention_heads.tsv"))
    assert (found.sinks, found.recent) == (128, 256)
    (tmp_path / "config.json").write_text(json.dumps(facts | {"deploy_sink_size": 64}))
    assert HEAD_FILES.load(str(tmp_path)).sinks == 64


def test_the_file_of_headkv(tmp_path: Path) -> None:
    """Scores of samples for each query head; KV heads have the mean of their group."""
    path = tmp_path / "scores.json"
    places = {(0, 0): [1.0, 3.0], (0, 1): [4.0], (0, 2): [0.0], (0, 3): [1.0, 0.0, 0.5], (1, 0): [6.0]}
    scores = {f"{layer}-{head}": found for (layer, head), found in places.items()}
    path.write_text(json.dumps(scores))
    with pytest.raises(kvpolicy.KVPolicyError, match=r"must have every head of every layer, got 5 of 2 layers of 4; "):
        HEAD_FILES.load(str(path))
    path.write_text(json.dumps(scores | {f"1-{head}": [0.0] for head in (1, 2, 3)}))
    found = HEAD_FILES.load(str(path))
    assert found.by_head(2) == ((3.0, 0.25), (3.0, 0.0)) and found.by_head(4) == found.heads
    HEAD_FILES.check(found, "scores.json", ModelInfo(layers=2, heads=2, head_dim=4))
    with pytest.raises(kvpolicy.KVPolicyError, match="for each of 3 KV heads, got 4 in layer 0"):
        HEAD_FILES.check(found, "scores.json", ModelInfo(layers=2, heads=3, head_dim=4))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "must be JSON, got one that cannot be parsed"),
        ("[[1.0]]", "must be a JSON object, got list"),
        ({"weights": []}, "must have a table called heads, got none"),
        ({"heads": 3}, "must have a row for each layer, got 3"),
        ({"heads": []}, "must have a row for each layer, got list"),
        ({"heads": [[1.0, "x"]]}, "must have rows of finite numbers, got x"),
        ({"heads": [1.0]}, "must have rows of finite numbers, got 1.0"),
        ({"heads": [[True]]}, "must have rows of finite numbers, got True"),
        ('{"heads": [[NaN]]}', "must have rows of finite numbers, got nan"),
        ('{"heads": [[1' + "0" * 400 + "]]}", "must have rows of finite numbers, got 1000"),
        ({"heads": [[[1.0]]]}, "must have rows of finite numbers, got list"),
        ({"heads": [[1.0]], "kind": "rank"}, "must have the kind 'score' or 'share', got rank"),
        ({"heads": [[1.0]], "sink": -1}, "must have an integer from 0 to 2^31 - 1 as its sink, got -1"),
        ({"heads": [[1.0]], "sink": 2**31}, "integer from 0 to 2^31 - 1 as its sink, got 2147483648"),
        ({"heads": [[1.0]], "recent": 2.5}, "must have an integer from 1 to 2^31 - 1 as its recent, got 2.5"),
        ({"heads": [[1.0]], "model": {"layers": "x"}}, "must describe its model by sizes and samples of its weights"),
        ({"heads": [[1.0]], "model": {"weights": 1}}, "must describe its model by sizes and samples of its weights"),
        ({"0-0": [1.0, None]}, "must have rows of finite numbers, got None"),
        ({"0-0": 1.0}, "must have rows of finite numbers, got 1.0"),
        (b"\xff\xfe", "one that is no text in UTF-8"),
    ],
)
def test_malformed_files(content: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "heads.json"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(kvpolicy.KVPolicyError) as raised:
        HEAD_FILES.load(str(path))
    assert message in str(raised.value) and "\n" not in str(raised.value) and len(str(raised.value)) < 500
    assert str(raised.value).startswith("The head file ") and str(path)[-10:] in str(raised.value)


@pytest.mark.parametrize(
    ("table", "config", "message"),
    [
        ("0.1 x\n", None, "must have a line of numbers for each layer, got could not convert string to float: 'x'"),
        ("0.1\tnan\n", None, "must have rows of finite numbers, got nan"),
        ("\n", None, "must have a row for each layer, got list"),
        ("0.1\n", "[]", "must be a JSON object, got list"),
        ("0.1\n", '{"sink_size": "many"}', "must have an integer from 0 to 2^31 - 1 as its sink_size, got many"),
    ],
)
def test_malformed_tables(table: str, config: str | None, message: str, tmp_path: Path) -> None:
    (tmp_path / "full_attention_heads.tsv").write_text(table)
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    with pytest.raises(kvpolicy.KVPolicyError, match="The head file ") as raised:
        HEAD_FILES.load(str(tmp_path))
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("content", "info", "message"),
    [
        (HeadFile(ROWS[:2]), INFO, "must have a row for each of the 3 layers of the model, got 2"),
        (HeadFile(ROWS), INFO._replace(layers=2), "must have a row for each of the 2 layers of the model, got 3"),
        (HeadFile(ROWS), INFO._replace(layers=2, evictable=(1, 5)), "for each of the 6 layers of the model, got 3"),
        (HeadFile(ROWS), INFO._replace(layers=2, evictable=(1, 3)), "for each of the 4 layers of the model, got 3"),
        (HeadFile(ROWS), INFO._replace(heads=4), "must have a number for each of 4 KV heads, got 2 in layer 0"),
        (HeadFile((*ROWS[:2], ())), INFO, "must have a number for each of 2 KV heads, got 0 in layer 2"),
    ],
)
def test_other_models(content: HeadFile, info: ModelInfo, message: str) -> None:
    HEAD_FILES.check(HeadFile(ROWS, model=MODEL), "a.json", INFO)
    HEAD_FILES.check(HeadFile((ROWS[0], (), ROWS[1])), "a.json", INFO._replace(layers=2, evictable=(0, 2)))
    with pytest.raises(kvpolicy.KVPolicyError, match=r"^The head file 'a.json' must ") as raised:
        HEAD_FILES.check(content, "a.json", info)
    assert message in str(raised.value)


def test_files_are_refused_when_a_policy_is_planned_or_attached(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    model = kvpolicy.tiny()[0]
    policy = f"uniform/duo:file={tmp_path / 'heads.json'}+streaming@0.5"
    with pytest.raises(
        kvpolicy.KVPolicyError, match=r"must be a readable file or tiny or tiny-4k, got '.*' \(No such file"
    ):
        kvpolicy.attach(model, policy)
    HEAD_FILES.save(tmp_path / "heads.json", HeadFile(((0.5,) * 4,) * 8, "share"))
    with pytest.raises(kvpolicy.KVPolicyError, match="must have scores of heads, got shares of the tokens"):
        kvpolicy.plan("tiny", policy)
    HEAD_FILES.save(tmp_path / "heads.json", HeadFile(((0.5,) * 4,) * 8))
    kvpolicy.attach(model, policy).detach()
