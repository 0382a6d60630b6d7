"""The help of commands: as wide as the terminal, with whole summaries."""

from __future__ import annotations

import inspect
from typing import Any

from typer.core import TyperGroup

WIDEST = 120
"""The most columns of a help, as of other output."""

CONTEXT: dict[str, Any] = {"help_option_names": ["-h", "--help"], "max_content_width": WIDEST}
"""The settings of every group of commands."""


class Group(TyperGroup):
    """A group of commands whose summaries are wrapped in the list of commands, and not cut."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the list of commands."""
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        rows = [(name, _summary(command)) for name, command in commands if command is not None and not command.hidden]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


def _summary(command: Any) -> str:
    """The first paragraph of the help of a command."""
    return " ".join(inspect.cleandoc(command.help or "").split("\n\n")[0].split())
