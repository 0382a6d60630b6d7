"""An inspection as an HTML page that needs no network access: the text, a table of the layers, and plots."""

from __future__ import annotations

import io
import json
import math
import re
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from kvpolicy.cli.formatting import size
from kvpolicy.cli.generation import held
from kvpolicy.cli.inspection import Inspection, Layer
from kvpolicy.reporting.token_spans import DARK, LIGHT, NAMES, Span, ink, level, runs_on, visible
from kvpolicy.text.formats import replace_file

MARKER = '<meta name="generator" content="kvpolicy inspect">'
"""A line of every page, by which a page is known that may be replaced."""
NO_MATPLOTLIB = "The page has no plots, because matplotlib is not installed: pip install 'kvpolicy[plots]'."


def write_page(inspection: Inspection, path: str) -> None:
    """Write the page to a file, which is replaced if it exists."""
    replace_file(Path(path), page(inspection).encode())


def page(inspection: Inspection) -> str:
    """Return the page as HTML: the template `assets/inspect.html` with its placeholders filled in."""
    template = (files("kvpolicy") / "assets" / "inspect.html").read_text(encoding="utf-8")
    continuous = runs_on(inspection.spans)
    parts = {
        "title": escape(f"{inspection.policy} on {inspection.model}"),
        "shades": f"{_shades(LIGHT)}\n@media (prefers-color-scheme: dark) {{ {_shades(DARK)} }}",
        "facts": _facts(inspection),
        "last": str(len(inspection.layers)),
        "legend": "".join(f'<span class="t k{number}">{escape(name)}</span> ' for number, name in enumerate(NAMES)),
        "text": "".join(_token(inspection, span, continuous) for span in inspection.spans),
        "layers": _layers(inspection),
        "figures": _figures(inspection),
        "names": json.dumps(["all layers", *(_layer_name(layer) for layer in inspection.layers)]),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], template)


def _shades(shades: tuple[str, ...]) -> str:
    """Return the CSS rule of each level, with the class k1, k2, ..."""
    pairs = enumerate(shades, 1)
    return " ".join(f".k{number} {{ background: {shade}; color: {ink(shade)} }}" for number, shade in pairs)


def _facts(inspection: Inspection) -> str:
    pairs = [
        ("kept", f"{inspection.kept:,.0f} of {inspection.seen:,} tokens (mean over layers and KV heads)"),
        ("bytes", held(inspection.nbytes, inspection.full_nbytes)),
        ("importance", f"measured {inspection.measured}" if inspection.measured else "not measured"),
        ("note", inspection.note),
    ]
    return "".join(f"<dt>{name}</dt><dd>{escape(text)}</dd>" for name, text in pairs if text)


def _token(inspection: Inspection, span: Span, continuous: bool) -> str:
    """Return the element of a token: its levels, over all layers and in each layer, and its tooltip.

    In a text of short lines, which are shown without line breaks, each newline becomes an opportunity for one.
    """
    levels = "".join(str(level(share)) for share in (span.kept, *span.layers))
    newline = "\v" if continuous else "\n"  # "\v" stands for the tag <wbr>, which must not be escaped
    shown = escape(visible(span.text).replace("\n", newline)).replace("\v", "<wbr>")
    shown = shown or "&#8203;"  # a zero-width space, so that an empty token has an element to point at
    tooltip = escape(_tooltip(inspection, span), quote=True)
    return f'<span class="t k{levels[0]}" data-k="{levels}" title="{tooltip}">{shown}</span>'


def _tooltip(inspection: Inspection, span: Span) -> str:
    start = f"position {span.position:,}: {span.text!r}"
    if not span.seen:
        return f"{start}\nnot in the cache yet"
    kept = [
        f"layer {layer.index}: {round(share * len(layer.kept))} of {len(layer.kept)} heads"
        for layer, share in zip(inspection.layers, span.layers, strict=True)
        if share
    ]
    return "\n".join([start, f"kept by {span.kept:.0%} of all heads", *kept])


def _layer_name(layer: Layer) -> str:
    cosine = "" if layer.cosine is None else f", cosine {layer.cosine:.3f}"
    return f"layer {layer.index}: {layer.mean:,.0f} tokens kept{cosine}"


def _layers(inspection: Inspection) -> str:
    """Return the rows of the table of layers."""
    rows = [
        f"<tr><th>{layer.index}</th><td>{'&ndash;' if layer.cosine is None else f'{layer.cosine:.3f}'}</td>"
        f"<td>{layer.budget:,}</td><td>{layer.mean:,.0f}</td><td>{size(layer.nbytes)}</td></tr>"
        for layer in inspection.layers
    ]
    for index, window in inspection.unmanaged.items():
        rows.append(f'<tr><th>{index}</th><td colspan="4">unmanaged: sliding window of {window:,} tokens</td></tr>')
    for index in inspection.states:
        rows.append(f'<tr><th>{index}</th><td colspan="4">unmanaged: a state</td></tr>')
    return "".join(rows)


def _figures(inspection: Inspection) -> str:
    """Return the plots, or a sentence that says why there are none."""
    try:
        from kvpolicy.reporting.plots.layers import budgets, kept, layer_similarity
    except ImportError as error:
        if (error.name or "").startswith("kvpolicy"):  # a broken installation, not a missing extra
            raise
        return f"<p>{escape(NO_MATPLOTLIB, quote=False)}</p>"
    figures = {
        "Budget of each layer, in tokens": budgets(inspection.cache),
        "Positions that each layer keeps": kept(inspection.cache),
    }
    if inspection.measured:
        # Layers without a measurement leave a gap, unmanaged ones included.
        cosines = [math.nan] * inspection.depth
        for layer in inspection.layers:
            cosines[layer.index] = math.nan if layer.cosine is None else layer.cosine
        title = "Cosine similarity of the hidden states before and after attention"
        figures = {title: layer_similarity([cosines], names=["prompt"])} | figures
    return "".join(
        f"<figure><figcaption>{escape(title)}</figcaption>"
        f'<div class="wide">{svg(figure, title, f"f{number}")}</div></figure>'
        for number, (title, figure) in enumerate(figures.items())
    )


def svg(figure: Any, label: str, salt: str) -> str:
    """Return a figure as an SVG element that has no external references and uses the text color of the page.

    Args:
        figure: A figure of matplotlib.
        label: The accessible name of the figure.
        salt: Makes the ids of the element different from those of the other figures of the page.
    """
    import matplotlib

    from kvpolicy.reporting.plots._style import INK  # pyright: ignore[reportPrivateUsage]

    out = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": salt, "svg.fonttype": "none"}):
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    text = out.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(r' xmlns(:xlink)?="[^"]*"', "", text).replace(INK, "currentColor")
    # Only ids that the element refers to are needed. The others, such as figure_1, repeat in every figure.
    used = set(re.findall(r'#([^"\')]+)', text))
    text = re.sub(r' id="([^"]*)"', lambda found: found[0] if found[1] in used else "", text)
    # The element scales with the page, up to the size of the figure: 1 pt is 4/3 px.
    width = re.search(r'width="([\d.]+)pt"', text)
    max_width = f"{float(width[1]) * 4 / 3:.0f}px" if width else "100%"
    text = re.sub(r' (?:width|height)="[\d.]+pt"', "", text, count=2)
    head = f'<svg role="img" aria-label="{escape(label, quote=True)}" style="max-width:{max_width}"'
    return text.replace("<svg", head, 1)
