"""Every figure holds the numbers of what it was drawn from, says its units, and is told apart by every eye."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
import torch
from matplotlib import pyplot as plt
from matplotlib.collections import PatchCollection
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure

import kvpolicy
from kvpolicy import Handle
from kvpolicy.hf.embedded import config_of
from kvpolicy.planning.curves import save_layers
from kvpolicy.reporting import plots
from kvpolicy.reporting.plots._style import DIVERGING, GREY, KINDS, PALETTE, SEQUENTIAL
from kvpolicy.reporting.plots.text import WIDE, pieces
from kvpolicy.reporting.token_spans import LIGHT, level
from tests.conformance.models import build
from tests.plots.conftest import LENGTHS, run


def first(figure: Any) -> Any:
    """Its first axes, of whose lines and bars matplotlib's types know too little."""
    return figure.axes[0]


def image(figure: Figure) -> Any:
    return first(figure).images[0].get_array()


def legend(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].texts]


def test_similarity_is_what_was_measured(squeezed: Handle) -> None:
    assert squeezed.cache is not None
    figure = plots.layer_similarity(squeezed, names=["one", "<two>", "three"])
    np.testing.assert_allclose(image(figure), squeezed.cache.cosines().numpy())
    axes = first(figure)
    assert axes.get_xlabel() == "layer" and [label.get_text() for label in axes.get_yticklabels()][1] == "<two>"
    assert figure.axes[1].get_ylabel() == "cosine"
    written = [float(text.get_text()) for text in axes.texts]
    assert written == [round(value, 2) for value in squeezed.cache.cosines().flatten().tolist()]
    assert not plots.layer_similarity(torch.rand(3, 80)).axes[0].texts, "too many for numbers"


def test_similarity_of_nothing_says_so(coded: Handle, model: Any) -> None:
    with pytest.raises(ValueError, match="must measure layers, got h2o"):
        plots.layer_similarity(coded)
    wrong: list[Any] = [[[0.1, 0.2], [0.3]], None, 3, "h2o", [0.5, 0.6], [["a"]]]
    for cosines in wrong:
        with pytest.raises(ValueError, match="must have a row per prompt"):
            plots.layer_similarity(cosines)
    with pytest.raises(ValueError, match="got 2 for 1 prompts"):
        plots.layer_similarity([[0.1]], names=["a", "b"])
    with (
        kvpolicy.attach(model, "squeeze+h2o@0.4") as handle,
        pytest.raises(ValueError, match="must have seen a prompt"),
    ):
        plots.layer_similarity(handle)


def test_budgets_are_those_of_the_layers(squeezed: Handle) -> None:
    assert squeezed.cache is not None
    figure = plots.budgets(squeezed)
    rows = torch.stack([layer.budget for layer in squeezed.cache.policy_layers]).double()  # [L, B]
    axes = first(figure)
    bars = [patch.get_height() for patch in axes.patches]
    assert bars == rows.mean(1).tolist() and len(set(bars)) > 1
    assert axes.get_ylabel() == "budget, tokens (mean of 3 rows)" and axes.get_xlabel() == "layer"
    (ranges,) = (one for one in axes.collections)
    ends = [segment[:, 1].tolist() for segment in ranges.get_segments()]
    assert ends == [[row.min(), row.max()] for row in rows]
    even = next(line for line in axes.lines if line.get_linestyle() == "--")
    assert even.get_ydata()[0] == pytest.approx(rows.mean().item())


def test_budgets_of_several_are_lines(model: Any) -> None:
    config = config_of("llama-2-70b")
    found = {words: kvpolicy.plan(config, words, prompt=1000) for words in ("pyramid+h2o@0.2", "h2o@0.2", "kivi")}
    figure = plots.budgets(found)
    lines = {line.get_label(): list(line.get_ydata()) for line in first(figure).lines}
    for words, plan in found.items():
        assert lines[words] == [layer.tokens for layer in plan.layers] and len(lines[words]) == 80
    assert [name for name in legend(figure) if name.startswith("even")] == [
        f"even division: {tokens:,} tokens" for tokens in (found["kivi"].layers[0].tokens, 200)
    ]


