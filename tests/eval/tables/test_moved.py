"""The table of readers at equal bytes: each reads as much as fits, and no more."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("transformers")

import kvpolicy
from kvpolicy_eval.tables import moved


@pytest.mark.parametrize("reader", ["exact", "quest:dense=0", "loki", "sparq", "centroids:page=16"])
@pytest.mark.parametrize("share", [0.6, 0.25])
def test_one_more_page_would_not_fit(reader: str, share: float) -> None:
    def part(tokens: int) -> float:
        full = kvpolicy.plan("tiny", "full", prompt=moved.LENGTH).moved
        return kvpolicy.plan("tiny", f"{reader}:read={tokens}", prompt=moved.LENGTH).moved / full

    tokens = moved.read_for(reader, share)
    assert tokens == 0 or part(tokens) <= share
    assert part(tokens + 1) > share


def test_every_reader_of_the_table_fits_some_share() -> None:
    for reader in moved.READERS:
        assert any(moved.read_for(reader, share) for share in moved.SHARES)


def test_a_page_gets_its_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- table:moved -->\n<!-- /table -->\n")
    tasks = {"tasks": {"recall": 0.5, "needles": 1.0}}
    monkeypatch.setattr(moved.Bench, "result", lambda *_: tasks)
    moved.main(["--only", "exact", "--shares", "0.6", "0.4", "--fill", str(page)])
    text = page.read_text()
    assert "| moved, of the full cache | 60% | 40% |" in text
    assert "| `exact` | 0.75 (44) |  |" in text
