"""Documents of the embedded model, which many tests ask about."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

import kvpolicy
from kvpolicy_vllm.engine import Engine
from tests.vllm.engines import engine
from tests.vllm.models import LONG, POLICY, Saved, Served, answer, make_model, make_question, make_text, save


@pytest.fixture(autouse=True)
def needs_vllm(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("vllm"):
        pytest.importorskip("vllm")


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    pytest.importorskip("vllm")
    folder = tmp_path_factory.mktemp("documents")
    model = make_model("tiny")
    model.save_pretrained(folder / "model")
    paths = [save(model, POLICY, make_text(model, 150 + 30 * n, n), folder / f"{n}.safetensors") for n in range(3)]
    asked = [(path, make_question(model, record)) for path in paths for record in ("wolf", "gold")]
    return Served(folder, model, asked, [answer(model, POLICY, path, question, LONG) for path, question in asked])


@pytest.fixture(scope="module")
def llm(served: Served) -> Generator[Any]:
    """An engine that answers about these documents."""
    with engine(served.folder / "model") as started:
        yield started


@pytest.fixture(scope="session")
def pair() -> tuple[Any, Any]:
    """The embedded model and its tokenizer."""
    return kvpolicy.tiny()


@pytest.fixture(scope="session")
def checkpoint(pair: tuple[Any, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both in a folder."""
    pytest.importorskip("vllm")
    path = tmp_path_factory.mktemp("model")
    for part in pair:
        part.save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    folder = tmp_path_factory.mktemp("saved")
    model = make_model("llama3")
    model.save_pretrained(folder / "model")
    text = make_text(model, 70)
    path = save(model, "keydiff:decode=grow@0.5", text, folder / "text.safetensors")
    return Saved(folder, model, Engine(model.config, str(folder / "model"), 256), path, text)
