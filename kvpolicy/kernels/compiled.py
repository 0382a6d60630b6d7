"""Functions that are compiled once and called from eager code, where most models run.

A function is compiled when it is first called with enough slots, for its options and for the shapes and dtypes that its
loops depend on. Each of these has a code object of its own: after a few compilations of one, `torch.compile` would run
it uncompiled, with a warning only. Within a step that is compiled as a whole, the plain function is traced, so that it
fuses with what is around it, unless it is marked by `apart`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import threading
import time
import warnings
from collections.abc import Callable, Generator, Mapping
from functools import cache
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode  # pyright: ignore[reportPrivateUsage]
from torch.utils._triton import has_triton

F = TypeVar("F", bound=Callable[..., Tensor])
T = TypeVar("T")

SWITCH = "KVPOLICY_KERNELS"
"""The environment variable that switches compiled functions off if it is 0."""

DEVICES = ("cpu", "cuda")
"""Types of devices on which functions are compiled."""

MIN_SLOTS = 2048
"""Slots or tokens of a head in all rows from which a compilation pays: with fewer, a step has slower parts."""

MANY = 64
"""A size from which a dimension that is not the last one is one of slots, or of groups of slots."""

MOST_GRAPHS = 64
"""How often a function may be compiled, as for strides or for one row; beyond it, the log says that codes are decoded.

