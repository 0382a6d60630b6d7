"""Loading of the model and the tokenizer that a command is given."""

from __future__ import annotations

import difflib
import textwrap
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from kvpolicy.text.embedded_names import EMBEDDED
from kvpolicy.text.errors import KVPolicyError

DTYPES = ("bfloat16", "float16", "float32", "float64")
"""The dtypes in which attention can be computed."""

SHORT = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"}
"""Other names of dtypes, as configs of training and users write them."""


def load(name: str, dtype: str = "auto", device: str = "", *, text: bool = True) -> tuple[Any, Any]:
    """Load a model and its tokenizer.

    Args:
        name: `tiny` for the embedded model, a folder, a GGUF file, or a model name on the Hub.
        dtype: The dtype of the weights; `auto` for that of the checkpoint, or float32 for the embedded model.
        device: The device; an empty string for an accelerator if one is available.
        text: Whether to load the tokenizer.

    Returns:
        The model in evaluation mode, and its tokenizer or None.

    Raises:
        KVPolicyError: If the dtype or the device is unknown, or the model cannot be loaded.
    """
    import torch

    from kvpolicy.hf.embedded import tiny

    weight_dtype: Any = "auto" if dtype == "auto" else dtype_of(dtype)
    target = _device(device)
    with _progress_bars_disabled():
        if name in EMBEDDED:
            model, tokenizer = tiny(torch.float32 if weight_dtype == "auto" else weight_dtype, name=name)
        else:
            _check_name(name)
            model, tokenizer = _load_pretrained(name, weight_dtype, text)
    return _move(model, target), tokenizer


def dtype_of(name: str) -> Any:
    """Return the dtype of a name, such as `bfloat16` or `bf16`.

    Raises:
        KVPolicyError: If it is unknown, or attention cannot be computed in it.
    """
    import torch

    word = name.strip().lower().removeprefix("torch.")
    word = SHORT.get(word, word)
    dtype = getattr(torch, word, None) if word.isidentifier() else None
    if dtype not in [getattr(torch, known) for known in DTYPES]:
        raise KVPolicyError(f"--dtype must be one of {', '.join(DTYPES)}, got {name!r}; try bfloat16.")
    return dtype


def _device(name: str) -> str:
    """Check the name of a device; replace an empty one by the accelerator, or by the CPU if there is none."""
    import torch

    if not name:
        return str(torch.accelerator.current_accelerator() or "cpu") if torch.accelerator.is_available() else "cpu"
    try:
        found = torch.device(name)
    except RuntimeError:
        raise KVPolicyError(f"--device must be a device of PyTorch, got {name!r}; try cpu, cuda or cuda:1.") from None
    if found.type == "meta":
        raise KVPolicyError(
            "--device must be a device that stores numbers, got 'meta'; try cpu, or kvpolicy plan, which loads no "
            "weights."
        )
    return str(found)


@contextmanager
def _progress_bars_disabled() -> Generator[None, None, None]:
    """Disable the progress bars of transformers, which would mix with the output."""
    from transformers.utils import logging

    enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            logging.enable_progress_bar()


def _check_name(name: str) -> None:
    """Raise KVPolicyError if there is no such model or only its config, before anything large is read."""
    from kvpolicy.hf.embedded import SHIPPED, config_of

    if name in SHIPPED:
        raise KVPolicyError(
            f"The model {name!r} cannot be loaded, because only its config ships; try kvpolicy plan {name}."
        )
    try:
        config_of(name)
    except ValueError as error:
        reason = _shorten(error.__cause__ or error)
        similar = difflib.get_close_matches(name, EMBEDDED, 1, 0.75)
        if similar:
            reason = f"{reason.rstrip('.')}; did you mean {similar[0]!r}?"
        raise KVPolicyError(f"The model {name!r} cannot be loaded: {reason}") from error


def _load_pretrained(name: str, dtype: Any, text: bool) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from kvpolicy.hf.embedded import checkpoint_of

    where, options = checkpoint_of(name)
    how: dict[str, Any] = {"trust_remote_code": False, **options}
    loading = "tokenizer of the model"
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(where, **how) if text else None
        loading = "model"
        model: Any = AutoModelForCausalLM.from_pretrained(where, dtype=dtype, **how)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = _shorten(error)
        if reason.startswith("Unrecognized configuration class"):  # the message lists every class of transformers
            reason = "only decoder-only causal language models are supported."
        raise KVPolicyError(f"The {loading} {name!r} cannot be loaded: {reason}") from error
    # Checkpoints that were saved in training with `use_cache: false` would generate without the policy.
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.use_cache = True
    return model.eval(), tokenizer


def _shorten(error: BaseException) -> str:
    return textwrap.shorten(str(error) or type(error).__name__, 300, placeholder=" ...")


def _move(model: Any, device: str) -> Any:
    try:
        return model.to(device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # PyTorch raises any of them
        reason = str(error).strip().splitlines()[0]
        raise KVPolicyError(f"The device {device!r} cannot be used ({reason}); try cpu.") from error
