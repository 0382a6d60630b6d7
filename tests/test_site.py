"""Colors and search of the documentation's site; the version and the citation, which other files state too."""

from __future__ import annotations

import colorsys
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import kvpolicy

ROOT = Path(__file__).parents[1]
STYLE = ROOT / "docs" / "assets" / "site.css"

if not STYLE.is_file():
    pytest.skip("the source tree is not here", allow_module_level=True)

DARK = {"--md-default-bg-color": (225, 15, 14), "--md-code-bg-color": (225, 15, 18)}
"""Backgrounds of the dark theme of Material for MkDocs: hue in degrees, saturation and lightness in percent."""

Color = tuple[float, float, float]


def contrast(first: Color, second: Color) -> float:
    """The ratio of the relative luminances of two sRGB colors in [0, 1], as WCAG 2.2 defines it."""

    def luminance(color: Color) -> float:
        linear = (x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in color)
        return sum(weight * x for weight, x in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    dark, light = sorted((luminance(first), luminance(second)))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("background", DARK)
def test_links_and_buttons_of_the_dark_theme_can_be_read(background: str) -> None:
    style = STYLE.read_text(encoding="utf-8")
    (link,) = re.findall(r"slate\"\]\[data-md-color-primary\] \{\n  --md-typeset-a-color: #(\w{6});\n\}", style)
    red, green, blue = (int(link[at : at + 2], 16) / 255 for at in (0, 2, 4))
    hue, saturation, lightness = DARK[background]
    behind = colorsys.hls_to_rgb(hue / 360, lightness / 100, saturation / 100)
    assert contrast((red, green, blue), behind) >= 4.5
    assert re.search(r"\.md-button:not\(\.md-button--primary\) \{\n  color: var\(--md-typeset-a-color\);", style)


@pytest.mark.needs("material")
def test_the_dark_theme_has_these_backgrounds() -> None:
    import material

    sheets = Path(str(material.__file__)).parent.glob("templates/assets/stylesheets/*.min.css")
    theme = "".join(sheet.read_text(encoding="utf-8") for sheet in sheets).replace(" ", "")
    for name, (hue, saturation, lightness) in DARK.items():
        assert f"--md-hue:{hue}deg" in theme
        assert f"{name}:hsla(var(--md-hue),{saturation}%,{lightness}%,1)" in theme


@pytest.mark.parametrize(
    ("page", "words"),
    [
        ("guide/policies.md", ["Which policy should you use", "4-bit"]),
        ("guide/small-card.md", ["RTX 4090", "OOM"]),
        ("board.md", ["leaderboard"]),
    ],
)
def test_words_of_users_are_on_the_pages_that_answer(page: str, words: list[str]) -> None:
    text = " ".join((ROOT / "docs" / page).read_text(encoding="utf-8").split())
    assert not [word for word in words if word not in text]


def test_the_search_splits_words_as_users_type_them() -> None:
    (separator,) = re.findall(r"separator: '(.*)'$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    assert re.split(separator, "`bits=4` in 4-bit, kvpolicy.attach at 0.5") == [
        *["", "bits", "4", "in", "4", "bit", "kvpolicy", "attach", "at", "0.5"]
    ]


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
