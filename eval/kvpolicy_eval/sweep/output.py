"""Suppression of what libraries print while a sweep runs."""

from __future__ import annotations

import functools
import logging
import os
import subprocess
import warnings
from typing import Any


def silence_libraries() -> None:
    """Suppress progress bars, warnings and log messages of libraries; errors are recorded with their cells."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    _disable_progress_bars()


@functools.cache  # a second call must not wrap the constructor again
def _disable_progress_bars() -> None:
    from tqdm import tqdm

    bar_class: Any = tqdm
    original = bar_class.__init__

    def disabled(bar: Any, *args: Any, **kwargs: Any) -> None:
        original(bar, *args, **kwargs | {"disable": True})

    # lm-eval passes disable=False, which takes precedence over the variable TQDM_DISABLE.
    bar_class.__init__ = disabled


def quiet_git(evaluator: Any) -> None:
    """Let lm-eval ask git once for the commit, without git's error message where there is no repository.

    Args:
        evaluator: The module `lm_eval.evaluator`.
    """
    if hasattr(evaluator, "get_git_commit_hash"):
        evaluator.get_git_commit_hash = _commit


@functools.cache
def _commit() -> str | None:
    """The commit of the working folder; None if there is no repository, or no git."""
    try:
        done = subprocess.run(["git", "describe", "--always"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
