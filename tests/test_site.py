"""Colors of the documentation's site, and its settings of the search."""

from __future__ import annotations

import colorsys
import re
from pathlib import Path

import pytest

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


def test_contrast_of_known_colors() -> None:
    assert contrast((0, 0, 0), (1, 1, 1)) == pytest.approx(21)
    grey = 119 / 255
    assert contrast((1, 1, 1), (grey, grey, grey)) == pytest.approx(4.48, abs=0.01)


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
