"""Error messages of the command line: one sentence for an error that the user can fix, a traceback for any other."""

from __future__ import annotations

import re

EXTRAS = {
    **dict.fromkeys(("accelerate", "huggingface_hub", "safetensors", "tokenizers", "transformers"), "hf"),
    **dict.fromkeys(("sklearn", "tqdm"), "calib"),
    **dict.fromkeys(("fastapi", "openai", "starlette", "uvicorn"), "serve"),
    **{"deepspeed": "deepspeed", "gguf": "gguf", "lm_eval": "lm-eval", "matplotlib": "plots"},
}
"""The extra of the package that installs each optional module."""

_OUT_OF_MEMORY = re.compile("(?i)out of memory|not enough memory|can't allocate memory")


def sentence(error: Exception) -> str:
    """Return the message to print for an error, on one line; an empty string for an internal error.

    The class of the error decides. A `KVPolicyError` is a `ValueError`; so are the errors by which transformers and
    PyTorch reject an argument. An `OSError` is about a file, an `ImportError` of an optional module about an extra. A
    `RuntimeError` is reported only if memory ran out, since PyTorch has no class of its own for it on the CPU.

    >>> sentence(ValueError("two  words"))
    'two words'
    >>> sentence(ModuleNotFoundError("No module named 'sklearn'", name="sklearn"))
    "No module named 'sklearn': pip install 'kvpolicy[calib]'."
    >>> sentence(TypeError("an internal error"))
    ''
    """
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, ValueError):
        return text
    if isinstance(error, OSError):
        return _file_message(error) or text
    if isinstance(error, ImportError):
        extra = EXTRAS.get((error.name or "").partition(".")[0])
        if extra is None:
            return ""
        return text if "pip install" in text else f"{text}: pip install 'kvpolicy[{extra}]'."
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and _OUT_OF_MEMORY.search(text)):
        return f"There is not enough memory: use fewer rows or tokens ({text[:200]})."
    return ""


def _file_message(error: OSError) -> str:
    """Return the message of an error of the operating system without its number; empty for other `OSError`s."""
    if not error.strerror:
        return ""
    place = f"{error.filename}: " if error.filename else ""
    return f"{place}{error.strerror}."
