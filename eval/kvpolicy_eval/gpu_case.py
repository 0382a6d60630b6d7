"""One case of `kvpolicy_eval.gpu`, in a process of its own: `python gpu_case.py '{"shape": ...}'`.

Imports neither kvpolicy nor kvpolicy_eval unless the case needs them, so that it also runs in kvpress's environment.
The last line it prints is the result, as JSON after `RESULT `. Running out of memory is a result; anything else that
goes wrong is one too, with its error.
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
from pathlib import Path
from typing import Any

import torch

MARK = "RESULT "
TOGETHER = 131072
"""Tokens of all rows that one prefill forward takes at most, so that activations are not what runs out of memory."""
SHAPES: dict[str, dict[str, Any]] = {
    "mistral-7b": {
        "model_type": "mistral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000, "sliding_window": None,
        "max_position_embeddings": 32768, "head_dim": 128,
    },
    "llama-3-8b": {
        "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
        "max_position_embeddings": 262144, "head_dim": 128,
    },
    "tiny": {
        "model_type": "llama", "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256, "max_position_embeddings": 4096,
        "head_dim": 32,
    },
}  # fmt: skip


def build(shape: str, device: str) -> Any:
    """A model of random weights in bf16, made on the device."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(**SHAPES[shape], eos_token_id=None, pad_token_id=0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    return model.to(device).eval()