def test_unmanaged_layers_are_marked_and_have_no_number(sliding: Handle) -> None:
    figure = plots.budgets(sliding)
    assert "unmanaged (sliding window)" in legend(figure)
    places = {round(patch.get_x() + patch.get_width() / 2) for patch in first(figure).patches}
    assert places == set(range(6))
    held = image(plots.kept(sliding))
    assert [bool(row.mask.all()) for row in held] == [at not in (2, 5) for at in range(6)]
    assert "unmanaged" in legend(plots.bytes_by_kind(sliding))


@pytest.mark.parametrize("row", range(3))
def test_kept_is_the_share_of_heads(squeezed: Handle, row: int) -> None:
    assert squeezed.cache is not None
    figure = plots.kept(squeezed.cache, row=row)
    wanted = np.zeros((4, LENGTHS[row]))
    for at, layer in enumerate(squeezed.cache.policy_layers):
        for head in layer.positions[row]:
            for position in head.tolist():
                if position >= 0:
                    wanted[at, position] += 1 / 2
    assert image(figure).tolist() == wanted.tolist() and wanted.sum() > 0
    axes = first(figure)
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("position, tokens", "layer")
    assert figure.axes[1].get_ylabel() == "fraction of KV heads"
    assert axes.images[0].get_extent() == [0, LENGTHS[row], 3.5, -0.5]


def test_kept_of_one_head(coded: Handle) -> None:
    assert coded.cache is not None
    figure = plots.kept(coded, head=1)
    held = set(coded.cache.policy_layers[2].positions[0, 1].tolist()) - {-1}
    assert set(np.flatnonzero(image(figure)[2]).tolist()) == held
    wrong: list[dict[str, Any]] = [{"head": 2}, {"row": 3}, {"row": -1}]
    for words in wrong:
        with pytest.raises(ValueError, match=r"(row|head) must be between 0 and \d, got"):
            plots.kept(coded, **words)


def test_a_row_without_tokens_says_so(model: Any) -> None:
    figure = plots.kept(run(model, "h2o@0.4", (10, 0)), row=1)
    assert image(figure).shape == (4, 1) and not image(figure).any()
    assert [text.get_text() for text in first(figure).texts] == ["this row has no tokens"]


@pytest.mark.parametrize("draw", [plots.budgets, plots.bytes_by_kind, plots.kept])
def test_what_cannot_be_drawn_is_refused(draw: Any, model: Any) -> None:
    with kvpolicy.attach(model, "h2o@0.4") as handle:
        for source in (handle, kvpolicy.PolicyCache(model)):
            with pytest.raises(ValueError, match="must have seen a prompt; run the model first"):
                draw(source)
    with pytest.raises(TypeError, match=r"^The source must be a Handle.*, got a str\.$"):
        draw("h2o@0.4")
    if draw is not plots.kept:
        with pytest.raises(ValueError, match="dictionary of sources must not be empty"):
            draw({})


