"""The table of readers at equal bytes: each reads as much as fits, and no more."""

from __future__ import annotations

from pathlib import Path

import pytest

import kvpolicy
from kvpolicy_eval.tables import moved
from kvpolicy_eval.tables.__main__ import main
from tests.sampling import each_once, product

READERS = ["exact", "quest:dense=0", "loki", "sparq", "centroids:page=16"]


@product("reader,share", READERS, [0.6, 0.25], sample=each_once(READERS, [0.6, 0.25]))
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
    monkeypatch.setattr(moved.HeldOutText, "__init__", lambda *_: None)
    monkeypatch.setattr(moved.HeldOutText, "divergence", lambda self, policy: len(policy) / 100)
    main(["moved", "--only", "exact", "--shares", "0.6", "0.4", "--fill", str(page)])
    text = page.read_text()
    divergences = "divergence, 20% read | divergence, 10% read | divergence, 5% read"
    assert f"| bytes read, of the full cache | 60% | 40% | {divergences} |" in text
    assert "| `exact` | 0.75 (44) |  | 0.1400 | 0.1400 | 0.1500 |" in text


def test_the_full_cache_does_not_diverge_and_less_read_diverges_more(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvpolicy_eval.common import heldout

    for name, number in (("PROMPT", 96), ("FOLLOWING", 6), ("ROWS", 2)):
        monkeypatch.setattr(heldout, name, number)
    text = heldout.HeldOutText(*kvpolicy.tiny())
    some, few = (text.divergence(f"exact:read={read}") for read in (0.5, 0.05))
    assert abs(text.divergence("full")) < 1e-6 < some < few
