"""The benchmark of shared prefixes runs, and says what is missed."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvpolicy_eval.bench import prefix
from kvpolicy_eval.bench.__main__ import main


def test_the_table_is_filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- table:prefix -->\n<!-- /table -->\n")
    some = "snapkv:decode=grow@0.25"
    monkeypatch.setattr(prefix, "POLICIES", {some: prefix.POLICIES[some]})
    main(["prefix", "--quick", "--rows", "3", "--fill", str(page)])
    (line,) = [line for line in page.read_text().splitlines() if line.startswith(f"| `{some}` |")]
    assert "0.12x" in line and "miss" in line, "256 tokens are too few for the goal"


def test_bytes_are_those_of_one_text_and_of_the_rows() -> None:
    """The text is held once, whatever the number of rows, and at least as large as its keys and values."""
    one, eight = (prefix.measure_caches("full", 512, rows, rounds=2) for rows in (1, 8))
    own = (eight.shared - one.shared) // 7
    text = one.shared - own
    assert text >= 2 * prefix.LAYERS * 512 * prefix.WIDTH * 4
    assert eight.copies > 4 * eight.shared
