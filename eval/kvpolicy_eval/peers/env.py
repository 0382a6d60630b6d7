"""The virtual environment of the peers: kvpress needs an older transformers than kvpolicy does."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from kvpolicy.text.output import check_new_folder

KVPRESS = "0.5.5"
QUANTIZERS = ("optimum-quanto==0.2.7", "hqq==0.2.8.post1")
"""Packages of QuantizedCache's backends, which the running environment may have too."""
PACKAGES = (f"kvpress=={KVPRESS}", "transformers==5.2.0", *QUANTIZERS)
"""Packages of the environment, in addition to the torch of this one."""
WARM_UP = "import torch, optimum.quanto, kvpress; torch.ops.quanto.unpack(torch.zeros(8, dtype=torch.uint8), 4)"
"""Makes quanto compile its extension now, and not during a measurement."""


def folder(given: str | Path | None = None) -> Path:
    """Folder of the environment: the given one, or one in the user's cache."""
    if given is not None:
        return Path(given).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "kvpolicy" / "peers"


def python_of(environment: Path) -> Path:
    """Interpreter of an environment."""
    return environment / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def find(given: str | Path | None = None) -> Path:
    """Interpreter of an existing environment.

    Raises:
        ValueError: If the environment does not exist.
    """
    python = python_of(folder(given))
    if not python.exists():
        raise ValueError(
            f"There is no environment of the peers in {folder(given)}; create one with "
            "`python -m kvpolicy_eval.peers make-env`, or give another with --env."
        )
    return python


def make(given: str | Path | None = None) -> Path:
    """Create the environment with pip, or complete one that was interrupted.

    Returns:
        Its interpreter.

    Raises:
        RuntimeError: If a step fails.
        ValueError: If the folder has something else in it.
    """
    environment = folder(given)
    check_new_folder(environment, "pyvenv.cfg")
    python = python_of(environment)
    torch = version("torch").partition("+")[0]
    steps = [
        [sys.executable, "-m", "venv", str(environment)],
        [str(python), "-m", "pip", "install", "--quiet", f"torch=={torch}", *PACKAGES],
        [str(python), "-c", WARM_UP],
    ]
    for step in steps[1 if python.exists() else 0 :]:
        for lock in environment.rglob("optimum/quanto/library/extensions/*/build/lock"):
            lock.unlink()  # a build that was killed leaves its lock, and the next one would wait for it forever
        if subprocess.run(step, check=False).returncode:
            raise RuntimeError(
                f"The environment in {environment} could not be created: `{' '.join(step)}` failed, see its output."
            )
    return python
