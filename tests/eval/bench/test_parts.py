"""The benchmark of a policy's parts runs, and its layers are as full as their bases."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvpolicy_eval.bench import parts
from kvpolicy_eval.bench.__main__ import main
from kvpolicy_eval.bench.parts import Case
from kvpolicy_eval.bench.steps import Layer


def test_a_table_is_filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.md"
    places = [f"<!-- table:parts-{name} -->\n<!-- /table -->\n" for name in ("heads", "prompts")]
    page.write_text("".join(places))
    monkeypatch.setattr(parts, "STEP_CASES", {"heads": [Case("uniform/adakv+h2o", "h2o", 1e9)]})
    monkeypatch.setattr(parts, "PROMPT_CASES", [Case("kvzip", "", 1e9)])
    main(["parts", "--quick", "--backend", "eager", "--fill", str(page)])
    rows = [line for line in page.read_text().splitlines() if "pass" in line]
    assert len(rows) == 2 and "the stock model" in rows[1]


def test_heads_differ_at_equal_bytes() -> None:
    """Or the benchmark would not be one of heads of different size."""
    store = Layer("uniform/adakv+h2o", 64, "eager", 128).store
    counts = store.geometry.tokens_by_head()[0]
    assert int(counts.sum()) == 64 * 8 and int(counts.max()) > int(counts.min())
    assert store.nbytes / Layer("h2o", 64, "eager", 128).store.nbytes == pytest.approx(1, abs=0.01)


def test_a_merge_has_victims_and_targets() -> None:
    store = Layer("h2o+merge:least=-1.0", 64, "eager", 128).store
    torch.testing.assert_close(store.tensors.counts.exp().sum(-1), torch.full((1, 8), 128.0))
