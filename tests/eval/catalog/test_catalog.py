"""Lists of methods are those of the registry, and a list that is not is found."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvpolicy import registry
from kvpolicy_eval.catalog.__main__ import main
from kvpolicy_eval.catalog.lists import COLUMNS, front_matter, index, places
from kvpolicy_eval.catalog.places import Place

ROOT = Path(__file__).parents[3]


def test_every_list_is_current(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(ROOT)
    assert main(["--check"]) == 0, "run python -m kvpolicy_eval.catalog: " + capsys.readouterr().out


def test_a_changed_list_is_noticed_and_written_again(tmp_path: Path) -> None:
    for place in places(ROOT):
        file = tmp_path / place.path
        file.parent.mkdir(parents=True, exist_ok=True)
        right = (ROOT / place.path).read_text(encoding="utf-8")
        assert place.text in right, place.name
        file.write_text(right.replace(place.text, place.text[: len(place.text) // 2] + "\n"), encoding="utf-8")
        assert not place.is_current(tmp_path), place.name
        place.write(tmp_path)
        assert place.is_current(tmp_path), place.name
        assert file.read_text(encoding="utf-8") == right


@pytest.mark.parametrize("path", ["page.md", "module.py"])
def test_a_place_that_is_missing_is_one_sentence(path: str, tmp_path: Path) -> None:
    (tmp_path / path).write_text("<!-- generated:other --><!-- /generated -->\n# generated: other\n# /generated\n")
    with pytest.raises(ValueError, match=f"{path} has no place for methods"):
        Place(path=path, name="methods", text="").write(tmp_path)


PAGE = "---\nwhat it does: {}\n{}---\n\n# kivi\n"
SHARED = "---\nplain:\n  what it does: stores a | plain\n  source: a book\n---\n\n# Defaults\n"


def _pages(folder: Path, more: str = "") -> None:
    (folder / "docs" / "methods").mkdir(parents=True)
    for name in registry.CODECS:
        text = PAGE.format(f"stores a | {name}", more if name == "kivi" else "")
        (folder / "docs" / "methods" / f"{name}.md").write_text(text, encoding="utf-8")
    (folder / "docs" / "methods" / "defaults.md").write_text(SHARED, encoding="utf-8")


def test_a_row_is_the_front_matter_and_the_source_of_the_docstring(tmp_path: Path) -> None:
    _pages(tmp_path, "source: a poem\n")
    pages = tmp_path / "docs" / "methods"
    assert front_matter(pages, "kivi") == {"what it does": "stores a | kivi", "source": "a poem"}
    assert front_matter(pages, "plain") == {"what it does": "stores a | plain", "source": "a book"}
    lines = index(tmp_path, "codec").splitlines()
    assert lines[0] == "| name | what it does | source |"
    assert lines[2] == r"| [`plain`](defaults.md#plain) | stores a \| plain | a book |"
    assert r"| [`kivi`](kivi.md) | stores a \| kivi | a poem |" in lines
    gear = "GEAR, [arXiv:2403.05527](https://arxiv.org/abs/2403.05527)"
    assert rf"| [`gear`](gear.md) | stores a \| gear | {gear} |" in lines
    assert len(lines) == 2 + len(registry.CODECS)


@pytest.mark.parametrize(
    ("front", "message"),
    [
        (PAGE.format("x", "what it costs: much\n"), "has no column 'what it costs'"),
        ("---\nsource: a book\n---\n", "must have 'what it does'"),
        ("# kivi\n", "must begin with front matter"),
    ],
)
def test_a_wrong_front_matter_is_one_sentence(front: str, message: str, tmp_path: Path) -> None:
    _pages(tmp_path)
    (tmp_path / "docs" / "methods" / "kivi.md").write_text(front, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        index(tmp_path, "codec")


def test_a_page_of_several_methods_has_an_entry_for_each(tmp_path: Path) -> None:
    _pages(tmp_path)
    (tmp_path / "docs" / "methods" / "defaults.md").write_text(SHARED.replace("plain:", "all:"), encoding="utf-8")
    with pytest.raises(ValueError, match=r"defaults\.md must have an entry for 'plain'"):
        index(tmp_path, "codec")


def test_a_page_that_is_missing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        main([])
    assert stopped.value.code == 2
    assert f"docs/methods/{next(iter(registry.ALLOCATORS))}.md" in capsys.readouterr().err


def test_every_kind_has_columns() -> None:
    assert set(COLUMNS) == set(registry.BUILT_IN)
