"""Colors stay apart for eyes that lack a kind of cones, and maps of colors read the same in grey."""

from __future__ import annotations

import itertools
from typing import Any

import matplotlib
import numpy as np
import pytest
from matplotlib.colors import to_rgb

from kvpolicy.reporting.plots._style import DIVERGING, GREY, KINDS, PALETTE, SEQUENTIAL

# Machado, Oliveira and Fernandes (2009), at full strength, for linear RGB.
EYES: dict[str, Any] = {
    "all cones": np.eye(3),
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
}
XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def lab(color: Any, eye: Any) -> Any:
    """CIELAB of a color as an eye sees it."""
    rgb = np.array(to_rgb(color))
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    seen = np.clip(np.asarray(eye) @ linear, 0, 1)
    x, y, z = np.cbrt(XYZ @ seen / XYZ.sum(1))
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("eye", EYES)
@pytest.mark.parametrize("colors", [PALETTE, tuple(KINDS.values())], ids=["palette", "kinds"])
def test_colors_stay_apart(colors: tuple[str, ...], eye: str) -> None:
    apart = {
        pair: float(np.linalg.norm(lab(pair[0], EYES[eye]) - lab(pair[1], EYES[eye])))
        for pair in itertools.combinations(colors, 2)
    }
    assert min(apart.values()) > 8, min(apart, key=lambda pair: apart[pair])


@pytest.mark.parametrize("page", ["#ffffff", "#14171b"])
def test_colors_are_seen_on_white_and_on_dark(page: str) -> None:
    for color in [*PALETTE, GREY]:
        assert abs(lab(color, np.eye(3))[0] - lab(page, np.eye(3))[0]) > 25, color


@pytest.mark.parametrize("eye", EYES)
def test_the_sequence_grows_lighter_for_every_eye(eye: str) -> None:
    steps = [lab(matplotlib.colormaps[SEQUENTIAL](at)[:3], EYES[eye])[0] for at in np.linspace(0, 1, 20)]
    assert np.all(np.diff(steps) > 0) and steps[-1] - steps[0] > 60


@pytest.mark.parametrize("eye", EYES)
def test_the_ends_of_the_diverging_map_differ(eye: str) -> None:
    low, middle, high = (lab(matplotlib.colormaps[DIVERGING](at)[:3], EYES[eye]) for at in (0.1, 0.5, 0.9))
    assert np.linalg.norm(low - high) > 40 and middle[0] > max(low[0], high[0]) + 20
