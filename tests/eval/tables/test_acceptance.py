"""The table of accepted drafts."""

from __future__ import annotations

from pathlib import Path

import pytest

import kvpolicy
from kvpolicy_eval.tables import acceptance
from kvpolicy_eval.tables.__main__ import main


def test_a_full_budget_is_always_accepted() -> None:
    model, tokenizer = kvpolicy.tiny()
    rows = acceptance.prompts(tokenizer, 1)[:, :40]
    assert acceptance.acceptance(model, "window@1.0", rows, 3)[0] == 1.0
    with pytest.raises(ValueError, match="--n must be at most"):
        acceptance.prompts(tokenizer, 10**6)


def test_a_page_gets_its_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- table:acceptance -->\n<!-- /table -->\n")
    monkeypatch.setattr(acceptance, "acceptance", lambda model, policy, rows, gamma: (0.5, 2.25))
    main(["acceptance", "--n", "1", "--only", "h2o", "--budgets", "0.5", "--fill", str(page)])
    assert "| `h2o` | 0.50 (2.2) |" in page.read_text()
