"""The command `kvpolicy plan`: what it prints, how soon, and how it tells users what is wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import kvpolicy
from kvpolicy.cli import main
from kvpolicy.embedded import SHIPPED, config_of

POLICY = "squeeze+kvcrush/h2o+kivi:bits=4@0.2"


def said(line: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(line.split()) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("name", SHIPPED)
def test_json_is_what_plan_says(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    line = f"plan {name} {POLICY} --batch 2 --prompt 2048 --new 64 --tp 4 --backend hf --memory 40GiB --json"
    found = json.loads(said(line, capsys))
    sizes: dict[str, Any] = {"batch": 2, "prompt": 2048, "new": 64, "tp": 4}
    plan = kvpolicy.plan(config_of(name), POLICY, **sizes, dtype=torch.bfloat16, backend="hf")
    assert plan.weights is not None
    assert found["cache"] == plan.by_kind() | {"total": plan.nbytes}
    assert found["full_cache"] == plan.full_nbytes
    assert found["weights"]["replicated"] + found["weights"]["sharded"] == found["weights"]["total"]
    assert found["weights"]["total"] == plan.weights.nbytes
    most = {"policy": plan.largest_batch(40 * 2**30), "full": plan.full_largest_batch(40 * 2**30)}
    assert found["largest_batch"] == most
    assert found | sizes == found
    assert (found["memory"], found["policy"]) == (40 * 2**30, POLICY)


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    lines = said("plan llama-3-70b snapkv@0.2 --tp 8", capsys).splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0] == "llama-3-70b in bfloat16, on each of 8 ranks, deepspeed"
    cells = {line[:34].strip(): line[34:].split() for line in lines[4:-3]}
    assert cells["weights, on every rank"] == ["2.10", "GB"]
    assert cells["weights"] == ["19.48", "GB"] * 2
    assert cells["cache"] == ["34.07", "MB", "209.72", "MB"]
    assert cells["largest batch in 80.00 GB"] == ["1,776", "rows", "288", "rows"]


def test_what_is_calibrated_takes_its_place(capsys: pytest.CaptureFixture[str]) -> None:
    text = said("plan tiny csr", capsys)
    assert "calibrated tensors" in text
    assert "on one rank" in text


def test_a_folder_and_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config_of("mixtral-8x7b").save_pretrained(tmp_path)
    shipped, *stored = (
        said(f"plan {model} full --tp 2", capsys).splitlines()[1:]
        for model in ("mixtral-8x7b", tmp_path, tmp_path / "config.json")
    )
    assert stored == [shipped, shipped]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("llama-3-70b nonsense", "no strategy called 'nonsense'"),
        ("llama-3-70b full --memory 80", "memory 80 is not understood"),
        ("llama-3-70b full --dtype nonsense", "dtype nonsense"),
        ("llama-3-70b full --new -1", "-1 new tokens"),
        ("llama-3-70b full --backend nccl", "backend 'nccl'"),
        ("llama-3-70b full --backend hf --tp 16", "8 KV heads over 16 ranks"),
        ("llama-3-70b csr", "made for another model"),
        ("FOLDER full", "config of"),
        ("FOLDER/gpt2.json full --tp 2", "not with gpt2"),
        ("FOLDER/vit.json full", "no causal language model of the kind vit"),
        ("FOLDER/odd.json full", "not a multiple"),
        ("FOLDER/bad.json full", "not a valid JSON"),
    ],
)
def test_what_the_user_can_put_right(
    line: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "gpt2.json").write_text('{"model_type": "gpt2"}')
    (tmp_path / "vit.json").write_text('{"model_type": "vit"}')
    (tmp_path / "odd.json").write_text('{"model_type": "llama", "hidden_size": 64, "num_attention_heads": 6}')
    (tmp_path / "bad.json").write_text("{")
    assert main(["plan", *line.replace("FOLDER", str(tmp_path)).split()]) == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith("kvpolicy: ") and told in error
    assert "\n" not in error


@pytest.mark.parametrize("line", ["plan", "plan tiny", "plan tiny full --batch 0", "plan tiny full --tp x"])
def test_a_wrong_line_shows_the_usage(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(line.split())
    assert caught.value.code == 2
    assert "usage: kvpolicy plan" in capsys.readouterr().err


@pytest.mark.parametrize("line", ["--help", "plan --help", "calibrate csr --help"])
def test_help_does_not_wait_for_pytorch(line: str) -> None:
    code = f"""
import sys
sys.path[:0] = {[path for path in sys.path if path]}
from kvpolicy.cli import main
try:
    main({line.split()})
finally:
    assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "usage: kvpolicy" in done.stdout


def test_the_page_shows_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    page = Path(__file__).parent.parent / "docs" / "api" / "plan.md"
    if not page.exists():
        pytest.skip("the docs are not installed")
    line, _, rest = page.read_text(encoding="utf-8").partition("$ kvpolicy ")[2].partition("\n")
    assert rest.partition("```")[0] == said(line, capsys)
