"""Marked places in files, whose content is generated.

In Markdown, a place is `<!-- generated:NAME -->...<!-- /generated -->`, which may stand inside a line. In Python and
YAML, it begins with the line `# generated: NAME` and ends with the line `# /generated`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from kvpolicy.text.formats import replace_file


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """A place and what must stand in it.

    Attributes:
        path: The file, relative to the root of the source tree.
        name: The name of the place.
        text: Its content: for Python and YAML whole lines, for Markdown everything between the two comments.
    """

    path: str
    name: str
    text: str

    def updated(self, root: Path) -> str:
        """The whole file with this content.

        Raises:
            ValueError: If the file has no such place.
        """
        content = (root / self.path).read_text(encoding="utf-8")
        pattern = _pattern(self.path, self.name)
        if not pattern.search(content):
            raise ValueError(f"{self.path} has no place for {self.name}; see kvpolicy_eval.catalog.places.")
        # A function as replacement: in a replacement string, backslashes of the text would be read as escapes.
        return pattern.sub(lambda match: f"{match[1]}{self.text}{match[2]}", content)

    def is_current(self, root: Path) -> bool:
        """Whether the file already has this content."""
        return self.updated(root) == (root / self.path).read_text(encoding="utf-8")

    def write(self, root: Path) -> None:
        """Put the content into the file."""
        replace_file(root / self.path, self.updated(root).encode())


def _pattern(path: str, name: str) -> re.Pattern[str]:
    if path.endswith(".md"):
        return re.compile(rf"(<!-- generated:{re.escape(name)} -->).*?(<!-- /generated -->)", re.DOTALL)
    return re.compile(rf"(^ *# generated: {re.escape(name)}\n).*?(^ *# /generated$)", re.DOTALL | re.MULTILINE)
