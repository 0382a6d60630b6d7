"""CITATION.cff is what its format asks for, and says the version that is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

import kvpolicy

FILE = Path(__file__).parent.parent / "CITATION.cff"

if not FILE.exists():
    pytest.skip("the citation file is not installed", allow_module_level=True)


def test_it_cites_this_version() -> None:
    content: dict[str, Any] = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    assert {"cff-version", "message", "title", "authors"} <= content.keys(), "the format requires these"
    assert content["cff-version"] == "1.2.0"
    assert content["type"] == "software" and content["license"] == "Apache-2.0"
    assert content["version"] == kvpolicy.__version__
    for work in content["references"]:
        assert {"type", "title", "authors"} <= work.keys(), work
        assert all(person.keys() <= {"family-names", "given-names"} for person in work["authors"])


@pytest.mark.parametrize("identifier", ["2404.04793", "2503.00022", "2412.11741"])
def test_it_names_the_papers_it_began_with(identifier: str) -> None:
    assert identifier in FILE.read_text(encoding="utf-8")
