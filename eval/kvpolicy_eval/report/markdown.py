"""The report as Markdown: every section's text and tables."""

from __future__ import annotations

from pathlib import Path

from kvpolicy_eval.markdown import fill, table
from kvpolicy_eval.report.gather import Findings
from kvpolicy_eval.report.sections import Section, sections


def markdown(findings: Findings) -> str:
    """The whole report."""
    parts = [f"# kvpolicy: {findings.name}", findings.about]
    for section in sections(findings, draw=False):
        parts += [f"## {section.title}", section.text, body(section)]
    return "\n\n".join(part for part in parts if part) + "\n"


def body(section: Section) -> str:
    """A section's tables; each has a heading where there are several."""
    shown = {name: table_ for name, table_ in section.tables.items() if table_.rows}
    blocks = [
        (f"### {name}\n\n" if name and len(shown) > 1 else "") + table(one.head, one.rows)
        for name, one in shown.items()
    ]
    return "\n\n".join(blocks)


def fill_sections(page: Path, findings: Findings) -> None:
    """Put tables into a page's places, named after the sweep and the section, such as `squeeze-bytes`.

    Raises:
        ValueError: Where the page has no place for any section.
    """
    content, filled = page.read_text(encoding="utf-8"), False
    for section in sections(findings, draw=False):
        name = f"{findings.name}-{section.key}"
        if f"<!-- table:{name} -->" in content:
            fill(page, name, body(section))
            filled = True
    if not filled:
        raise ValueError(
            f"{page} has no place for {findings.name}: add lines such as <!-- table:{findings.name}-bytes -->."
        )
