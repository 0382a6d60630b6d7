"""The version stands in five places."""

from __future__ import annotations

import re
from pathlib import Path

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
