"""The table of the design note on KIVI is what its command prints."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvpolicy_eval.tables import requantize

PAGE = Path(__file__).parents[3] / "docs" / "design" / "slots.md"


def test_overwriting_beats_compaction_where_it_counts() -> None:
    found = requantize.errors(2)
    assert found["fresh"] < found["overwrite"] < found["compact once"] < found["compact 5 times"]


def test_the_docs_show_the_table() -> None:
    rows = [[*map(str.strip, line.split("|"))] for line in PAGE.read_text(encoding="utf-8").splitlines() if "|" in line]
    for bits in requantize.BITS:
        (shown,) = [row for row in rows if row[1] == str(bits)]
        found = requantize.errors(bits)
        assert [float(cell) for cell in shown[2:-1]] == pytest.approx(
            [found[case] for case in requantize.CASES], rel=0.02
        )
