"""`kvpolicy bench`: what it measures is there, and a failed check is an exit code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CompileConfig, GPT2Config, GPT2LMHeadModel

import kvpolicy
from kvpolicy.cli import measurement, model_loading
from kvpolicy.hf import compiled_generation
from tests.cli.conftest import Facts, Run

FEW = "--length 100 --steps 2 --rounds 1"


def test_policies_are_compared_to_the_stock_cache(facts: Facts) -> None:
    found = facts(f"bench window@0.25 squeeze+h2o+kivi@0.5 {FEW}")
    assert [line["policy"] for line in found["policies"]] == ["window@0.25", "squeeze+h2o+kivi@0.5"]
    window = found["policies"][0]
    assert window["full_bytes"] == found["stock"]["bytes"] == 8 * 2 * 4 * 32 * 4 * 103  # fp32, one step to warm up
    assert 0.24 < window["bytes"] / window["full_bytes"] < 0.3
    ratio = window["step_seconds"] / found["stock"]["step_seconds"]
    assert window["step_ratio"] > 0 and 0.01 < ratio < 100
    assert 0 < window["prefill_seconds"] < 100 * found["stock"]["prefill_seconds"] and window["prefill_ratio"] > 0
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


def test_positions_count_the_tokens_of_a_row() -> None:
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    (every,) = measurement._position_ids(kvpolicy.tiny()[0], mask, 4).values()
    assert every[:, 2:].tolist() == [[0, 1], [2, 3]] and every[1].tolist() == [0, 1, 2, 3] and int(every.min()) == 0
    assert measurement._position_ids(kvpolicy.tiny()[0], mask, 1)["position_ids"].tolist() == [[1], [3]]


def save_gpt2(folder: Path, positions: int = 256) -> None:
    """A small GPT-2 without a tokenizer, which is not needed."""
    sizes: dict[str, Any] = {"vocab_size": 40, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": positions}
    GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=1)).eval().save_pretrained(folder)


def test_learned_positions_do_not_count_padding(run: Run, tmp_path: Path) -> None:
    save_gpt2(tmp_path)
    assert "FAILED" not in run(f"bench h2o@0.5 --model {tmp_path} {FEW}")
    save_gpt2(tmp_path, 128)
    assert "must fit into 128 positions, got 192 and 4" in run(f"bench h2o@0.5 --model {tmp_path} {FEW}", 2)


def test_the_default_device_computes_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    for name, device in (("mps", "cpu"), ("cuda:0", "cuda:0")):
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda name=name: torch.device(name))
        assert model_loading._device("") == device


def test_damaged_weights_are_told_in_one_sentence(run: Run, tmp_path: Path) -> None:
    save_gpt2(tmp_path)
    text = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(text.replace('"vocab_size": 40', '"vocab_size": 41'))
    error = run(f"bench full --model {tmp_path} {FEW}", 2)
    assert f"The model '{tmp_path}' cannot be loaded: its weights have other sizes than its config says." in error
    (tmp_path / "config.json").write_text(text)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-9])
    assert f"The model '{tmp_path}' cannot be loaded: " in run(f"bench full --model {tmp_path} {FEW}", 2)


def test_too_little_memory_for_weights_is_no_damage(monkeypatch: pytest.MonkeyPatch) -> None:
    def runs_out(*_: Any, **__: Any) -> None:
        raise RuntimeError("can't allocate memory")

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", runs_out)
    with pytest.raises(RuntimeError, match="allocate"):
        model_loading._load_pretrained("somewhere", "auto", False, 1)


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
        ("bench full --device nonsense", "must be a device of PyTorch, got 'nonsense'; try cpu, cuda or cuda:1."),
        ("bench full --device mps", "--device must be a device that computes in float64, got 'mps'; try cpu."),
        ("bench full --length 2032", "must fit into 2,048 positions, got 2,032 and 17; try a smaller --length or"),
        ("bench full --device cuda:99", "The device 'cuda:99' cannot be used ("),
        ("bench full --device meta", "--device must be a device that stores numbers, got 'meta'; try cpu"),
        ("bench full --dtype nonsense", "be one of bfloat16, float16, float32, float64, got 'nonsense'; try bfloat16."),
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
