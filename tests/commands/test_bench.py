"""`kvpolicy bench` and `kvpolicy tiny`: what they measure is there, and a failed check is an exit code."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from transformers import GPT2Config, GPT2LMHeadModel

import kvpolicy
from kvpolicy.cli import measuring
from kvpolicy.cli.app import main

Run = Callable[..., str]
Facts = Callable[..., dict[str, Any]]
FEW = "--length 100 --steps 2 --rounds 1"


def test_policies_are_measured_beside_the_stock_cache(facts: Facts) -> None:
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


def test_the_text_and_a_failed_check(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "_difference", lambda wanted, found: 0.5)
    text = run(f"bench full {FEW} --threads 1", 1)
    assert text.count("FAILED: ") == 2
    assert "1 thread(s), float32" in " ".join(text.split())


def test_learned_positions_are_those_without_padding(run: Run, tmp_path: Path) -> None:
    config = GPT2Config(vocab_size=40, n_embd=16, n_layer=1, n_head=2, n_positions=256, bos_token_id=0, eos_token_id=1)
    GPT2LMHeadModel(config).eval().save_pretrained(tmp_path)  # no tokenizer beside it: none is needed
    assert "FAILED" not in run(f"bench h2o@0.5 --model {tmp_path} {FEW}")


def test_a_long_policy_has_its_line_in_a_narrow_terminal(run: Run) -> None:
    lines = run(f"bench squeeze+kvcrush/snapkv:window=4@0.5 {FEW}", columns=60).splitlines()
    assert "squeeze+kvcrush/snapkv:window=4@0.5" in lines
    assert max(map(len, lines)) <= 60


def test_the_checks_see_a_difference() -> None:
    assert measuring._difference(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 1.0])) == 0.5


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("bench nonsense", "no strategy called"),
        ("bench full --model no/such/folder", "'no/such/folder' cannot be loaded"),
        ("bench full --device nonsense", "device 'nonsense' is not known"),
        ("bench full --device meta", "device 'meta' holds no numbers"),
        ("bench full --dtype nonsense", "dtype 'nonsense'"),
        ("bench full --rounds 0", "--rounds"),
        (f"bench streaming:sinks=90@0.5 {FEW}", "too few for"),
    ],
)
def test_what_the_user_can_put_right(line: str, told: str, run: Run) -> None:
    assert told in run(line, 2)


def test_the_model_is_left_as_it_was() -> None:
    model, _ = kvpolicy.tiny()
    before = model.config._attn_implementation
    measuring.compared(model, [kvpolicy.Policy.parse("h2o")], 64, 1, 1)
    assert model.config._attn_implementation == before


def test_the_card_is_of_the_model(facts: Facts, run: Run) -> None:
    found, (model, _) = facts("tiny"), kvpolicy.tiny()
    config = model.config
    assert found["parameters"] == sum(p.numel() for p in model.parameters())
    assert (Path(found["path"]) / "config.json").exists()
    assert found["shape"]["kv_heads"] == config.num_key_value_heads
    assert [entry["codec"] for entry in found["calibrations"]] == ["csr", "kvquant"]
    scope: dict[str, Any] = {}
    exec(found["load"], scope)
    assert scope["model"].config.hidden_size == found["shape"]["hidden"]
    assert main(["tiny"]) == 0


def test_the_card_agrees_with_the_page(facts: Facts) -> None:
    page = Path(__file__).parents[2] / "docs" / "model-card.md"
    if not page.exists():
        pytest.skip("the docs are not installed")
    text, found = page.read_text(encoding="utf-8"), facts("tiny")
    assert found["card"] == "docs/model-card.md"
    assert f"{found['parameters'] / 1e6:.2f} M parameters" in text
    for number in (f"{found['shape']['layers']} layers", "7.2 M tokens", "1,024"):
        assert number in text
