"""What is written for programs says who wrote it, and a reader refuses what is newer than itself."""

from __future__ import annotations

import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import kvpolicy
from kvpolicy.allocators.profile import load_profile, save_profile
from kvpolicy.protocols import ModelInfo
from kvpolicy.text.formats import check_format, expanded, replacing, stamp
from kvpolicy.text.model_identity import check_same_model
from tests.conformance.models import build


def newer(content: dict[str, Any]) -> dict[str, Any]:
    return content | {"format": content["format"] + 1, "kvpolicy": "99.0"}


def test_a_stamp_is_read_back() -> None:
    assert stamp(2) == {"format": 2, "kvpolicy": kvpolicy.__version__}
    check_format(stamp(2), 2, "it")
    check_format({}, 1, "what is older than the numbers")
    with pytest.raises(
        ValueError, match=r"^it must have format 2 or older, got 3, written by kvpolicy .*; update kvpolicy\.$"
    ):
        check_format(stamp(3), 2, "it")


@pytest.mark.parametrize("number", ["1", 1.0, True, None])
def test_a_strange_number_is_refused(number: object) -> None:
    with pytest.raises(ValueError, match="it must have an integer as its format"):
        check_format({"format": number}, 1, "it")


def test_a_write_that_fails_changes_nothing_and_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("before")
    with pytest.raises(RuntimeError, match="disk"), replacing(path) as temporary:
        temporary.write_text("half of")
        raise RuntimeError("disk")
    assert path.read_text() == "before" and [each.name for each in tmp_path.iterdir()] == ["file"]


def test_an_error_of_a_write_names_the_file_that_the_user_knows(tmp_path: Path) -> None:
    path = tmp_path / "missing" / "file"
    with pytest.raises(OSError) as raised, replacing(path) as temporary:
        temporary.write_text("text")
    assert raised.value.filename == str(path)


def test_a_link_to_itself_is_no_place_for_a_file(tmp_path: Path) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    with pytest.raises(OSError, match="symbolic links"), replacing(loop) as temporary:
        temporary.write_text("text")
    assert loop.is_symlink() and [each.name for each in tmp_path.iterdir()] == ["loop"]


def test_a_null_byte_is_in_no_path() -> None:
    with pytest.raises(kvpolicy.KVPolicyError, match="A path must be without null bytes"):
        expanded("a\0b")


def test_two_threads_write_one_file(tmp_path: Path) -> None:
    """One of them is the last; none sees the other's half."""
    path = tmp_path / "file"
    half = threading.Barrier(2)

    def write(text: str) -> None:
        with replacing(path) as temporary:
            temporary.write_text(text)
            half.wait(timeout=60)
            assert temporary.read_text() == text
            half.wait(timeout=60)

    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(write, text) for text in ("one", "another")]:
            done.result()
    assert path.read_text() in ("one", "another") and [each.name for each in tmp_path.iterdir()] == ["file"]


def test_a_device_is_not_replaced(tmp_path: Path) -> None:
    """As root, it could be: another program would then read the file, or write to it."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with pytest.raises(OSError, match="a device"), replacing(path) as temporary:
        temporary.write_text("text")
    assert path.is_fifo() and [each.name for each in tmp_path.iterdir()] == ["pipe"]


def test_a_fine_tuned_model_is_another_one_where_weights_must_be_equal() -> None:
    weights = torch.linspace(-1, 1, 64)
    model = ModelInfo(layers=1, heads=1, head_dim=4, weights=weights)
    tuned = {"weights": (weights * 1.001).tolist()}
    check_same_model(tuned, "it", model)
    check_same_model({"weights": weights.tolist()}, "it", model, exact=True)
    with pytest.raises(ValueError, match="whose weights differ"):
        check_same_model(tuned, "it", model, exact=True)


def test_a_profile(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    save_profile(path, "tiny", [0.5, 0.6])
    content = json.loads(path.read_text(encoding="utf-8"))
    assert content.items() >= stamp(1).items()
    path.write_text(json.dumps(newer(content)), encoding="utf-8")
    with pytest.raises(ValueError, match=r"written by kvpolicy 99\.0"):
        load_profile(path, 2)
    del content["format"]
    path.write_text(json.dumps(content | {"version": 1}), encoding="utf-8")  # as 0.1.0 wrote it
    assert load_profile(path, 2) == (0.5, 0.6)


def test_a_report() -> None:
    model = build("llama")
    with kvpolicy.attach(model, "window@0.5"):
        report = kvpolicy.PolicyCache(model).report()
    assert report.as_dict().items() >= stamp(1).items()


def test_a_sweep(tmp_path: Path) -> None:
    from kvpolicy_eval.sweep.cells import Cell, Store, load_json

    cell = Cell(model="tiny", task="recall", method="full")
    store = Store(tmp_path)
    store.fail(cell, ValueError("no"), 1.0)
    path = tmp_path / cell.folder / "error.json"
    assert load_json(path).items() >= stamp(1).items()
    path.write_text(json.dumps(newer(load_json(path))), encoding="utf-8")
    with pytest.raises(ValueError, match="update kvpolicy"):
        list(store.read("error.json"))
    path.write_text(json.dumps({"results": {}, "kvpolicy_sweep": newer(stamp(1))}), encoding="utf-8")
    with pytest.raises(ValueError, match="update kvpolicy"):
        load_json(path)


def test_a_comparison_and_a_card(tmp_path: Path) -> None:
    from kvpolicy_eval.gpu.results import read_results
    from kvpolicy_eval.peers.command import read

    path = tmp_path / "peers.json"
    path.write_text(json.dumps(newer(stamp(2)) | {"versions": {}, "kept": []}), encoding="utf-8")
    with pytest.raises(ValueError, match="update kvpolicy"):
        read(path)
    path.write_text(json.dumps(newer(stamp(1)) | {"case": {}}) + "\n", encoding="utf-8")
    with pytest.raises(ValueError, match="update kvpolicy"):
        read_results(path)
