"""The shipped configs: their published sizes, and plans without transformers that equal those with it."""

from __future__ import annotations

import http.server
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import kvpolicy
from kvpolicy.hf.discovery import check_modules
from kvpolicy.hf.embedded import SHIPPED, as_config, config_of, shipped_config
from kvpolicy.hf.model_spec import describe
from kvpolicy.hf.rotary_lookup import trained_positions
from kvpolicy.text.errors import KVPolicyError

BILLIONS = {
    "gemma-3-12b": 12.19,
    "gpt-oss-20b": 20.91,
    "llama-2-70b": 68.98,
    "llama-3-70b": 70.55,
    "llama-3.1-8b": 8.03,
    "llama-3.2-1b": 1.236,
    "mistral-7b": 7.25,
    "mixtral-8x7b": 46.70,
    "phi-4": 14.66,
    "qwen2.5-7b": 7.62,
    "qwen3-30b-a3b": 30.53,
    "qwen3-8b": 8.19,
    "tiny": 0.0017,
    "tiny-4k": 0.0017,
}
"""Published numbers of parameters, in 10^9."""


@pytest.mark.parametrize("name", SHIPPED)
def test_a_plan_without_transformers_is_the_same(name: str) -> None:
    """Shapes, windows, dtype, trained length, and weights of every rank under both backends, or the same refusal."""
    config: Any = config_of(name)
    check_modules(config)
    lean = shipped_config(name)
    nbytes = kvpolicy.weights_per_rank(lean, dtype=torch.int8).nbytes
    assert nbytes == pytest.approx(BILLIONS[name] * 1e9, rel=0.02 if name.startswith("tiny") else 0.002)
    assert describe(lean) == describe(config)
    assert trained_positions(lean) == trained_positions(config)
    for tp, backend in ((2, "hf"), (4, "deepspeed")):
        assert weights(lean, tp, backend) == weights(config, tp, backend)
    arguments: dict[str, Any] = {"batch": 2, "prompt": [300, 200], "new": 20, "backend": "hf", "chunk": 64}
    assert kvpolicy.plan(lean, "snapkv+kivi@0.5", **arguments) == kvpolicy.plan(config, "snapkv+kivi@0.5", **arguments)


def weights(config: Any, tp: int, backend: str) -> Any:
    try:
        return kvpolicy.weights_per_rank(config, tp=tp, backend=backend)
    except KVPolicyError as error:
        return str(error)


def test_names_in_any_case() -> None:
    assert as_config("Llama-3.1-8B") is as_config("llama-3.1-8b")
    assert config_of("Llama-3.1-8B").num_hidden_layers == 32


def test_a_missing_field_is_no_field() -> None:
    config = shipped_config("llama-3.1-8b")
    assert getattr(config, "sliding_window", None) is None
    with pytest.raises(AttributeError, match=r"'llama-3\.1-8b' has no field 'nonsense'"):
        _ = config.nonsense


class Unavailable(http.server.BaseHTTPRequestHandler):
    """A Hub that answers every request with 503, which huggingface_hub would repeat."""

    def do_HEAD(self) -> None:
        """Count the requests for configs; huggingface_hub asks for other things by itself."""
        self.server.asked += self.path.endswith("/config.json")  # pyright: ignore[reportAttributeAccessIssue]
        self.send_error(503)

    do_GET = do_HEAD

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The only Hub that huggingface_hub knows."""
    from huggingface_hub import constants

    server: Any = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Unavailable)
    server.asked = 0
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    template = constants.ENDPOINT + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_the_hub_is_asked_once(hub: Any) -> None:
    start = time.perf_counter()
    with pytest.raises(KVPolicyError, match=r"the Hub does not have it, or cannot be reached.*did you mean 'qwen3-8b'"):
        config_of("nobody/qwen3-8b-x")
    assert hub.asked == 1
    assert time.perf_counter() - start < 5
