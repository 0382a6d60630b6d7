"""One case of `kvpolicy_eval.gpu`, in a separate process: `python case.py '{"shape": ...}'`.

Imports neither kvpolicy nor kvpolicy_eval unless the case needs them, so that it also runs in kvpress's environment.
The last line of its output is the result, as JSON after `RESULT `. Running out of memory is a result, as any error is.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.metadata
import json
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import torch

from kvpolicy.hf.cache_names import cache_argument

MakeCache = Callable[[], Any]
CountBytes = Callable[[Any], int]
MARK = "RESULT "
MAX_TOKENS = 131072
"""Tokens of all rows in one forward pass of the prefill, limited so that activations do not exhaust the memory."""
MAX_MASK_ELEMENTS = 1 << 29
"""Elements of the attention mask that the stock cache makes for a later chunk of the prompt."""
WARM_UP_STEPS = 8
_LARGE = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
_SMALL = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
SHAPES: dict[str, dict[str, Any]] = {
    "mistral-7b": _LARGE
    | {"model_type": "mistral", "vocab_size": 32000, "max_position_embeddings": 32768, "sliding_window": None},
    "llama-3-8b": _LARGE | {"model_type": "llama", "vocab_size": 128256, "max_position_embeddings": 262144},
    "tiny": _SMALL | {"model_type": "llama", "vocab_size": 256, "max_position_embeddings": 4096},
}
"""Arguments of `AutoConfig.for_model` by name of the shape."""


def build(shape: str, device: str) -> Any:
    """A model with random weights in bf16, created on the device."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(**SHAPES[shape], eos_token_id=None, pad_token_id=0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    return model.to(device).eval()


