"""Errors that the user can put right, in one sentence; others show where they are from."""

from __future__ import annotations

import linecache
import re
from types import TracebackType

EXTRAS = {
    **dict.fromkeys(("accelerate", "huggingface_hub", "safetensors", "tokenizers", "transformers"), "hf"),
    **dict.fromkeys(("sklearn", "tqdm"), "calib"),
    **{"deepspeed": "deepspeed", "lm_eval": "lm-eval", "matplotlib": "plots"},
}
"""Which extra of the package brings a module that may be missing."""


_FULL = re.compile("(?i)out of memory|not enough memory|can't allocate memory")


def sentence(error: Exception) -> str:
    """What to tell a user of an error, in one line; the empty string where it is no error of theirs.

    A ValueError and an OSError are about what was given. Others are too where kvpolicy itself raised them, and where
    memory ran out; a TypeError from anywhere else is a bug.

    >>> sentence(ValueError("two  words"))
    'two words'
    >>> sentence(ModuleNotFoundError("No module named 'sklearn'", name="sklearn"))
    "No module named 'sklearn': pip install 'kvpolicy[calib]'."
    >>> sentence(TypeError("from anywhere"))
    ''
    """
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, ImportError) and (extra := EXTRAS.get((error.name or "").partition(".")[0])):
        return text if "pip install" in text else f"{text}: pip install 'kvpolicy[{extra}]'."
    if isinstance(error, OSError):
        return _of_file(error) or text
    if isinstance(error, ValueError):
        return text
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and _FULL.search(text)):
        return f"There is not enough memory: give fewer rows or tokens ({text[:200]})."
    return text if isinstance(error, TypeError | ImportError) and _raised_here(error.__traceback__) else ""


def _of_file(error: OSError) -> str:
    """Python's own errors of files, without their number."""
    place = f"{error.filename}: " if error.filename else ""
    return f"{place}{error.strerror}." if error.strerror else ""


def _raised_here(trace: TracebackType | None) -> bool:
    """Whether a line of kvpolicy says `raise`, so that somebody has thought of the case."""
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None or not str(trace.tb_frame.f_globals.get("__name__", "")).startswith("kvpolicy"):
        return False
    return linecache.getline(trace.tb_frame.f_code.co_filename, trace.tb_lineno).lstrip().startswith("raise ")
