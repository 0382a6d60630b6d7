"""The picture of a text with its tokens shaded."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("matplotlib")
pytest.importorskip("transformers")

from matplotlib.collections import PatchCollection
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

import kvpolicy
from kvpolicy.reporting import plots
from kvpolicy.reporting.plots.text import WIDE, pieces
from kvpolicy.reporting.token_spans import LIGHT, level
from tests.conformance.models import build

TEXT = "tiger=4821 and $x$ é 中 more of it\nlion=1234\n?lion="


@pytest.fixture(scope="module")
def tiny() -> tuple[Any, Any]:
    return kvpolicy.tiny()


def run(tiny: tuple[Any, Any], policy: str) -> tuple[Any, list[str]]:
    model, tokenizer = tiny
    batch = tokenizer(["?", TEXT], return_tensors="pt", padding=True)
    with torch.no_grad(), kvpolicy.attach(model, policy) as handle:
        model(**batch)
    return handle, pieces(tokenizer, batch.input_ids[1].tolist())


def shades(figure: Figure) -> list[tuple[str, float]]:
    """Color and width in letters of each field, in the order of the text."""
    (fields,) = (found for found in figure.axes[0].collections if isinstance(found, PatchCollection))
    paths: Any = fields.get_paths()
    wide = [path.vertices[:, 0].max() - path.vertices[:, 0].min() for path in paths]
    colors: Any = fields.get_facecolor()
    return list(zip(map(to_hex, colors), [round(size / WIDE) for size in wide], strict=True))


@pytest.mark.parametrize("layer", [None, 3])
def test_shades_are_the_shares_kept(layer: int | None, tiny: tuple[Any, Any]) -> None:
    handle, tokens = run(tiny, "h2o@20")
    figure = plots.token_text(handle, tokens, layer=layer, row=1)
    figure.draw_without_rendering()
    slots = handle.cache.policy_layers if layer is None else [handle.cache.policy_layers[layer]]
    wanted: list[tuple[str, int]] = []
    for position, token in enumerate(tokens):
        held = [position in head for one in slots for head in one.positions[1].tolist()]
        if any(held):
            wide = 2 if token == "中" else len(token)
            wanted.append((LIGHT[level(sum(held) / len(held)) - 1], wide))
    assert shades(figure) == wanted
    assert len({color for color, _ in wanted}) > 1
    assert ("all layers" if layer is None else "layer 3") in figure.axes[0].get_title()


def test_a_legend_names_the_scale(tiny: tuple[Any, Any]) -> None:
    legend = plots.token_text(*run(tiny, "full"), row=1).axes[0].get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()][::6] == ["none", "all"]


def test_axes_of_ones_own(tiny: tuple[Any, Any]) -> None:
    figure = Figure()
    axes = figure.add_subplot()
    assert plots.token_text(*run(tiny, "full"), row=1, axes=axes) is figure
    assert len(shades(figure)) > 10


def test_layers_are_those_of_the_model() -> None:
    """Where every other layer is left alone, a layer keeps its number."""
    model = build("gemma2")
    with torch.no_grad(), kvpolicy.attach(model, "streaming:sinks=1@0.5") as handle:
        model(torch.arange(8)[None])
    tokens = list("abcdefgh")
    assert [wide for _, wide in shades(plots.token_text(handle, tokens, layer=3))] == [1] * 4
    with pytest.raises(ValueError, match="layer must be one of 1, 3, 5 under the policy, got 2"):
        plots.token_text(handle, tokens, layer=2)
