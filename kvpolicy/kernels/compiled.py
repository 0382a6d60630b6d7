"""Functions that are compiled once and called from eager code, where most models run.

A function is compiled when it is first called with enough slots, for its options and for the shapes and dtypes that its
loops depend on. Each of these has a code object of its own: after a few compilations of one, `torch.compile` would run
it uncompiled, with a warning only. Within a step that is compiled as a whole, the plain function is traced, so that it
fuses with what is around it.
"""

from __future__ import annotations

import logging
import os
import shutil
import threading
import time
import warnings
from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode  # pyright: ignore[reportPrivateUsage]

F = TypeVar("F", bound=Callable[..., Tensor])
T = TypeVar("T")

SWITCH = "KVPOLICY_KERNELS"
"""The environment variable that switches compiled functions off if it is 0."""

MIN_SLOTS = 2048
"""Slots or tokens of a head in all rows from which a compilation pays: with fewer, a step has slower parts."""

SLOW_COMPILATION = 2.0
"""Seconds from which a compilation is logged with its duration."""

HAS_WIDE_VECTORS = torch.backends.cpu.get_cpu_capability().startswith("AVX512")
"""Whether inductor (torch 2.13) converts bytes as fast as it multiplies them.

With AVX2 it converts them slowly, and codes of 8 bits, of which each is a byte, take less time decoded in eager mode.
"""

BACKEND = "inductor"
"""The backend of `torch.compile`."""

INDUCTOR_OPTIONS: dict[str, Any] = {
    "realize_opcount_threshold": 1000,
    "realize_reads_threshold": 1000,
    "realize_acc_reads_threshold": 1000,
}
"""Decoding stays in the loop that sums, however long it is; by default, its result would be written to memory."""

_LOG = logging.getLogger(__name__)
_LOCK = threading.RLock()
_compiled: dict[tuple[Any, ...], Callable[..., Any]] = {}
_apart: dict[str, Callable[..., Tensor]] = {}


_is_on = os.environ.get(SWITCH, "1") != "0"
_failures: list[str] = []


@cache
def _has_compiler() -> bool:
    # As inductor looks for one, without importing it: a process that compiles nothing need not pay for that.
    found = any(map(shutil.which, (os.environ.get("CXX", "g++"), "g++", "clang++")))
    if not found:
        _LOG.warning("No C++ compiler was found: codes are decoded before they are read, which is slower; try g++.")
    return found


def obstacle() -> str:
    """Reason why functions are not compiled on a CPU, as a clause; empty if they are."""
    if not _is_on:
        return f"{SWITCH} is 0"
    if _failures:
        return _failures[0]
    return "" if _has_compiler() else "no C++ compiler was found"


def is_compiled(t: Tensor, slots: int | None = None) -> bool:
    """Whether a compiled function reads a tensor of slots, or of tokens, [B, H, C, ...]; its first call compiles it.

    On a CPU only, since nothing else was measured. It depends on the numbers of rows and slots alone, so that two runs
    of one batch give the same numbers.

    Args:
        t: A tensor.
        slots: Slots of a head in all rows if `t` has pages of slots and not heads; B * C by default.
    """
    if (t.shape[0] * t.shape[2] if slots is None else slots) < MIN_SLOTS or t.device.type != "cpu":
        return False
    if torch.compiler.is_compiling():
        return _is_on
    # Under a mode that sees every operation, such as a counter of FLOPs, `torch.compile` runs functions uncompiled.
    return not obstacle() and _get_current_dispatch_mode() is None