@pytest.mark.filterwarnings("ignore:The text exceeds")
def test_a_long_text_is_binned_and_nothing_is_lost() -> None:
    handle = run(build("llama", layers=1), "streaming:sinks=4@0.25", (5000,))
    held = image(plots.kept(handle))
    assert held.shape == (1, 1024) and held.max() <= 1
    sizes = np.bincount(np.arange(5000) * 1024 // 5000)
    assert (held[0] * sizes).sum() == pytest.approx(1250)
    assert held[0, -1] == 1 and held[0, 500] == 0 < held[0, 0]


def test_bytes_are_those_held(coded: Handle) -> None:
    assert coded.cache is not None
    figure = plots.bytes_by_kind(coded)
    axes = first(figure)
    assert axes.get_xlabel() == "bytes, KiB"
    kinds = legend(figure)
    found = {kind: [bar.get_width() * 1024 for bar in bars] for kind, bars in zip(kinds, axes.containers, strict=True)}
    wanted: dict[str, int] = {}
    for layer in coded.cache.policy_layers:
        for kind, size in layer.held().items():
            wanted[kind] = wanted.get(kind, 0) + size
    assert {kind: widths[1] for kind, widths in found.items() if kind != "full cache"} == {
        kind: pytest.approx(size) for kind, size in wanted.items() if size
    }
    assert found["full cache"] == [pytest.approx(coded.cache.full_nbytes), 0]
    assert {"codes", "scales", "positions"} <= set(kinds)


def test_bytes_beside_each_other_have_their_own_full_caches() -> None:
    config = config_of("tiny")
    found = {str(batch): kvpolicy.plan(config, "h2o@0.2", batch=batch, prompt=100) for batch in (1, 2)}
    names = [label.get_text() for label in plots.bytes_by_kind(found).axes[0].get_yticklabels()]
    assert names == ["1, full cache", "1", "2, full cache", "2"]
    same = plots.bytes_by_kind({"a": found["1"], "b": found["1"]})
    assert [label.get_text() for label in same.axes[0].get_yticklabels()] == ["full cache", "a", "b"]
    (axes,) = plots.bytes_by_kind({"full cache": found["1"]}).axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["full cache"] * 2
    full = next(bars for bars in axes.containers if bars.get_label() == "full cache")
    assert [round(bar.get_width() * 1024) for bar in full] == [found["1"].full_nbytes, 0]


def test_reports_plans_caches_and_handles_draw_alike(squeezed: Handle) -> None:
    assert squeezed.cache is not None
    for draw in (plots.budgets, plots.bytes_by_kind):
        bars = [
            [(patch.get_height(), patch.get_width()) for patch in first(draw(source)).patches]
            for source in (squeezed, squeezed.cache, squeezed.report())
        ]
        assert bars[0] == bars[1] == bars[2] and bars[0]
    assert squeezed.plan is not None
    assert [bar.get_height() for bar in first(plots.budgets(squeezed.plan)).patches] == [
        layer.tokens for layer in squeezed.plan.layers
    ]


def test_policies_by_layer(tmp_path: Path) -> None:
    save_layers(tmp_path / "plan.json", ["snapkv@0.5", "h2o+tokenwise@0.25"] * 2)
    handle = run(build("llama", layers=4), f"tuned:file={tmp_path}/plan.json@0.5")
    assert handle.plan is not None
    for draw in (plots.budgets, plots.bytes_by_kind, plots.kept):
        assert draw(handle).axes
    assert plots.budgets(handle.plan).axes and plots.bytes_by_kind(handle.report()).axes
    with pytest.raises(ValueError, match="must measure layers, got tuned:file="):
        plots.layer_similarity(handle)


def test_figures_draw_into_axes_and_leave_no_state(squeezed: Handle) -> None:
    rows = [{"policy": "full", "accuracy": 0.9, "share": 1.0}, {"policy": "h2o@0.2", "accuracy": 0.6, "share": 0.2}]
    draws: list[tuple[Any, Any]] = [
        (plots.layer_similarity, squeezed),
        (plots.budgets, squeezed),
        (plots.kept, squeezed),
        (plots.bytes_by_kind, squeezed),
        (plots.accuracy_against_bytes, rows),
    ]
    before = dict(plt.rcParams)
    for draw, source in draws:
        figure = Figure()
        left, right = figure.subplots(1, 2)
        assert draw(source, axes=right) is figure
        assert right.has_data() and not left.has_data()
        own: Any = draw(source)
        assert own._repr_png_().startswith(b"\x89PNG"), "what a notebook shows"
        assert isinstance(own, Figure) and own is not figure
    assert plt.get_fignums() == [] and dict(plt.rcParams) == before


TEXT = "tiger=4821 and $x$ é 中 more of it\nlion=1234\n?lion="


@pytest.fixture(scope="module")
def tiny() -> tuple[Any, Any]:
    return kvpolicy.tiny()


def shaded(tiny: tuple[Any, Any], policy: str) -> tuple[Any, list[str]]:
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
    handle, tokens = shaded(tiny, "h2o@20")
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


def test_a_text_in_axes_of_ones_own_has_a_legend(tiny: tuple[Any, Any]) -> None:
    figure = Figure()
    axes = figure.add_subplot()
    assert plots.token_text(*shaded(tiny, "full"), row=1, axes=axes) is figure
    scale = axes.get_legend()
    assert len(shades(figure)) > 10 and scale is not None
    assert [text.get_text() for text in scale.get_texts()][::6] == ["none", "all"]


def test_layers_of_a_text_are_those_of_the_model() -> None:
    """Where every other layer is left alone, a layer keeps its number."""
    model = build("gemma2")
    with torch.no_grad(), kvpolicy.attach(model, "streaming:sinks=1@0.5") as handle:
        model(torch.arange(8)[None])
    tokens = list("abcdefgh")
    assert [wide for _, wide in shades(plots.token_text(handle, tokens, layer=3))] == [1] * 4
    with pytest.raises(ValueError, match="layer must be one of 1, 3, 5 under the policy, got 2"):
        plots.token_text(handle, tokens, layer=2)


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
