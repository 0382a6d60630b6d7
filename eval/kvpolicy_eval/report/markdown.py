"""The report as Markdown: the text and the tables of every section."""

from __future__ import annotations

from pathlib import Path

from kvpolicy_eval.common.markdown import fill, has_place, table
from kvpolicy_eval.report.gather import Findings
from kvpolicy_eval.report.sections import Section, sections


def markdown(findings: Findings) -> str:
    """The complete report."""
    parts = [f"# kvpolicy: {findings.name}", findings.about]
    for section in sections(findings, draw=False):
        parts += [f"## {section.title}", section.text, body(section)]
    return "\n\n".join(part for part in parts if part) + "\n"


def body(section: Section) -> str:
    """The tables of a section, with headings if there are several."""
    shown = {name: content for name, content in section.tables.items() if content.rows}
    blocks = [
        (f"### {name}\n\n" if name and len(shown) > 1 else "") + table(content.head, content.rows)
        for name, content in shown.items()
    ]
    return "\n\n".join(blocks)


def fill_sections(page: Path, findings: Findings) -> None:
    """Fill the places of a page that are named after the sweep and a section, such as `squeeze-bytes`.

    Raises:
        ValueError: If the page has no place for any section.
    """
    by_place = {f"{findings.name}-{section.key}": section for section in sections(findings, draw=False)}
    places = [name for name in by_place if has_place(page, name)]
    if not places:
        raise ValueError(
            f"{page} has no place for {findings.name}; add the lines '<!-- table:{findings.name}-bytes -->' and "
            "'<!-- /table -->'."
        )
    for name in places:
        fill(page, name, body(by_place[name]))
