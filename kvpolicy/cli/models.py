"""Load the model that a command was given."""

from __future__ import annotations

import textwrap
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from kvpolicy.cli.words import TINY
from kvpolicy.spec.errors import KVPolicyError


def load(name: str, dtype: str = "auto", device: str = "", *, text: bool = True) -> tuple[Any, Any]:
    """Load a model and its tokenizer.

    Args:
        name: `tiny` for the embedded model, a folder, or a name on the hub.
        dtype: Of the weights; `auto` as they are stored, and float32 for the embedded model.
        device: Where to; empty for an accelerator if there is one.
        text: Whether a tokenizer is needed.

    Returns:
        The model, in evaluation mode, and its tokenizer, or None where none is needed.

    Raises:
        KVPolicyError: Where the dtype or the device is not known, there is no such model, or it is of another kind.
    """
    import torch

    from kvpolicy.hf.embedded import tiny

    kind: Any = "auto" if dtype == "auto" else dtype_of(dtype)
    where = _device(device)
    with _without_bars():
        if name == TINY:
            model, tokenizer = tiny(torch.float32 if kind == "auto" else kind)
        else:
            _check_name(name)
            model, tokenizer = _loaded(name, kind, text)
    return _moved(model, where), tokenizer


def dtype_of(name: str) -> Any:
    """Find a dtype that attention is computed in by its name.

    Raises:
        KVPolicyError: Where there is none.
    """
    import torch

    dtype = getattr(torch, name, None) if name.isidentifier() else None
    if dtype not in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        raise KVPolicyError(f"The dtype {name!r} is not known: give bfloat16, float16 or float32.")
    return dtype


def _device(name: str) -> str:
    """A device's name that torch can read; an accelerator, where there is one, for the empty name."""
    import torch

    if name:
        try:
            found = torch.device(name)
        except RuntimeError:
            raise KVPolicyError(f"The device {name!r} is not known: give one such as cpu, cuda or cuda:1.") from None
        if found.type == "meta":
            raise KVPolicyError("The device 'meta' holds no numbers: give one such as cpu, or ask kvpolicy plan.")
        return str(found)
    return str(torch.accelerator.current_accelerator() or "cpu") if torch.accelerator.is_available() else "cpu"


@contextmanager
def _without_bars() -> Generator[None, None, None]:
    """Without transformers' progress bars, which say nothing that a user of a command asked for."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _check_name(name: str) -> None:
    """Say before anything large is read that there is no such model, or only its config."""
    from kvpolicy.hf.embedded import SHIPPED, config_of

    if name in SHIPPED:
        raise KVPolicyError(
            f"The model {name!r} cannot be loaded: only its config ships, for kvpolicy plan and explain."
        )
    try:
        config_of(name)
    except ValueError as error:
        raise KVPolicyError(f"The model {name!r} cannot be loaded: {_short(error.__cause__ or error)}") from error


def _loaded(name: str, dtype: Any, text: bool) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    what = "tokenizer of the model"
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(name, trust_remote_code=False) if text else None
        what = "model"
        model: Any = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = _short(error)
        if reason.startswith("Unrecognized configuration class"):  # then all that there are follow
            reason = "it is no decoder-only causal language model."
        raise KVPolicyError(f"The {what} {name!r} cannot be loaded: {reason}") from error
    return model.eval(), tokenizer


def _short(error: BaseException) -> str:
    return textwrap.shorten(str(error) or type(error).__name__, 300, placeholder=" ...")


def _moved(model: Any, device: str) -> Any:
    try:
        return model.to(device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # torch has no one word for it
        first = str(error).strip().splitlines()[0]
        raise KVPolicyError(f"The device {device!r} cannot be used, give another such as cpu: {first}") from error