With the limit of PyTorch, 8, it would run uncompiled after that, many times as slow as decoding.
"""

SLOW_COMPILATION = 2.0
"""Seconds from which a compilation is logged with its duration."""

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


@contextlib.contextmanager
def switched(on: bool) -> Generator[None]:
    """Switch compiled functions on or off, as `KVPOLICY_KERNELS` does."""
    global _is_on
    before = _is_on
    _is_on = on
    try:
        yield
    finally:
        _is_on = before


@cache
def _missing_compiler(device: str) -> str:
    """The compiler that inductor needs on a type of device, if it is not there; logged once."""
    if device == "cuda":
        missing = "" if has_triton() else "Triton"
    else:  # as inductor looks for one, without importing it: a process that compiles nothing need not pay for that
        found = any(map(shutil.which, (os.environ.get("CXX", "g++"), "g++", "clang++")))
        missing = "" if found else "C++ compiler"
    if missing:
        _LOG.warning("No %s was found: codes are decoded before they are read, which is slower.", missing)
    return missing


@cache
def _kernels(device: str) -> Mapping[str, Callable[..., Any]]:
    """Functions that stand for others on a type of device, by their names; what one returns None for is compiled."""
    if device != "cuda":
        return {}
    from kvpolicy.kernels import gpu_reads  # needs Triton

    return gpu_reads.READS


def obstacle(device: str = "cpu") -> str:
    """Reason why functions are not compiled on a type of device, as a clause; empty if they are."""
    if device not in DEVICES:
        return f"nothing is compiled on {device}"
    if not _is_on:
        return f"{SWITCH} is 0"
    if _failures:
        return _failures[0]
    missing = _missing_compiler(device)
    return f"no {missing} was found" if missing else ""


def is_compiled(t: Tensor, slots: int | None = None) -> bool:
    """Whether a compiled function reads a tensor of slots, or of tokens, [B, H, C, ...]; its first call compiles it.

    It depends on the numbers of rows and slots alone, so that two runs of one batch give the same numbers.

    Args:
        t: A tensor.
        slots: Slots of a head in all rows if `t` has pages of slots and not heads; B * C by default.
    """
    if (t.shape[0] * t.shape[2] if slots is None else slots) < MIN_SLOTS or t.device.type not in DEVICES:
        return False
    if torch.compiler.is_compiling():
        return _is_on
    # Under a mode that sees every operation, such as a counter of FLOPs, `torch.compile` runs functions uncompiled.
    return not obstacle(t.device.type) and _get_current_dispatch_mode() is None


def call(function: Callable[..., T], *tensors: Tensor, **options: Any) -> T:
    """Call a function that is compiled for its options and for the shapes of its tensors without rows and slots.

    Args:
        function: A plain function of tensors [B, H, C or another number, ...] and options; it returns tensors.
        *tensors: Its tensors. On a CPU, those of fp16 are widened before the call.
        **options: Its options; integers, and also strings if the function is not marked by `apart`.
    """
    tensors = tuple(widen_on_cpu(t) if t.dtype == torch.float16 else t for t in tensors)
    if torch.compiler.is_compiling():
        name = function.__name__
        if _apart.get(name) is function:
            return torch.ops.kvpolicy.apart(name, tensors, ",".join(options), list(options.values()))
        return function(*tensors, **options)
    # Rows may vary, too: the second number of them makes `torch.compile` generate code for any number.
    shapes = tuple((t.dtype, t.shape[1], t.shape[3:] if t.dim() > 3 else ()) for t in tensors)
    key = (function, tensors[0].device, tuple(options.items()), shapes)
    # Every mode and autocast would be compiled for anew, and so would two threads at once.
    with (
        _LOCK,
        torch.inference_mode(False),
        torch.no_grad(),
        torch.autocast(tensors[0].device.type, enabled=False),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # of PyTorch's own, which are errors where a program makes them so
        try:
            tensors = tuple(map(_ordinary, tensors))
            by_hand = _kernels(tensors[0].device.type).get(function.__name__)
            done = None if by_hand is None else by_hand(*tensors, **options)
            if done is not None:
                return done
            kernel = _compiled.get(key)
            return _first_call(key, function, tensors, options) if kernel is None else kernel(*tensors)
        except Exception as error:  # a compiler that is there may not work, and the plain function always does
            _failures.append(f"{function.__name__} could not be compiled")
            _LOG.warning("%s: codes are decoded before they are read (%s).", _failures[0], error)
            return function(*tensors, **options)


def _options_of(device: str) -> dict[str, Any] | None:
    """Options of the compilation for a type of device."""
    if BACKEND != "inductor":
        return None
    if device != "cpu":
        return INDUCTOR_OPTIONS
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    # In torch 2.13, the key of inductor's cache on disk has the options, and not the vectors of the processor: where
    # machines share the folder, code that was generated for others would give wrong numbers and write out of bounds.
    return INDUCTOR_OPTIONS | {"cpp.simdlen": pick_vec_isa().bit_width()}


def _first_call(
    key: tuple[Any, ...], function: Callable[..., T], tensors: tuple[Tensor, ...], options: dict[str, Any]
) -> T:
    """Compile a function, call it, and say so if it takes long."""
    _LOG.info("Compiling %s for %s, once for such a cache; %s=0 reads without.", function.__name__, options, SWITCH)
    begun = time.perf_counter()
    kernel: Callable[..., Any] = torch.compile(  # pyright: ignore[reportCallIssue]
        _copy(function, options),
        fullgraph=True,
        backend=BACKEND,
        options=_options_of(tensors[0].device.type),
        recompile_limit=MOST_GRAPHS,
    )
    out = kernel(*_with_marks(tensors))
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


def _ordinary(t: Tensor) -> Tensor:
    """A tensor on the same memory, neither of inference mode nor with a gradient, for which others are compiled."""
    if t.is_inference():
        return torch.from_dlpack(t)
    return t.detach() if t.requires_grad else t


def _with_marks(tensors: tuple[Tensor, ...]) -> list[Tensor]:
    """Views of tensors on a CPU whose numbers of slots are compiled as numbers that vary: one compilation serves all.

    Elsewhere, the first number is compiled as a constant, and the next one as any number.
    """
    slots = tensors[0].shape[2]
    # A mark on a tensor of a cache would hold in other compiled code, too. A tensor that is given twice has one view.
    views = {id(t): t.view(t.shape) for t in tensors}
    for t in views.values() if tensors[0].device.type == "cpu" else ():
        for dim in range(2, t.dim()):
            if t.shape[dim] == slots or (dim < t.dim() - 1 and t.shape[dim] >= MANY):
                torch._dynamo.maybe_mark_dynamic(t, dim)  # pyright: ignore[reportPrivateUsage]
    return [views[id(t)] for t in tensors]


def apart(function: F) -> F:
    """Mark a function that decodes so much that a step that is compiled as a whole calls it as one operation.

    Traced, it would be compiled with the options of the step, which are not `INDUCTOR_OPTIONS`. Names are unique.
    """
    assert function.__name__ not in _apart
    _apart[function.__name__] = function
    return function


@torch.library.custom_op("kvpolicy::apart", mutates_args=())
def _call_apart(name: str, tensors: list[Tensor], options: str, values: list[int]) -> Tensor:
    return call(_apart[name], *tensors, **_options(options, values))


@_call_apart.register_fake
def _(name: str, tensors: list[Tensor], options: str, values: list[int]) -> Tensor:
    out = _apart[name](*tensors, **_options(options, values))
    return out.new_empty(out.shape)


def _options(names: str, values: list[int]) -> dict[str, int]:
    """Options of an operation that takes their names, joined by commas, and their values."""
    return dict(zip(names.split(",") if names else (), values, strict=True))


def widen(t: Tensor) -> Tensor:
    """A small tensor in fp32, on a CPU written to memory before the loop that reads it, also in compiled code.

    On a CPU, inductor (torch 2.13) converts fp16 so slowly that it would take most of the time of the loop.
    """
    if t.dtype == torch.float32:
        return t
    is_traced = torch.compiler.is_compiling() and t.device.type == "cpu"
    return torch.ops.kvpolicy.widen(t) if is_traced else t.float()


def widen_on_cpu(t: Tensor) -> Tensor:
    """A small tensor for a loop: a CPU gets it in fp32, and other devices convert it in the loop, for fewer bytes."""
    return widen(t) if t.device.type == "cpu" else t


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
