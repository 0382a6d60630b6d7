"""The tables of the page that reproduces papers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvpolicy_eval.sweep.estimate import CARDS
from kvpolicy_eval.tables import papers

ROOT = Path(__file__).parents[3]
CARD = CARDS[papers.CARD]
PAGE = ROOT / "docs" / "reproduce" / "index.md"


@pytest.mark.parametrize("name", sorted(papers.papers()))
def test_the_page_has_what_the_command_prints(name: str) -> None:
    page = PAGE.read_text(encoding="utf-8")
    paper = papers.papers()[name]
    swept = (ROOT / papers.SWEEP_PAGE).read_text(encoding="utf-8")
    sections = [papers.values(paper, CARD)]
    sections += [papers.embedded(paper["embedded"], swept)] if "embedded" in paper else []
    for section in sections:
        place = f"<!-- table:{name}-{section.place} -->\n{section}\n<!-- /table -->"
        assert place in page, f"run python -m kvpolicy_eval.tables papers {name} --fill docs/reproduce/index.md"


def _paper(**row: Any) -> dict[str, Any]:
    base = {"what": "x", "model": "mistral-7b", "task": "xsum", "policy": "full", "value": "1"}
    return {"config": "papers-squeeze", "rows": [base | row]}


def test_a_run_takes_the_place_of_what_it_needs() -> None:
    assert "| 1 | 0.97 |" in str(papers.values(_paper(ours="0.97"), CARD))
    assert "| 1 | not run: needs " in str(papers.values(_paper(), CARD))


def test_a_row_must_be_cells_of_its_sweep() -> None:
    with pytest.raises(ValueError, match=r"papers-squeeze must have cells of h2o@0\.7 for mistral-7b"):
        papers.values(_paper(policy="h2o@0.7"), CARD)


TABLE = "<!-- table:t -->\n| policy | at 20% | without a budget | bytes held |\n|---|---|---|---|\n"
ROWS = "| `full` |  | **1.00** | 100% |\n| `h2o` | **0.5 [0.1, 0.9]** |  | 20% |\n<!-- /table -->"


def test_rows_of_the_embedded_model_are_those_of_its_page() -> None:
    chosen = {"source": "t", "column": "at 20%", "policies": ["h2o", "full"]}
    (grid,) = papers.embedded(chosen, TABLE + ROWS).grids
    assert list(grid.rows) == [["`h2o`", "0.5 [0.1, 0.9]"], ["`full`", "1.00"]]
    for changes, message in (
        ({"source": "u"}, "must have the table u"),
        ({"column": "at 30%"}, "with the column 'at 30%'"),
        ({"policies": ["tova"]}, "must have tova"),
    ):
        with pytest.raises(ValueError, match=message):
            papers.embedded(chosen | changes, TABLE + ROWS)