def chunk_of(batch: int, prompt: int) -> int:
    """Columns of a prompt that go through the model at once; the stock cache's masks of later chunks count too."""
    if batch * prompt <= TOGETHER:
        return prompt
    return max(1, min(TOGETHER // batch, (1 << 29) // (batch * prompt), prompt))


class Clock:
    """Time and memory on a device; a limit of bytes stands in for a smaller card, also on the CPU."""

    def __init__(self, device: str, limit: int) -> None:
        """Begin, with `limit` bytes (0: all there are)."""
        self.device, self.limit, self._cuda = device, limit, device.startswith("cuda")
        if self._cuda and limit:
            total = torch.cuda.get_device_properties(device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total))

    def now(self) -> float:
        """Seconds, with all work done."""
        if self._cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    def peak(self) -> int:
        """The most bytes of tensors; of the process where the device does not say."""
        if self._cuda:
            return torch.cuda.max_memory_allocated()
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def check(self, held: int) -> None:
        """On the CPU, run out of memory where weights and cache are over the limit."""
        if not self._cuda and self.limit and held > self.limit:
            raise torch.OutOfMemoryError(f"{held} bytes are over the limit of {self.limit}")


def stock_bytes(cache: Any) -> int:
    """Bytes of a stock cache's keys and values."""
    held = [(layer.keys, layer.values) for layer in cache.layers if getattr(layer, "keys", None) is not None]
    return sum(t.untyped_storage().nbytes() for pair in held for t in pair)


def stock_cache(kind: str, model: Any, total: int) -> Any:
    """Transformers' dynamic or static cache."""
    from transformers import DynamicCache, StaticCache

    if kind == "static":
        return StaticCache(config=model.config, max_cache_len=total)
    return DynamicCache(config=model.config)


def prefill(model: Any, ids: torch.Tensor, cache: Any) -> torch.Tensor:
    """Run the prompt in chunks; the first token after it, [B, 1]."""
    size, length = chunk_of(ids.shape[0], ids.shape[1]), ids.shape[1]
    out: Any = None
    for start in range(0, length, size):
        stop = min(start + size, length)
        places = torch.arange(start, stop, device=ids.device)[None].expand(ids.shape[0], -1)
        last = {"logits_to_keep": 1, "use_cache": True}
        out = model(ids[:, start:stop], position_ids=places, past_key_values=cache, **last)
    return out.logits[:, -1:].argmax(-1)


def decode(step: Any, token: torch.Tensor, cache: Any, start: int, new: int, graphs: bool) -> None:
    """Feed `new` tokens, each the likeliest after the one before; nothing is read back in between."""
    place = torch.full_like(token, start)
    tick = getattr(cache, "tick", None) if graphs else None  # an eager forward ticks by itself
    for _ in range(new):
        if graphs and token.is_cuda:
            torch.compiler.cudagraph_mark_step_begin()
        out = step(token, position_ids=place, past_key_values=cache, use_cache=True)
        token = out.logits[:, -1:].argmax(-1)
        place = place + 1
        if tick is not None:
            tick()


def compiled(model: Any, device: str) -> Any:
    """The model with its step as CUDA graphs; on the CPU, traced the same way and not made faster."""
    if device.startswith("cuda"):
        return torch.compile(model, mode="reduce-overhead", fullgraph=True)
    return torch.compile(model, backend="aot_eager", fullgraph=True)


@contextlib.contextmanager
def side(case: dict[str, Any], model: Any, folder: Path) -> Any:
    """Put what is compared to work on the model; gives a function that makes a cache, and whose bytes to count."""
    kind, words, total = case["method"], case.get("policy", ""), case["prompt"] + case["new"]
    if kind == "policy":
        import kvpolicy
        from kvpolicy_eval.standins import stand_in

        if "PROFILE" in words:  # for a real model there would be a file already
            path = folder / "profile.json"
            kvpolicy.profile(model, [torch.randint(3, 99, (1, 256), device=model.device)], path)
            words = words.replace("PROFILE", str(path))
        policy, config = kvpolicy.Policy.parse(words), model.config
        layers = config.num_hidden_layers
        codec = stand_in(policy.codec, folder, config.num_key_value_heads, config.head_dim, layers=layers)
        with kvpolicy.attach(model, dataclasses.replace(policy, codec=codec)):
            yield lambda: kvpolicy.PolicyCache(model, prompt=case["prompt"], new=case["new"]), lambda c: c.nbytes
    elif kind == "kvpress":
        press: Any = importlib.import_module("kvpress")
        with getattr(press, words)(compression_ratio=case["removed"])(model):
            yield lambda: stock_cache("dynamic", model, total), stock_bytes
    else:
        yield lambda: stock_cache(kind, model, total), stock_bytes


def measure(case: dict[str, Any]) -> dict[str, Any]:
    """Prefill and decode once to warm up (shorter), then timed.

    Args:
        case: shape, device, method (dynamic, static, policy, kvpress), policy (its words, or a press's name), mode
            (eager, graphs), batch, prompt, new, limit (bytes; 0 for none).
    """
    device, graphs = case["device"], case["mode"] == "graphs"
    clock = Clock(device, case.get("limit", 0))
    model = build(case["shape"], device)
    weights = sum(p.nbytes for p in model.parameters())
    clock.check(weights)
    ids = torch.randint(3, model.config.vocab_size, (case["batch"], case["prompt"]), device=device)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad(), side(case, model, Path(folder)) as (make, nbytes):
        step = compiled(model, device) if graphs else model
        cache = make()
        token = prefill(model, ids, cache)
        clock.check(weights + nbytes(cache))
        warm = min(8, case["new"])
        begun = clock.now()
        decode(step, token, cache, case["prompt"], warm, graphs)
        compiling = clock.now() - begun
        del cache, token
        start = clock.now()
        cache = make()
        token = prefill(model, ids, cache)
        middle = clock.now()
        # a new cache has other addresses: its graphs are recorded in steps that are not counted
        skip = warm if graphs and case["new"] > 2 * warm else 0
        decode(step, token, cache, case["prompt"], skip, graphs)
        timed = clock.now()
        decode(step, token, cache, case["prompt"] + skip, case["new"] - skip, graphs)
        end, held = clock.now(), nbytes(cache)
        clock.check(weights + held)
    new = case["batch"] * (case["new"] - skip)
    return {
        "prefill_s": middle - start, "decode_s": end - timed, "warmup_s": compiling, "kv_bytes": held,
        "weight_bytes": weights, "peak_bytes": clock.peak(), "decode_tokens_per_s": new / (end - timed),
        "tokens_per_s": case["batch"] * case["new"] / (middle - start + end - middle),
        "step_ms": 1000 * (end - timed) / max(case["new"] - skip, 1),
    }  # fmt: skip


def versions() -> dict[str, str]:
    """Of what matters to times."""
    found = {"python": sys.version.split()[0], "cuda": str(torch.version.cuda)}
    for name in ("torch", "transformers", "kvpress", "kvpolicy"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


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
    card = torch.cuda.get_device_name() if case["device"].startswith("cuda") else "CPU"
    print(MARK + json.dumps({**result, "card": card, "versions": versions()}), flush=True)


if __name__ == "__main__":
    main()
