"""The tokenizer of the model, for tasks whose prompts depend on it."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import kvpolicy
from kvpolicy.text.embedded_names import EMBEDDED


def tokenizer_of(tokenizer: Any = None, pretrained: Any = None, gguf_file: str | None = None) -> Any:
    """The tokenizer that the arguments of a model name, which is loaded once.

    Args:
        tokenizer: Name of the tokenizer; the model's by default.
        pretrained: Name of the model; an embedded one by default.
        gguf_file: File of the tokenizer, if it is in a GGUF file.
    """
    named = next((one for one in (tokenizer, pretrained) if isinstance(one, str)), EMBEDDED[0])
    return _load(named, gguf_file)


@functools.cache
def _load(name: str, gguf_file: str | None) -> Any:
    from transformers import AutoTokenizer

    place = str(Path(kvpolicy.__file__).parent / "assets" / name) if name in EMBEDDED else name
    return AutoTokenizer.from_pretrained(place, **({"gguf_file": gguf_file} if gguf_file else {}))
