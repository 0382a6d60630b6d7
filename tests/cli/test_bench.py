"""`kvpolicy bench`: what it measures is there, and a failed check is an exit code."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from transformers import CompileConfig, GPT2Config, GPT2LMHeadModel

import kvpolicy
from kvpolicy.cli import measurement
from kvpolicy.hf import compiled_generation

Run = Callable[..., str]
Facts = Callable[..., dict[str, Any]]
FEW = "--length 100 --steps 2 --rounds 1"


def test_policies_are_compared_to_the_stock_cache(facts: Facts) -> None:
    found = facts(f"bench window@0.25 squeeze+h2o+kivi@0.5 {FEW}")
    assert [line["policy"] for line in found["policies"]] == ["window@0.25", "squeeze+h2o+kivi@0.5"]
    window = found["policies"][0]
    assert window["full_bytes"] == found["stock"]["bytes"] == 8 * 2 * 4 * 32 * 4 * 103  # fp32, one step to warm up
    assert 0.24 < window["bytes"] / window["full_bytes"] < 0.3
    ratio = window["step_seconds"] / found["stock"]["step_seconds"]
    assert window["step_ratio"] > 0 and 0.01 < ratio < 100
    assert all(check["passed"] for check in found["checks"]) and len(found["checks"]) == 2
    assert found["versions"]["torch"] == torch.__version__
    assert (found["device"], found["dtype"]) == ("cpu", "float32")


def test_compiled_steps_are_compared_to_the_static_cache(facts: Facts, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both sides are traced; what inductor would make of it takes minutes."""

    def traced(*args: Any) -> CompileConfig:
        return CompileConfig(backend="eager", mode="default")

    monkeypatch.setattr(measurement, "CompileConfig", traced)
    monkeypatch.setattr(compiled_generation, "_default", traced)
    found = facts(f"bench window@0.25 --compile {FEW}")
    (window,) = found["policies"]
    assert found["compiled"] and window["full_bytes"] == 8 * 2 * 4 * 32 * 4 * 103
    assert 0.24 < window["bytes"] / window["full_bytes"] < 0.3 and window["step_ratio"] > 0


def test_the_text_and_a_failed_check(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurement, "_difference", lambda expected, actual: 0.5)
    text = run(f"bench full {FEW} --threads 1", 1)
    assert text.count("FAILED: ") == 2
    assert "1 thread, float32" in " ".join(text.split())


def test_learned_positions_do_not_count_padding(run: Run, tmp_path: Path) -> None:
    config = GPT2Config(vocab_size=40, n_embd=16, n_layer=1, n_head=2, n_positions=256, bos_token_id=0, eos_token_id=1)
    GPT2LMHeadModel(config).eval().save_pretrained(tmp_path)  # without a tokenizer, which is not needed
    assert "FAILED" not in run(f"bench h2o@0.5 --model {tmp_path} {FEW}")


def test_a_long_policy_has_its_own_line_in_a_narrow_terminal(run: Run) -> None:
    lines = run(f"bench squeeze+kvcrush/snapkv:window=4@0.5 {FEW}", columns=60).splitlines()
    assert "squeeze+kvcrush/snapkv:window=4@0.5" in lines
    assert max(map(len, lines)) <= 60


def test_the_checks_see_a_difference() -> None:
    assert measurement._difference(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 1.0])) == 0.5


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("bench nonsense", "got 'nonsense'"),
        ("bench full --model no/such/folder", "'no/such/folder' cannot be loaded"),
        (
            "bench full --device nonsense",
            "--device must be a device of PyTorch, got 'nonsense'; try cpu, cuda or cuda:1.",
        ),
        ("bench full --device meta", "--device must be a device that stores numbers, got 'meta'; try cpu"),
        (
            "bench full --dtype nonsense",
            "--dtype must be one of bfloat16, float16, float32, float64, got 'nonsense'; try bfloat16.",
        ),
        ("bench full --rounds 0", "--rounds"),
        ("bench streaming:sinks=300@0.5 --length 600 --steps 2 --rounds 1", "must be at least 301 tokens for"),
    ],
)
def test_error_messages(line: str, message: str, run: Run) -> None:
    assert message in run(line, 2)


def test_the_model_is_not_changed() -> None:
    model, _ = kvpolicy.tiny()
    before = model.config._attn_implementation
    measurement.compare_to_stock(model, [kvpolicy.Policy.parse("h2o")], 64, 1, 1)
    assert model.config._attn_implementation == before