def chunk_size(batch: int, prompt: int) -> int:
    """Columns of a prompt that go through the model at once."""
    if batch * prompt <= MAX_TOKENS:
        return prompt
    return max(1, min(MAX_TOKENS // batch, MAX_MASK_ELEMENTS // (batch * prompt), prompt))


class Clock:
    """Time and memory of a device.

    Args:
        device: Such as `cuda`.
        limit: Bytes that may be used, 0 for all. On a CPU the limit applies to weights and cache alone.
    """

    def __init__(self, device: str, limit: int) -> None:
        """Apply the limit."""
        self.device = device
        self.limit = limit
        self._cuda = device.startswith("cuda")
        if self._cuda and limit:
            total = torch.cuda.get_device_properties(device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total))

    def now(self) -> float:
        """Seconds, after all queued work is done."""
        if self._cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    def peak(self) -> int:
        """Peak bytes of tensors on a GPU, of the whole process on a CPU."""
        if self._cuda:
            return torch.cuda.max_memory_allocated()
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def check(self, held: int) -> None:
        """Run out of memory on a CPU.

        Args:
            held: Bytes of weights and cache.

        Raises:
            torch.OutOfMemoryError: If they exceed the limit.
        """
        if not self._cuda and self.limit and held > self.limit:
            raise torch.OutOfMemoryError(f"{held} bytes exceed the limit of {self.limit}")


def stock_bytes(cache: Any) -> int:
    """Bytes of the keys and values of a stock cache."""
    pairs = [(layer.keys, layer.values) for layer in cache.layers if getattr(layer, "keys", None) is not None]
    return sum(tensor.untyped_storage().nbytes() for pair in pairs for tensor in pair)


def stock_cache(kind: str, model: Any, total: int) -> Any:
    """The dynamic or static cache of transformers.

    Args:
        kind: `dynamic` or `static`.
        model: The model.
        total: Tokens of prompt and answer.
    """
    from transformers import DynamicCache, StaticCache

    if kind == "static":
        return StaticCache(config=model.config, max_cache_len=total)
    return DynamicCache(config=model.config)


def prefill(model: Any, ids: torch.Tensor, cache: Any) -> torch.Tensor:
    """Run the prompt in chunks, and return the first token after it, [B, 1]."""
    batch, length = ids.shape
    size = chunk_size(batch, length)
    out: Any = None
    for start in range(0, length, size):
        stop = min(start + size, length)
        positions = torch.arange(start, stop, device=ids.device)[None].expand(batch, -1)
        given = cache_argument(model, cache)
        out = model(ids[:, start:stop], position_ids=positions, **given, logits_to_keep=1, use_cache=True)
    return out.logits[:, -1:].argmax(-1)


def decode(step: Any, token: torch.Tensor, cache: Any, start: int, new: int, graphs: bool) -> None:
    """Decode `new` tokens greedily, without a synchronization of device and host.

    Args:
        step: The model, compiled or not.
        token: First token, [B, 1].
        cache: The cache.
        start: Position of the first token.
        new: Steps.
        graphs: Whether the step is compiled.
    """
    given = cache_argument(step, cache)
    position = torch.full_like(token, start)
    tick = getattr(cache, "tick", None) if graphs else None  # an eager forward calls `tick` itself
    for _ in range(new):
        if graphs and token.is_cuda:
            torch.compiler.cudagraph_mark_step_begin()
        out = step(token, position_ids=position, **given, use_cache=True)
        token = out.logits[:, -1:].argmax(-1)
        position = position + 1
        if tick is not None:
            tick()


def compiled(model: Any, device: str) -> Any:
    """The model with its decode step as CUDA graphs; on a CPU it is traced the same way, without a speed-up."""
    if device.startswith("cuda"):
        return torch.compile(model, mode="reduce-overhead", fullgraph=True)
    return torch.compile(model, backend="aot_eager", fullgraph=True)


@contextlib.contextmanager
def applied(case: dict[str, Any], model: Any, folder: Path) -> Generator[tuple[MakeCache, CountBytes]]:
    """Apply the method of a case to the model.

    Args:
        case: See `measure`.
        model: The model.
        folder: Temporary folder for calibrated tensors.

    Yields:
        A function that makes a cache, and a function that counts its bytes.
    """
    method = case["method"]
    spec = case.get("policy", "")
    total = case["prompt"] + case["new"]
    if method == "policy":
        import kvpolicy
        from kvpolicy_eval.common.synthetic import with_random_calibration

        if "PROFILE" in spec:  # measured once per model in practice, so it is no part of the times
            path = folder / "profile.json"
            kvpolicy.profile(model, [torch.randint(3, 99, (1, 256), device=model.device)], path)
            spec = spec.replace("PROFILE", str(path))
        policy = kvpolicy.Policy.parse(spec)
        config = model.config
        codec = with_random_calibration(
            policy.codec, folder, config.num_key_value_heads, config.head_dim, layers=config.num_hidden_layers
        )
        with kvpolicy.attach(model, dataclasses.replace(policy, codec=codec), tile=case.get("tile")):
            yield lambda: kvpolicy.PolicyCache(model, prompt=case["prompt"], new=case["new"]), lambda c: c.nbytes
    elif method == "kvpress":
        kvpress: Any = importlib.import_module("kvpress")
        with getattr(kvpress, spec)(compression_ratio=case["removed"])(model):
            yield lambda: stock_cache("dynamic", model, total), stock_bytes
    else:
        yield lambda: stock_cache(method, model, total), stock_bytes


def planned_peak(case: dict[str, Any], model: Any) -> dict[str, int]:
    """Peak bytes that a plan gives for a case in tiles, weights included; of other cases nothing."""
    if "tile" not in case:
        return {}
    import kvpolicy

    sizes = {name: case[name] for name in ("batch", "prompt", "new", "tile")}
    return {"planned_bytes": kvpolicy.plan(model, case["policy"], **sizes).peak_nbytes}


def measure(case: dict[str, Any]) -> dict[str, Any]:
    """Prefill and decode a few steps to warm up, then all of them with times.

    Args:
        case: `shape`, `device`, `method` (dynamic, static, policy, kvpress), `policy` (a spec, or the class of a
            press), `mode` (eager, graphs), `batch`, `prompt`, `new`, `limit` (bytes; 0 for none), `removed` for
            kvpress, and `tile` for a policy that takes the prompt in tiles.
    """
    device = case["device"]
    graphs = case["mode"] == "graphs"
    clock = Clock(device, case.get("limit", 0))
    model = build(case["shape"], device)
    weight_bytes = sum(p.nbytes for p in model.parameters())
    clock.check(weight_bytes)
    ids = torch.randint(3, model.config.vocab_size, (case["batch"], case["prompt"]), device=device)
    with (
        tempfile.TemporaryDirectory() as folder,
        torch.no_grad(),
        applied(case, model, Path(folder)) as (make_cache, nbytes),
    ):
        step = compiled(model, device) if graphs else model
        cache = make_cache()
        token = prefill(model, ids, cache)
        clock.check(weight_bytes + nbytes(cache))
        warm_up = min(WARM_UP_STEPS, case["new"])
        compile_start = clock.now()
        decode(step, token, cache, case["prompt"], warm_up, graphs)
        compile_end = clock.now()
        del cache, token
        start = clock.now()
        cache = make_cache()
        token = prefill(model, ids, cache)
        prefill_end = clock.now()
        # The tensors of a new cache have other addresses, so CUDA graphs are recorded again: these steps do not count.
        skipped = warm_up if graphs and case["new"] > 2 * warm_up else 0
        decode(step, token, cache, case["prompt"], skipped, graphs)
        decode_start = clock.now()
        decode(step, token, cache, case["prompt"] + skipped, case["new"] - skipped, graphs)
        end = clock.now()
        held = nbytes(cache)
        clock.check(weight_bytes + held)
    decode_s = end - decode_start
    timed_steps = case["new"] - skipped
    return {
        "prefill_s": prefill_end - start,
        "decode_s": decode_s,
        "warmup_s": compile_end - compile_start,
        "kv_bytes": held,
        "weight_bytes": weight_bytes,
        "peak_bytes": clock.peak(),
        **planned_peak(case, model),
        "decode_tokens_per_s": case["batch"] * timed_steps / decode_s,
        "tokens_per_s": case["batch"] * case["new"] / (end - start),
        "step_ms": 1000 * decode_s / max(timed_steps, 1),
    }


def versions() -> dict[str, str]:
    """Versions of the software that influences times."""
    result = {"python": sys.version.split()[0], "cuda": str(torch.version.cuda)}
    for name in ("torch", "transformers", "kvpress", "kvpolicy"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            result[name] = importlib.metadata.version(name)
    return result


def card(device: str) -> str:
    """Name of the GPU, or `CPU`."""
    return torch.cuda.get_device_name() if device.startswith("cuda") else "CPU"


def main() -> None:
    """Measure the case in the only argument, and print the result."""
    case = json.loads(sys.argv[1])
    torch.set_num_threads(case.get("threads") or torch.get_num_threads())
    try:
        result: dict[str, Any] = {"status": "ok", **measure(case)}
    except torch.OutOfMemoryError as error:
        result = {"status": "out of memory", "error": str(error).splitlines()[0]}
    except Exception as error:
        lines = str(error).splitlines() or [type(error).__name__]
        result = {"status": "failed", "error": f"{type(error).__name__}: {lines[0]}"[:300]}
    print(MARK + json.dumps({**result, "card": card(case["device"]), "versions": versions()}), flush=True)


if __name__ == "__main__":
    main()