def call(function: Callable[..., T], *tensors: Tensor, **options: Any) -> T:
    """Call a function that is compiled for its options and for the shapes of its tensors without rows and slots.

    Args:
        function: A plain function of tensors [B, H, C or another number, ...] and options; it returns tensors.
        *tensors: Its tensors.
        **options: Its options; integers, and also strings if the function is not marked by `apart`.
    """
    if torch.compiler.is_compiling():
        name = function.__name__
        if _apart.get(name) is function:
            return torch.ops.kvpolicy.apart(name, tensors, ",".join(options), list(options.values()))
        return function(*tensors, **options)
    # Rows and slots may vary: the second number of either makes `torch.compile` generate code for any number.
    shapes = tuple((t.dtype, t.shape[1], t.shape[3:] if t.dim() > 3 else ()) for t in tensors)
    key = (function, tuple(options.items()), shapes)
    # Every gradient mode and autocast would be compiled for anew, and so would two threads at once.
    with _LOCK, torch.no_grad(), torch.autocast(tensors[0].device.type, enabled=False), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of PyTorch's own, which are errors where a program makes them so
        try:
            kernel = _compiled.get(key)
            return _first_call(key, function, tensors, options) if kernel is None else kernel(*tensors)
        except Exception as error:  # a compiler that is there may not work, and the plain function always does
            _failures.append(f"{function.__name__} could not be compiled")
            _LOG.warning("%s: codes are decoded before they are read (%s).", _failures[0], error)
            return function(*tensors, **options)


def _first_call(
    key: tuple[Any, ...], function: Callable[..., T], tensors: tuple[Tensor, ...], options: dict[str, Any]
) -> T:
    """Compile a function, call it, and say so if it takes long."""
    _LOG.info("Compiling %s for %s, once for such a cache; %s=0 reads without.", function.__name__, options, SWITCH)
    begun = time.perf_counter()
    own = INDUCTOR_OPTIONS if BACKEND == "inductor" else None
    kernel: Callable[..., Any] = torch.compile(_copy(function, options), backend=BACKEND, options=own)
    out = kernel(*tensors)
    _compiled[key] = kernel
    seconds = time.perf_counter() - begun
    if seconds >= SLOW_COMPILATION:
        _LOG.warning(
            "Compiled %s for %s in %.1f s, once for such a cache; later processes start from the cache on disk.",
            function.__name__,
            options,
            seconds,
        )
    return out


def apart(function: F) -> F:
    """Mark a function that decodes so much that a step that is compiled as a whole calls it as one operation.

    Traced, it would be compiled with the options of the step, which are not `INDUCTOR_OPTIONS`. Names are unique.
    """
    assert function.__name__ not in _apart
    _apart[function.__name__] = function
    return function


@torch.library.custom_op("kvpolicy::apart", mutates_args=())
def _call_apart(name: str, tensors: list[Tensor], options: str, values: list[int]) -> Tensor:
    return call(_apart[name], *tensors, **dict(zip(options.split(","), values, strict=True)))


@_call_apart.register_fake
def _(name: str, tensors: list[Tensor], options: str, values: list[int]) -> Tensor:
    out = _apart[name](*tensors, **dict(zip(options.split(","), values, strict=True)))
    return out.new_empty(out.shape)


def widen(t: Tensor) -> Tensor:
    """A small tensor in fp32, written to memory before the loop that reads it, also in compiled code."""
    if t.dtype == torch.float32:
        return t
    return torch.ops.kvpolicy.widen(t) if torch.compiler.is_compiling() else t.float()


@torch.library.custom_op("kvpolicy::widen", mutates_args=())
def _widen(t: Tensor) -> Tensor:
    return t.float()


@_widen.register_fake
def _(t: Tensor) -> Tensor:
    return t.new_empty(t.shape, dtype=torch.float32)


def _copy(function: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    """A function of tensors alone with the options given, and a code object of its own."""
    assert isinstance(function, FunctionType)
    code = function.__code__.replace(co_name=f"{function.__name__}_{len(_compiled)}")
    own = FunctionType(code, function.__globals__, code.co_name, function.__defaults__, function.__closure__)

    def kernel(*tensors: Tensor) -> Any:
        return own(*tensors, **options)

    # A frame of `kernel` is what dynamo compiles, and all of these frames would share its code object.
    return FunctionType(
        kernel.__code__.replace(co_name=code.co_name), kernel.__globals__, code.co_name, None, kernel.__closure__
    )
