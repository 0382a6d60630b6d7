"""One side of the comparison, in a separate process: it answers requests in JSON, one per line.

Both sides import this file, with different versions of transformers, so it imports neither kvpolicy nor kvpress.
"""

from __future__ import annotations

import ctypes
import gc
import inspect
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor

Answer = dict[str, Any]

NOT_INSTALLED = "not installed"
"""Version of a package that is missing."""

_WITHOUT_STORAGE = (torch.nn.Module, type, torch.dtype, torch.device, str, int, float)
"""Objects that `storage_bytes` does not search; a cache refers to modules, whose weights are not part of it."""


class Side:
    """The requests that both sides answer in the same way.

    Subclasses add `kept`, `answer`, `time`, `under`, `generating` and `_trap_...`.

    Attributes:
        packages: Packages whose versions are reported.
        model: The loaded model.
        path: Its folder.
        options: Its arguments of `from_pretrained`.
    """

    packages: tuple[str, ...] = ("torch", "transformers")
    model: Any = None
    path: str = ""
    options: dict[str, Any]

    def versions(self) -> Answer:
        """Versions of the packages."""
        result: Answer = {"python": sys.version.split()[0]}
        for name in self.packages:
            try:
                result[name] = version(name)
            except PackageNotFoundError:
                result[name] = NOT_INSTALLED
        return result

    def load(self, path: str, dtype: str = "float32", threads: int = 1, attention: str = "sdpa") -> Answer:
        """Load a model from a folder."""
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(threads)
        self.path = path
        self.options = {"dtype": getattr(torch, dtype), "attn_implementation": attention, "local_files_only": True}
        self.model = AutoModelForCausalLM.from_pretrained(path, **self.options).eval()
        return {"parameters": sum(p.numel() for p in self.model.parameters())}

    def fresh(self) -> Any:
        """A fresh copy of the model."""
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(self.path, **self.options).eval()

    def ask(self, request: Answer) -> Answer:
        """Answer one request.

        Args:
            request: `do`, the name of a method, and its arguments.

        Raises:
            ValueError: If there is no such method.
        """
        do = request.pop("do")
        if do.startswith("_") or not callable(getattr(self, do, None)):
            raise ValueError(f"There is no request {do!r}.")
        # `generate` has a mode of its own, which is what its users get.
        with torch.no_grad() if do in ("generate", "trap") else torch.inference_mode():
            return getattr(self, do)(**request)

    def passing(self, cache: Any) -> dict[str, Any]:
        """A cache as an argument of the model or of `generate`, under the name of this version of transformers."""
        parameters = inspect.signature(self.model.forward).parameters
        return {"cache" if "cache" in parameters else "past_key_values": cache}

    def greedy(self, ids: Tensor, new: int, cache: Any) -> list[int]:
        """The next `new` tokens, decoded greedily by `generate`."""
        given = self.passing(cache)
        out = self.model.generate(input_ids=ids, **given, max_new_tokens=new, do_sample=False, pad_token_id=0)
        return out[0, ids.shape[1] :].tolist()

    def timed(
        self,
        length: int,
        steps: int,
        start: Callable[[], Any],
        held: Callable[[Any], int],
        prefill: AbstractContextManager[Any] | None = None,
    ) -> Answer:
        """Seconds of a prefill and of a decode step, memory that the prefill adds to the peak, and bytes of the cache.

        Args:
            length: Length of the prompt.
            steps: Decoded tokens.
            start: Makes a cache.
            held: Returns the bytes of a cache.
            prefill: Context manager that is entered for the prefill only.
        """
        ids = torch.randint(1, 1000, (1, length), generator=torch.Generator().manual_seed(length))
        gc.collect()
        idle = reset_peak()
        cache = start()
        prefill_start = time.perf_counter()
        with prefill or nullcontext():
            self.model(ids, **self.passing(cache), logits_to_keep=1)
        prefill_end = time.perf_counter()
        peak = peak_bytes()
        token = torch.ones(1, 1, dtype=torch.int64)
        for step in range(steps):
            position = torch.tensor([[length + step]])  # the length of a pruned cache is not the position
            self.model(token, **self.passing(cache), position_ids=position)
        end = time.perf_counter()
        return {
            "prefill": prefill_end - prefill_start,
            "step": (end - prefill_end) / steps,
            "peak": None if idle is None or peak is None else peak - idle,
            "held": held(cache),
        }

    def generating(self, method: str, share: float | None, prompt: int, new: int) -> AbstractContextManager[Any]:
        """Context manager that gives a cache for one call of `generate`, under a method.

        Args:
            method: Name of the method; empty for a DynamicCache.
            share: Budget, as a share of the prompt; None for a method without one.
            prompt: Tokens of the prompt.
            new: Tokens that are generated.
        """
        raise NotImplementedError

    def generate(self, ids: list[int], method: str, new: int, share: float | None = None) -> Answer:
        """One call of `generate`: its tokens, its times, and the most bytes that its cache held after a token.

        Args:
            ids: Token ids of the prompt, one row.
            method: Name of the method; empty for a DynamicCache.
            new: Tokens to generate; no token ends the text earlier.
            share: Budget, as a share of the prompt; None for a method without one.
        """
        with self.generating(method, share, len(ids), new) as cache:
            stream = Stream(lambda: storage_bytes(list(cache.layers)))
            out = self.model.generate(
                torch.tensor([ids]),
                **self.passing(cache),
                max_new_tokens=new,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
                streamer=stream,
            )
        prefill, *steps = stream.seconds()
        return {
            "ids": out[0, len(ids) :].tolist(),
            "prefill": prefill,
            "step": sum(steps) / len(steps),
            "held": max(stream.held),
        }

    def under(self, method: str, share: float) -> AbstractContextManager[Any]:
        """Context manager that applies a method, which keeps a share of the prompt, to the model."""
        raise NotImplementedError

    def trap(self, name: str, **arguments: Any) -> Answer:
        """One question about behavior, see `kvpolicy_eval.peers.traps`.

        Args:
            name: Name of the question.
            **arguments: Arguments of its method.
        """
        return getattr(self, f"_trap_{name}")(**arguments)

    def _trap_padding(self, ids: list[int], pad: int, new: int, method: str) -> Answer:
        """Number of tokens that a row has in common with itself in a padded batch."""
        row = torch.tensor([ids])
        rows = torch.cat([torch.zeros(1, pad, dtype=torch.int64), row], 1).repeat(2, 1)
        rows[1] = torch.arange(rows.shape[1]) % 500 + 3
        mask = torch.ones_like(rows)
        mask[0, :pad] = 0
        options: Any = {"max_new_tokens": new, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        with self.under(method, 0.5):
            alone = self.model.generate(row, **options)[0, row.shape[1] :]
        with self.under(method, 0.5):
            in_batch = self.model.generate(rows, attention_mask=mask, **options)[0, rows.shape[1] :]
        return {"value": int((alone == in_batch).sum()), "of": new}


class Stream:
    """A streamer of `generate` that notes the time and the bytes of a cache when a token arrives.

    With one thread, the time is that of the CPU: other processes of the machine take no part of it.

    Args:
        count: Counts the bytes; its time is not part of the measured times.

    Attributes:
        held: Bytes when the prompt arrived, and at every new token.
    """

    def __init__(self, count: Callable[[], int]) -> None:
        """Begin without a token."""
        self._count = count
        self._now = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
        self._arrived: list[float] = []
        self._left: list[float] = []
        self.held: list[int] = []

    def put(self, tokens: Tensor) -> None:
        """Note the arrival of the prompt, which `generate` passes first, or of a new token."""
        self._arrived.append(self._now())
        self.held.append(self._count())
        self._left.append(self._now())

    def end(self) -> None:
        """Do nothing: `generate` calls this after the last token."""

    def seconds(self) -> list[float]:
        """Seconds until each new token, of which the first is that of the prefill."""
        return [later - before for before, later in zip(self._left, self._arrived[1:], strict=False)]


def serve(side: Side) -> None:
    """Answer the requests on stdin until it is closed."""
    # Answers go to the original stdout, and whatever libraries print goes to stderr.
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for line in sys.stdin:
        try:
            reply: Answer = {"answer": side.ask(json.loads(line))}
        except Exception as error:  # an error of a library is a result
            traceback.print_exc()
            reply = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
        out.write(json.dumps(reply) + "\n")
        out.flush()


def storage_bytes(thing: Any) -> int:
    """Bytes of all storages that an object refers to, counted once each; tensor subclasses are unpacked.

    Args:
        thing: Cache layers, or containers of them or of tensors.
    """
    storages: dict[int, int] = {}
    visited: set[int] = set()
    pending = [thing]
    while pending:
        item = pending.pop()
        if id(item) in visited or isinstance(item, _WITHOUT_STORAGE):
            continue
        visited.add(id(item))
        # Quantized tensors are subclasses that hold their packed data and scales in other tensors.
        flatten: Any = getattr(item, "__tensor_flatten__", None) if isinstance(item, Tensor) else None
        if flatten is not None:
            pending += [getattr(item, name) for name in flatten()[0]]
        elif isinstance(item, Tensor):
            storages[item.untyped_storage().data_ptr()] = item.untyped_storage().nbytes()
        elif isinstance(item, dict):
            pending += item.values()
        elif isinstance(item, list | tuple):
            pending += item
        elif type(item).__name__.endswith(("Layer", "Store", "Contents", "Tensors", "Journal")):
            pending += vars(item).values()
    return sum(storages.values())


def reset_peak() -> int | None:
    """Reset the peak memory of the process.

    Freed memory is first returned to the system: otherwise later allocations would reuse it without raising the peak.

    Returns:
        Bytes that the process holds now; None if the system does not report them.
    """
    with suppress(AttributeError, OSError, TypeError):  # only glibc has this function
        ctypes.CDLL(None).malloc_trim(0)
    try:
        with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
            file.write("5")
    except OSError:
        return None
    return _status("VmRSS")


def peak_bytes() -> int | None:
    """Peak memory of the process since `reset_peak`, in bytes."""
    return _status("VmHWM")


def _status(name: str) -> int | None:
    try:
        with open("/proc/self/status", encoding="ascii") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith(name))
    except (OSError, StopIteration):
        return None
