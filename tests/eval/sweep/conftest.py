"""Runs small sweeps of the embedded model, without warnings."""

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
    """Ignore warnings, and leave the progress bars of libraries as they are, since that must not outlive a test."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setattr(command, "silence_libraries", lambda: None)
        yield


def file(folder: Path, **changes: Any) -> Path:
    """A config: `SMALL` with changes."""
    path = folder / "small.yaml"
    path.write_text(yaml.safe_dump(SMALL | changes), encoding="utf-8")
    return path


def sweep(path: Path, out: Path, *arguments: str) -> int:
    """Run a config; returns the exit code."""
    return cli.main(["sweep", str(path), "--out", str(out), *arguments])


@pytest.fixture
def quiet() -> Generator[None]:
    with quietly():
        yield
