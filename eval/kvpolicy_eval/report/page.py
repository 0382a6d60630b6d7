"""The page: one self-contained HTML file."""

from __future__ import annotations

import re
from html import escape

from kvpolicy_eval.report.gather import Findings
from kvpolicy_eval.report.sections import Section, sections
from kvpolicy_eval.report.tables import Table

_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #59636e; --paper: #fff; --line: #d5dae0; --wash: #f4f6f8; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e8eaed; --soft: #a3abb5; --paper: #14171b; --line: #353b43; --wash: #1d2126; }
}
body { background: var(--paper); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; margin: 0; }
main, header, nav { max-width: 64rem; margin: 0 auto; padding: 0 1.25rem; }
header { padding-top: 2rem; } h1 { font-size: 1.7rem; margin: 0 0 .25rem; }
h2 { font-size: 1.25rem; margin: 2.5rem 0 .5rem; border-top: 1px solid var(--line); padding-top: 1.5rem; }
h3 { font-size: 1rem; margin: 1.25rem 0 .25rem; } p { max-width: 46rem; } .soft { color: var(--soft); }
nav { position: sticky; top: 0; background: var(--paper); padding-top: .5rem; padding-bottom: .5rem; z-index: 1; }
nav { display: flex; flex-wrap: wrap; } nav a { margin-right: 1rem; white-space: nowrap; font-size: .9rem; }
a { color: inherit; }
figure { margin: 1rem 0; overflow-x: auto; } svg { width: 100%; height: auto; min-width: 34rem; }
svg text { font-family: system-ui, sans-serif; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: .86rem; margin: .5rem 0 1rem; }
th, td { border-bottom: 1px solid var(--line); padding: .3rem .7rem .3rem 0; text-align: left; vertical-align: top; }
td { font-variant-numeric: tabular-nums; } th { color: var(--soft); font-weight: 600; }
code { background: var(--wash); border-radius: 3px; font-size: .92em; padding: .05em .25em; overflow-wrap: anywhere; }
summary { cursor: pointer; margin: .5rem 0; }
"""


def page(findings: Findings) -> str:
    """The complete page."""
    import matplotlib

    from kvpolicy_eval.report.style import RC

    with matplotlib.rc_context(RC):
        parts = sections(findings)
    links = "".join(f'<a href="#{part.key}">{escape(part.short)}</a>' for part in parts)
    about = f"<p>{inline(findings.about)}</p>" if findings.about else ""
    counts = (
        f"{len(findings.points)} policies and budgets, {len(findings.tasks)} tasks, {len(findings.failed)} cells failed"
    )
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="generator" content="kvpolicy-eval report">'
        f"<title>kvpolicy: {escape(findings.name)}</title><style>{_STYLE}</style></head>\n<body>"
        f'<header><h1>kvpolicy: {escape(findings.name)}</h1>{about}<p class="soft">{counts}.</p></header>'
        f"<nav>{links}</nav>\n<main>{''.join(map(_section, parts))}</main></body></html>\n"
    )


def inline(text: str) -> str:
    """Text with `code` and **bold**, as HTML.

    Examples:
        >>> inline("`a<b` is **so**")
        '<code>a&lt;b</code> is <strong>so</strong>'
    """
    pieces = re.split(r"(`[^`]*`)", text)
    html = [f"<code>{escape(p[1:-1])}</code>" if p.startswith("`") and len(p) > 1 else escape(p) for p in pieces]
    return re.sub(r"\*\*(.+?)\*\*", r"<strong>\1</strong>", "".join(html))


def _section(section: Section) -> str:
    figures = "".join(f"<figure>{figure}</figure>" for figure in section.figures if figure)
    folded = "".join(
        f"<details><summary>{escape(name)}</summary><figure>{figure}</figure></details>"
        for name, figure in section.folded.items()
    )
    shown = "".join(_table(name, table) for name, table in section.tables.items() if table.rows)
    if figures and shown:
        shown = f"<details><summary>The numbers</summary>{shown}</details>"
    text = f"<p>{inline(section.text)}</p>" if section.text else ""
    return f'<section id="{section.key}"><h2>{escape(section.title)}</h2>{text}{figures}{folded}{shown}</section>\n'


def _table(name: str, table: Table) -> str:
    head = "".join(f"<th>{inline(cell)}</th>" for cell in table.head)
    rows = "".join("<tr>" + "".join(f"<td>{inline(cell)}</td>" for cell in row) + "</tr>" for row in table.rows)
    title = f"<h3>{escape(name)}</h3>" if name else ""
    return f'{title}<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
