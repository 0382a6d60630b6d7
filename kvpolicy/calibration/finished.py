"""A finished calibration is not replaced by another one, unless that is asked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvpolicy.codecs import _files
from kvpolicy.spec.errors import KVPolicyError


def check_free(out: str | Path, method: str, facts: dict[str, Any]) -> None:
    """Refuse a folder that holds a finished calibration of another kind, model or text, or with other options.

    A folder that holds none, a damaged one or the same one is free.

    Args:
        out: The folder.
        method: Which calibration is to be written.
        facts: What it will say of itself, as far as that is known before anything is learned.

    Raises:
        KVPolicyError: Where another one is there.
    """
    there = _files.written(Path(out))
    if there is None:
        return
    was, found = there
    others = ["method"] if was != method else _others(_flat(found.meta), _flat(json.loads(json.dumps(facts))))
    if others:
        raise KVPolicyError(
            f"The folder {str(out)!r} holds a finished calibration that differs in {', '.join(others)}: write to "
            "another folder, or replace it with --force (from Python, force=True)."
        )


def _flat(facts: dict[str, Any]) -> dict[str, Any]:
    """Facts by the names that users know; what a model is called makes it no other."""
    flat = {key: value for key, value in facts.items() if key not in ("options", "head_dim")} | facts.get("options", {})
    model = flat.get("model")
    flat["model"] = None if model is None else {key: value for key, value in model.items() if key != "name"}
    flat["text"] = flat.pop("text_sha256", None)
    return flat


def _others(was: dict[str, Any], will: dict[str, Any]) -> list[str]:
    return [name for name, value in will.items() if was.get(name) != value]
