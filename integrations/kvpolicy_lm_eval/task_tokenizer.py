"""The tokenizer of the model, for tasks whose prompts depend on it."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import kvpolicy
from kvpolicy.text.embedded_names import EMBEDDED

OF_TOKENIZER = (
    "tokenizer",
    "pretrained",
    "gguf_file",
    "revision",
    "subfolder",
    "trust_remote_code",
    "use_fast_tokenizer",
    "add_bos_token",
)
"""Arguments of lm-eval's model `hf` that say which tokenizer it has."""


def tokenizer_of(model: Mapping[str, Any]) -> Any:
    """The tokenizer that the arguments of a model name, which is loaded once, or the one that they contain.

    Args:
        model: The arguments; without `tokenizer` and `pretrained`, those of an embedded model.

    Examples:
        >>> tokenizer_of({"pretrained": "tiny-4k"}) is tokenizer_of({"pretrained": "tiny-4k", "revision": None})
        True
    """
    pretrained = model.get("pretrained")
    named = model.get("tokenizer") or getattr(pretrained, "name_or_path", pretrained) or EMBEDDED[0]
    if not isinstance(named, str):
        return named
    options = {name: model.get(name) for name in ("revision", "subfolder", "trust_remote_code", "add_bos_token")}
    if model.get("gguf_file") and not model.get("tokenizer"):
        options["gguf_file"] = model["gguf_file"]
    else:
        options["use_fast"] = model.get("use_fast_tokenizer")
    return _load(named, tuple(sorted((name, value) for name, value in options.items() if value is not None)))


@functools.cache
def _load(name: str, options: tuple[tuple[str, Any], ...]) -> Any:
    from transformers import AutoTokenizer

    place = str(Path(kvpolicy.__file__).parent / "assets" / name) if name in EMBEDDED else name
    return AutoTokenizer.from_pretrained(place, **dict(options))
