"""The peers' own environment: a virtual one, since kvpress needs an older transformers than ours."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

KVPRESS = "0.5.5"
PACKAGES = (f"kvpress=={KVPRESS}", "transformers==5.2.0", "optimum-quanto==0.2.7", "hqq==0.2.8.post1")
"""What is compared with; torch is the one at hand."""
WARM = "import torch, optimum.quanto, kvpress; torch.ops.quanto.unpack(torch.zeros(8, dtype=torch.uint8), 4)"
"""Lets quanto compile its extension now, and not within a measurement."""


def folder(given: str | Path | None = None) -> Path:
    """Where the environment is: as given, or in the user's cache."""
    if given is not None:
        return Path(given).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "kvpolicy" / "peers"


def python_of(environment: Path) -> Path:
    """Its interpreter."""
    return environment / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def find(given: str | Path | None = None) -> Path:
    """The interpreter of an environment that was made.

    Raises:
        ValueError: Where there is none.
    """
    python = python_of(folder(given))
    if not python.exists():
        raise ValueError(
            f"There is no environment of the peers in {folder(given)}: make one with "
            "`python -m kvpolicy_eval.peers make-env`, or name another with --env."
        )
    return python


def make(given: str | Path | None = None) -> Path:
    """Make the environment with pip, or complete it where it was begun.

    Raises:
        RuntimeError: Where it cannot be made.
    """
    place = folder(given)
    torch = version("torch").partition("+")[0]
    steps = [
        [sys.executable, "-m", "venv", str(place)],
        [str(python_of(place)), "-m", "pip", "install", "--quiet", f"torch=={torch}", *PACKAGES],
    ]
    steps.append([str(python_of(place)), "-c", WARM])
    for step in steps[1 if python_of(place).exists() else 0 :]:
        for lock in place.rglob("optimum/quanto/library/extensions/*/build/lock"):
            lock.unlink()  # left by a build that was killed, and waited for without end
        done = subprocess.run(step, check=False)
        if done.returncode:
            raise RuntimeError(f"The environment in {place} could not be made: `{' '.join(step)}` failed, see above.")
    return python_of(place)
