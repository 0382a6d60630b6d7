"""The file in a sweep's folder that records with which settings its cells were measured."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any

from kvpolicy.text.formats import stamp
from kvpolicy_eval.sweep.cells import FORMAT, NOTES, Store, load_json, write
from kvpolicy_eval.sweep.config import Config

TABLES = ("table.csv", "table.jsonl")
"""Files of a sweep's folder, which are written at the end of each run."""


def check_settings(folder: Path, config: Config) -> None:
    """Refuse to mix cells that were measured with different settings, unless no cell is done yet.

    Raises:
        ValueError: If the folder has results with other settings, or a file that no sweep wrote would be replaced.
    """
    notes = folder / NOTES
    if foreign := [name for name in TABLES if (folder / name).exists() and not notes.is_file()]:
        raise ValueError(f"{folder} must be absent, or the folder of a sweep, got {foreign[0]}; give another --out.")
    recorded = load_json(notes)["settings"] if notes.is_file() else {}
    if not Store(folder).holds_results():
        return
    current = json.loads(json.dumps(config.settings()))  # as it would be read from the file
    for key, value in current.items():
        old = recorded.get(key, value)
        if key == "models":  # models may be added; those of both must agree
            common = [name for name in value if name in old]
            value = {name: value[name] for name in common}
            old = {name: old[name] for name in common}
        if old != value:
            raise ValueError(
                f"{folder} holds results with {key} {json.dumps(old)}, but the config has {json.dumps(value)}; "
                "give another --out, or remove the folder."
            )


def write_settings(folder: Path, config: Config) -> None:
    """Write the settings, the config, and the command in addition to those of earlier runs."""
    path = folder / NOTES
    before: dict[str, Any] = load_json(path) if path.is_file() else {}
    launched = "ACCELERATE_MIXED_PRECISION" in os.environ
    program = "accelerate launch -m kvpolicy_eval.cli" if launched else "kvpolicy-eval"
    command = f"{program} {shlex.join(sys.argv[1:])}"
    commands = list(dict.fromkeys([*before.get("commands", []), command]))
    settings = config.settings()
    settings["models"] = before.get("settings", {}).get("models", {}) | settings["models"]
    content = stamp(FORMAT) | {"settings": settings, "config": dataclasses.asdict(config), "commands": commands}
    write(path, json.dumps(content, indent=1))
