"""The benchmark of decode steps runs, measures full layers, and says what is missed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvpolicy_eval.bench import steps
from kvpolicy_eval.bench.__main__ import main
from kvpolicy_eval.bench.steps import LayerTimes


def run(*arguments: str) -> None:
    torch.compiler.reset()
    main(["steps", "--quick", *arguments])
    torch.compiler.reset()


def test_both_tables_are_filled(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- table:steps-layer -->\n<!-- /table -->\n<!-- table:steps-model -->\n<!-- /table -->\n")
    run("--policies", "h2o", "window+kivi", "--backend", "eager", "--fill", str(page))
    lines = page.read_text().splitlines()
    assert sum(line.startswith("| `h2o` |") for line in lines) == 3, "two sizes of a layer, one model"
    assert sum(line.startswith("| `window+kivi` |") for line in lines) == 3


def test_one_table(capsys: pytest.CaptureFixture[str]) -> None:
    run("--only", "model", "--policies", "window")
    printed = capsys.readouterr().out
    assert "stock, ms" in printed and "compiled" not in printed


@pytest.mark.parametrize("policy", steps.LAYER_POLICIES)
def test_a_layer_is_full_and_stays_so(policy: str) -> None:
    """Each step evicts, so that all steps read the same bytes."""
    layer = steps.Layer(policy, 256, "eager")
    before = layer.store.nbytes
    with torch.no_grad():
        for _ in range(40):
            layer.eager()
            layer.store.count_step()
    assert layer.store.nbytes == before
    assert (layer.store.tensors.positions >= 0).sum(-1).tolist() == [[256] * steps.HEADS]


def test_targets() -> None:
    small = LayerTimes("h2o", 1024, 1000, eager=2.0, compiled=1.0)
    fine = LayerTimes("h2o", 8192, 8000, eager=16.0, compiled=8.0)
    assert small.misses(small, [small, fine]) == fine.misses(small, [small, fine]) == []
    slow = fine._replace(compiled=17.0)
    assert slow.misses(small, [small, slow]) == [
        "slower than eager",
        "grows faster than bytes",
        "more than 10 times 1,024 slots",
    ]
    assert fine._replace(compiled=9.0).misses(small, [small, fine]) == ["grows faster than bytes"]
