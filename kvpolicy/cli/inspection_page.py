"""What was seen of a prompt, as one page that needs no network: the text, the layers, and pictures of them."""

from __future__ import annotations

import io
import json
import math
import re
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from kvpolicy.cli.inspection import Inspection, Layer
from kvpolicy.cli.printing import size
from kvpolicy.reporting.text_rendering import DARK, LIGHT, NAMES, ink, level, runs_on, visible
from kvpolicy.reporting.token_spans import Span

MISSING = "Pictures are left out, since matplotlib is not installed: pip install 'kvpolicy[plots]'."


def write_page(seen: Inspection, path: str) -> None:
    """Write the page.

    Args:
        seen: What was seen.
        path: Of the file.

    Raises:
        OSError: Where it cannot be written.
    """
    Path(path).write_text(page(seen), encoding="utf-8")


def page(seen: Inspection) -> str:
    """The page as HTML."""
    frame = (files("kvpolicy") / "assets" / "inspect.html").read_text(encoding="utf-8")
    flow = runs_on(seen.spans)
    parts = {
        "title": escape(f"{seen.policy} on {seen.model}"),
        "shades": f"{_shades(LIGHT)}\n@media (prefers-color-scheme: dark) {{ {_shades(DARK)} }}",
        "facts": _facts(seen),
        "last": str(len(seen.layers)),
        "legend": "".join(f'<span class="t k{number}">{escape(name)}</span> ' for number, name in enumerate(NAMES)),
        "text": "".join(_token(seen, span, flow) for span in seen.spans),
        "layers": _layers(seen),
        "figures": _figures(seen),
        "names": json.dumps(["all layers", *(_told(layer) for layer in seen.layers)]),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], frame)


def _shades(shades: tuple[str, ...]) -> str:
    pairs = enumerate(shades, 1)
    return " ".join(f".k{number} {{ background: {shade}; color: {ink(shade)} }}" for number, shade in pairs)


def _facts(seen: Inspection) -> str:
    share = f" ({seen.nbytes / seen.full_nbytes:.2f} of it)" if seen.full_nbytes else ""
    pairs = [
        ("tokens", f"{seen.kept:,.0f} of {seen.seen:,} kept, the mean of layers and heads"),
        ("bytes", f"{size(seen.nbytes)} held, the full cache {size(seen.full_nbytes)}{share}"),
        ("importance", f"measured {seen.measured}" if seen.measured else "not measured"),
        ("note", seen.note),
    ]
    return "".join(f"<dt>{name}</dt><dd>{escape(text)}</dd>" for name, text in pairs if text)


def _token(seen: Inspection, span: Span, flow: bool) -> str:
    """One token: its shade in all layers and in each, and what is told where the pointer rests."""
    levels = "".join(str(level(share)) for share in (span.kept, *span.layers))
    shown = escape(visible(span.text).replace("\n", "\v" if flow else "\n")).replace("\v", "<wbr>") or "&#8203;"
    told = escape(_tip(seen, span), quote=True)
    return f'<span class="t k{levels[0]}" data-k="{levels}" title="{told}">{shown}</span>'


def _tip(seen: Inspection, span: Span) -> str:
    start = f"position {span.position:,}: {span.text!r}"
    if not span.seen:
        return f"{start}\nnot in the cache yet"
    kept = [
        f"layer {layer.index}: {round(share * len(layer.kept))} of {len(layer.kept)} heads"
        for layer, share in zip(seen.layers, span.layers, strict=True)
        if share
    ]
    return "\n".join([start, f"kept by {span.kept:.0%} of all heads", *kept])


def _told(layer: Layer) -> str:
    cosine = "" if layer.cosine is None else f", cosine {layer.cosine:.3f}"
    return f"layer {layer.index}: {layer.mean:,.0f} tokens kept{cosine}"


def _layers(seen: Inspection) -> str:
    """Rows of a table."""
    rows = [
        f"<tr><th>{layer.index}</th><td>{'&ndash;' if layer.cosine is None else f'{layer.cosine:.3f}'}</td>"
        f"<td>{layer.budget:,}</td><td>{layer.mean:,.0f}</td><td>{size(layer.nbytes)}</td></tr>"
        for layer in seen.layers
    ]
    for index, window in seen.left_alone.items():
        rows.append(f'<tr><th>{index}</th><td colspan="4">left alone: a sliding window of {window:,}</td></tr>')
    return "".join(rows)


def _figures(seen: Inspection) -> str:
    """Pictures of the layers and of what is kept, or why there are none."""
    try:
        from kvpolicy.reporting.plots.layers import budgets, layer_similarity
        from kvpolicy.reporting.plots.tokens import kept
    except ImportError as error:
        if (error.name or "").startswith("kvpolicy"):
            raise
        return f"<p>{escape(MISSING, quote=False)}</p>"
    made = {
        "Tokens that each layer keeps at most": budgets(seen.cache),
        "Which positions each layer keeps": kept(seen.cache),
    }
    if seen.measured:
        row = [math.nan] * (len(seen.layers) + len(seen.left_alone))
        for layer in seen.layers:
            row[layer.index] = math.nan if layer.cosine is None else layer.cosine
        made = {"How little attention changes the hidden state": layer_similarity([row], names=["prompt"])} | made
    return "".join(
        f"<figure><figcaption>{escape(title)}</figcaption>{svg(figure, title, f'f{number}')}</figure>"
        for number, (title, figure) in enumerate(made.items())
    )


def svg(figure: Any, label: str, salt: str) -> str:
    """A figure as an element of a page, which refers to nothing outside it and takes the page's text colour.

    Args:
        figure: Of matplotlib.
        label: What it shows, for those who cannot see it.
        salt: Sets its ids apart from those of other figures.
    """
    import matplotlib

    from kvpolicy.reporting.plots._style import INK  # pyright: ignore[reportPrivateUsage]

    out = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": salt, "svg.fonttype": "none"}):
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    text = out.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(r' xmlns(:xlink)?="[^"]*"', "", text).replace(INK, "currentColor")
    used = set(re.findall(r'#([^"\')]+)', text))
    text = re.sub(r' id="([^"]*)"', lambda found: found[0] if found[1] in used else "", text)
    wide = re.search(r'width="([\d.]+)pt"', text)
    most = f"{float(wide[1]) * 4 / 3:.0f}px" if wide else "100%"
    text = re.sub(r' (?:width|height)="[\d.]+pt"', "", text, count=2)
    head = f'<svg role="img" aria-label="{escape(label, quote=True)}" style="max-width:{most}"'
    return text.replace("<svg", head, 1)
