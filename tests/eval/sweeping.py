"""Runs small sweeps of the embedded model, for the tests of what sweeps do."""

from __future__ import annotations

import warnings
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvpolicy_eval import cli
from kvpolicy_eval.sweep import command

SMALL = {"policies": ["full"], "tasks": ["kvpolicy_fewshot"], "limit": 1, "probes": 0}


@contextmanager
def quietly() -> Generator[None]:
    """Libraries warn a lot, and what hides bars and notes elsewhere must not outlive a test."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setattr(command, "quiet", lambda: None)
        yield


def file(folder: Path, **changes: Any) -> Path:
    """A config: `SMALL` with changes."""
    place = folder / "small.yaml"
    place.write_text(yaml.safe_dump(SMALL | changes), encoding="utf-8")
    return place


def sweep(place: Path, out: Path, *words: str) -> int:
    """Run it; the exit code."""
    return cli.main(["sweep", str(place), "--out", str(out), *words])
