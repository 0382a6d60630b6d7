"""Head files: what is written comes back, the authors' files are read, and everything else is refused in a sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import kvpolicy
from kvpolicy.allocators.duo import DuoAttention
from kvpolicy.allocators.head_files import HEAD_FILES, HeadFile
from kvpolicy.protocols import ModelInfo

ROWS = ((0.25, 0.5), (1.0, 0.0), (0.125, 0.75))
WEIGHTS = torch.linspace(-1, 1, 64)
MODEL = {"name": "m", "type": "llama", "layers": 3, "heads": 2, "head_dim": 4, "weights": WEIGHTS.tolist()}
INFO = ModelInfo(layers=3, heads=2, head_dim=4, weights=WEIGHTS)


def test_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "heads.json"
    content = HeadFile(ROWS, "share", 4, 16, MODEL, made={"positions": 500})
    HEAD_FILES.save(path, content)
    assert HEAD_FILES.load(str(path)) == content
    assert set(json.loads(path.read_text())) >= {"format", "model", "kind", "heads", "sink", "recent"}


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


def test_the_embedded_model_has_a_file() -> None:
    calibration = pytest.importorskip("kvpolicy.calibration")
    DuoAttention().check(calibration.model_info(kvpolicy.tiny()[0]))
    with pytest.raises(kvpolicy.KVPolicyError, match="made for another model"):
        DuoAttention().check(INFO)
