"""Suppression of what libraries print while a sweep runs."""

from __future__ import annotations

import functools
import logging
import os
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
