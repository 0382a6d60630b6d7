"""The version stands in five places, and the citation is what its format asks for."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import kvpolicy

ROOT = Path(__file__).parent.parent

if not (ROOT / "README.md").exists():
    pytest.skip("the source tree is not here", allow_module_level=True)

PLACES = {
    "pyproject.toml": r'^version = "(.+)"$',
    "kvpolicy/text/version.py": r'^__version__ = "(.+)"$',
    "CITATION.cff": r"^version: (.+)$",
    "README.md": r"^  version = \{(.+)\},$",
    "docs/changelog.md": r"^## (\d.+)$",  # the newest release comes first
}


@pytest.mark.parametrize("name", PLACES)
def test_every_place_has_the_same_version(name: str) -> None:
    found = re.search(PLACES[name], (ROOT / name).read_text(encoding="utf-8"), re.MULTILINE)
    assert found is not None and found[1] == kvpolicy.__version__


def test_the_wheel_of_the_installation_page_is_of_this_version() -> None:
    text = (ROOT / "docs" / "guide" / "install.md").read_text(encoding="utf-8")
    assert set(re.findall(r"kvpolicy-([\d.]+)-py3", text)) == {kvpolicy.__version__}


def test_templates_of_issues_are_yaml() -> None:
    for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"):
        assert yaml.safe_load(path.read_text(encoding="utf-8"))


def test_the_citation_has_what_its_format_requires() -> None:
    content: dict[str, Any] = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert {"cff-version", "message", "title", "authors"} <= content.keys()
    assert content["cff-version"] == "1.2.0"
    assert content["type"] == "software" and content["license"] == "Apache-2.0"
    for work in content["references"]:
        assert {"type", "title", "authors"} <= work.keys(), work
        assert all(person.keys() <= {"family-names", "given-names"} for person in work["authors"])


@pytest.mark.parametrize("identifier", ["2404.04793", "2503.00022", "2412.11741"])
def test_it_names_the_papers_it_began_with(identifier: str) -> None:
    assert identifier in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
