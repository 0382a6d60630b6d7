"""One side of the comparison, in a process of its own: it answers questions in JSON, one line each.

Both sides load this file, each with its own transformers: it imports nothing of kvpolicy and nothing of kvpress.
"""

from __future__ import annotations

import ctypes
import gc
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


class Side:
    """What both sides do alike.

    Attributes:
        packages: Whose versions are told.
        model: The model at hand, after `load`.
    """

    packages: tuple[str, ...] = ("torch", "transformers")
    model: Any = None
    path: str = ""

    def versions(self) -> Answer:
        """Versions of what is at work."""
        found: Answer = {"python": sys.version.split()[0]}
        for name in self.packages:
            try:
                found[name] = version(name)
            except PackageNotFoundError:
                found[name] = "not installed"
        return found

    def load(self, path: str, dtype: str = "float32", threads: int = 1, attention: str = "sdpa") -> Answer:
        """Load a model from a folder."""
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(threads)
        how: Any = {"dtype": getattr(torch, dtype), "attn_implementation": attention, "local_files_only": True}
        self.path, self.how = path, how
        self.model = AutoModelForCausalLM.from_pretrained(path, **how).eval()
        return {"parameters": sum(p.numel() for p in self.model.parameters())}

    def fresh(self) -> Any:
        """Another copy of the model, that nothing was done to yet."""
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(self.path, **self.how).eval()

    def ask(self, question: Answer) -> Answer:
        """Answer one question: `do` names a method, the rest are its arguments."""
        do = question.pop("do")
        if do.startswith("_") or not callable(getattr(self, do, None)):
            raise ValueError(f"This side cannot {do!r}.")
        with torch.inference_mode() if do != "trap" else torch.no_grad():
            return getattr(self, do)(**question)

    def greedy(self, ids: Tensor, new: int, cache: Any, **more: Any) -> list[int]:
        """The next `new` tokens, by `generate`."""
        how: Any = {"max_new_tokens": new, "do_sample": False, "pad_token_id": 0} | more
        out = self.model.generate(input_ids=ids, past_key_values=cache, **how)
        return out[0, ids.shape[1] :].tolist()

    def timed(
        self,
        length: int,
        steps: int,
        start: Callable[[], Any],
        held: Callable[[Any], int],
        prefill: AbstractContextManager[Any] | None = None,
    ) -> Answer:
        """Seconds of a prefill and of a decode step, most memory over what was there before, and bytes held.

        Args:
            length: Of the prompt.
            steps: How many tokens are decoded.
            start: Makes a cache.
            held: Bytes of a cache.
            prefill: Entered for the prompt alone.
        """
        ids = torch.randint(1, 1000, (1, length), generator=torch.Generator().manual_seed(length))
        gc.collect()
        idle = reset_peak()
        cache = start()
        begin = time.perf_counter()
        with prefill or nullcontext():
            self.model(ids, past_key_values=cache, logits_to_keep=1)
        middle = time.perf_counter()
        peak = peak_bytes()
        token = torch.ones(1, 1, dtype=torch.int64)
        for step in range(steps):
            at = torch.tensor([[length + step]])  # after pruning, only the caller knows the position
            self.model(token, past_key_values=cache, position_ids=at)
        end = time.perf_counter()
        return {
            "prefill": middle - begin,
            "step": (end - middle) / steps,
            "peak": None if idle is None or peak is None else peak - idle,
            "held": held(cache),
        }

    def under(self, method: str, share: float) -> AbstractContextManager[Any]:
        """The model under a method that keeps a share of the prompt; each side has its own way."""
        raise NotImplementedError

    def trap(self, name: str, **how: Any) -> Answer:
        """One question about behaviour."""
        return getattr(self, f"_trap_{name}")(**how)

    def _trap_padding(self, ids: list[int], pad: int, new: int, method: str) -> Answer:
        row = torch.tensor([ids])
        rows = torch.cat([torch.zeros(1, pad, dtype=torch.int64), row], 1).repeat(2, 1)
        rows[1] = torch.arange(rows.shape[1]) % 500 + 3
        mask = torch.ones_like(rows)
        mask[0, :pad] = 0
        how: Any = {"max_new_tokens": new, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        with self.under(method, 0.5):
            alone = self.model.generate(row, **how)[0, row.shape[1] :]
        with self.under(method, 0.5):
            both = self.model.generate(rows, attention_mask=mask, **how)[0, rows.shape[1] :]
        return {"value": int((alone == both).sum()), "of": new}


def serve(side: Side) -> None:
    """Answer questions until there are no more; what libraries print goes to stderr."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for line in sys.stdin:
        try:
            reply: Answer = {"answer": side.ask(json.loads(line))}
        except Exception as error:  # a peer's failure is a result
            traceback.print_exc()
            reply = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
        out.write(json.dumps(reply) + "\n")
        out.flush()


def storage_bytes(thing: Any) -> int:
    """Bytes of every storage that a cache holds on to, packed and quantized tensors included, each counted once."""
    storages: dict[int, int] = {}
    seen: set[int] = set()
    left = [thing]
    while left:
        one = left.pop()
        if id(one) in seen or isinstance(one, torch.nn.Module | type | torch.dtype | torch.device | str | int | float):
            continue
        seen.add(id(one))
        parts: Any = getattr(one, "__tensor_flatten__", None) if isinstance(one, Tensor) else None
        if parts is not None:
            left += [getattr(one, name) for name in parts()[0]]
        elif isinstance(one, Tensor):
            storages[one.untyped_storage().data_ptr()] = one.untyped_storage().nbytes()
        elif isinstance(one, dict):
            left += one.values()
        elif isinstance(one, list | tuple):
            left += one
        elif type(one).__name__.endswith("Layer"):
            left += vars(one).values()
    return sum(storages.values())


def reset_peak() -> int | None:
    """Begin to watch the process' peak memory, and tell what it has now, in bytes; None where it cannot be known.

    What was freed goes back to the system first: what is then made would lie in it, and would not be seen.
    """
    with suppress(AttributeError, OSError, TypeError):  # glibc alone has it
        ctypes.CDLL(None).malloc_trim(0)
    try:
        with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
            file.write("5")
    except OSError:
        return None
    return _status("VmRSS")


def peak_bytes() -> int | None:
    """The most memory that the process had since then."""
    return _status("VmHWM")


def _status(name: str) -> int | None:
    try:
        with open("/proc/self/status", encoding="ascii") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith(name))
    except (OSError, StopIteration):
        return None
