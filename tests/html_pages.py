"""Pages of HTML, as tests read them."""

from __future__ import annotations

from collections import Counter
from html.parser import HTMLParser

VOID = ("meta", "br", "hr", "img", "input", "link")
"""Tags that are not closed."""


class Page(HTMLParser):
    """The tags of a page, each of which must be closed, what it refers to, its tables and its marked spans.

    Attributes:
        tags: How often each tag occurs.
        ids: Ids in their order.
        refers: What it loads or links to.
        tables: The cells of the rows of each table.
        spans: Attributes of spans with the attribute `data-k`.
        shown: The text of these spans.
    """

    def __init__(self, text: str) -> None:
        """Read the page."""
        super().__init__()
        self.tags = Counter[str]()
        self.ids: list[str] = []
        self.refers: list[str] = []
        self.tables: list[list[list[str]]] = []
        self.spans: list[dict[str, str]] = []
        self.shown = ""
        self._open: list[tuple[str, bool]] = []
        self.feed(text)
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.tags[tag] += 1
        self.ids += [found["id"]] if "id" in found else []
        names = ("href", "src", "xlink:href", "action", "data", "srcset")
        self.refers += [found[name] for name in names if found.get(name)]
        if tag not in VOID:
            self._open.append((tag, "data-k" in found))
        if "data-k" in found:
            self.spans.append(found)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop()[0] == tag, f"</{tag}> closes another tag"

    def handle_data(self, data: str) -> None:
        tag, is_marked = self._open[-1] if self._open else ("", False)
        self.shown += data if is_marked else ""
        if tag in ("td", "th"):
            self.tables[-1][-1][-1] += data
