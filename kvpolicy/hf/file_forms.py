"""Forms of cache files: objects that write the tensors of a cache in another way, and read them again.

A form is named in a spec, such as `kvtc:calibration=DIR:ratio=16`, or is handed over as an object. The header of a file
has the spec, so that whoever loads the file makes the same object.
"""

from __future__ import annotations

import importlib
from typing import Any, Protocol, cast, runtime_checkable

import torch

from kvpolicy.engine.host import outside_autocast
from kvpolicy.hf.attachment import Attachment
from kvpolicy.hf.cache_file import CacheFile
from kvpolicy.text.errors import KVPolicyError
from kvpolicy.text.grammar import first_name, parse_alone
from kvpolicy.text.tables import shorten

ZLIB = "zlib"
"""The form that a name alone stands for: codes without loss."""

FORMS = {"kvtc": "kvpolicy.hf.kvtc.form:KVTC"}
"""Module and class of each form with options."""


@runtime_checkable
class FileForm(Protocol):
    """A way to write the tensors of a cache to a file. `str` of a form is its spec."""

    def check(self, attachment: Attachment) -> None:
        """Refuse a model whose caches cannot be written so, before a text is read.

        Args:
            attachment: The attachment of the model.

        Raises:
            KVPolicyError: Naming the part of the model, or the option, that does not allow it.
        """
        ...

    def encode(self, content: CacheFile, attachment: Attachment) -> CacheFile:
        """The content as it is written, with an entry `form` in its header.

        Args:
            content: What a cache holds.
            attachment: The attachment of its model.

        Raises:
            KVPolicyError: Naming the part of the cache or of the model that does not allow it.
        """
        ...

    def decode(self, content: CacheFile, attachment: Attachment, device: torch.device, what: str) -> CacheFile:
        """The content that a cache is made from, from what was written.

        Args:
            content: What `encode` returned, on the CPU.
            attachment: The attachment of the model.
            device: Where to compute.
            what: The name of the file, for messages.

        Raises:
            KVPolicyError: If the content does not fit the model or the form.
        """
        ...


def form_of(compress: object) -> FileForm | None:
    """The form that `PolicyCache.save` is asked for; None for plain tensors and for codes in zlib.

    Raises:
        KVPolicyError: If it is unknown, or an option is wrong.
    """
    if compress is None or compress == ZLIB:
        return None
    if isinstance(compress, str) and (name := first_name(compress)) in FORMS:
        return _parsed(name, compress)
    # A file must be readable by whoever has kvpolicy alone.
    if isinstance(compress, FileForm) and first_name(str(compress)) in FORMS:
        return compress
    known = ", ".join([repr(ZLIB), *(f"'{name}:...'" for name in FORMS)])
    raise KVPolicyError(f"compress must be one of None, {known}, got {shorten(repr(compress))}; try 'zlib'.")


def decoded(content: CacheFile, attachment: Attachment, device: torch.device, what: str) -> CacheFile:
    """The content of a file as a cache is made from it, whatever its form is.

    Args:
        content: The content of the file, with a header that passed its checks.
        attachment: The attachment of the model.
        device: Where to compute.
        what: The name of the file, for messages.

    Raises:
        KVPolicyError: If the form is unknown, or see `FileForm.decode`.
    """
    told = content.header.get("form")
    if told is None:
        return content
    name = first_name(told["spec"])
    if name not in FORMS:
        raise KVPolicyError(
            f"The form of the cache file {what!r} must be one of {', '.join(FORMS)}, got {shorten(repr(name))}; update "
            "kvpolicy."
        )
    form = _parsed(name, told["spec"])
    with outside_autocast(device):
        return form.decode(content, attachment, device, what)


def _parsed(name: str, text: str) -> FileForm:
    module, _, kind = FORMS[name].partition(":")
    cls: type[Any] = getattr(importlib.import_module(module), kind)
    form, budget = parse_alone(name, cls, text)
    if budget is not None:
        raise KVPolicyError(f"The form of a file must have no budget, got {shorten(text)!r}; remove it.")
    return cast(FileForm, form)
