"""The other side: kvpress and transformers' QuantizedCache, in the environment of the peers."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from kvpolicy_eval.peers.side import Answer, Side, serve, storage_bytes
from kvpolicy_eval.peers.stock import is_quantized, stock_cache

PRESSES = {
    "snapkv": "SnapKVPress",
    "tova": "TOVAPress",
    "streaming": "StreamingLLMPress",
    "knorm": "KnormPress",
    "observed": "ObservedAttentionPress",
    "expected": "ExpectedAttentionPress",
    "keydiff": "KeyDiffPress",
    "pyramid": "PyramidKVPress",
}
"""Classes of kvpress by the names used here."""


def press_of(method: str, ratio: float) -> Any:
    """A press from its name and options.

    Args:
        method: Such as `snapkv:window_size=32`; `ada/snapkv` wraps a press in AdaKV.
        ratio: Share of the prompt that is removed.
    """
    kvpress: Any = import_module("kvpress")
    outer, slash, inner = method.partition("/")
    if slash:
        return {"ada": kvpress.AdaKVPress}[outer](press_of(inner, ratio))
    name, *options = method.split(":")
    arguments = {key: int(value) for key, value in (option.split("=") for option in options)}
    return getattr(kvpress, PRESSES[name])(compression_ratio=ratio, **arguments)


class Theirs(Side):
    """kvpress and QuantizedCache; a method is `press`, `press+backend-bits`, `backend-bits` or empty."""

    packages = ("kvpress", "torch", "transformers", "optimum-quanto", "hqq")

    def load(self, path: str, dtype: str = "float32", threads: int = 1, attention: str = "sdpa") -> Answer:
        """Load a model from a folder."""
        import_module("kvpress")  # it patches transformers' attention functions, which must precede loading
        return super().load(path, dtype, threads, attention)

    def kept(self, ids: list[list[int]], method: str, keep: int) -> Answer:
        """Kept positions, identified by their keys: a kept key equals one of the full cache, bit for bit."""
        tokens = torch.tensor(ids)
        full = self._cache("")
        pruned = self._cache("")
        self.model(tokens, past_key_values=full)
        with self._pressed(method, 1 - (keep + 0.5) / tokens.shape[1]):
            self.model(tokens, past_key_values=pruned)
        pairs = zip(full.layers, pruned.layers, strict=True)
        return {"kept": [_positions(a.keys[0], b.keys[0]) for a, b in pairs]}

    def answer(self, ids: list[list[int]], method: str, limit: int | None, new: int, after: int = 0) -> Answer:
        """Answer to a prompt, see `Ours.answer`; the press is active for the part of the prompt that it compresses."""
        tokens = torch.tensor(ids)
        press, quant = _parts(method)
        length = tokens.shape[1] - after
        ratio = 0.0
        if limit is not None:
            keep = self._fits(limit, length, new + after, quant)
            ratio = 0.0 if keep >= length else 1 - (keep + 0.5) / length
        cache = self._cache(quant)
        if after:
            with self._pressed(press, ratio):
                self.model(tokens[:, :-after], past_key_values=cache, logits_to_keep=1)
            out = self._decode(tokens, after, new, cache)
        else:
            with self._pressed(press, ratio):
                out = self.greedy(tokens, new, cache)
        return {"ids": out, "held": storage_bytes(list(cache.layers))}

    def _decode(self, tokens: Tensor, after: int, new: int, cache: Any) -> list[int]:
        """Greedy decoding as in kvpress' pipeline, with the question at its original positions."""
        position = tokens.shape[1] - after
        inputs = tokens[:, -after:]
        out: list[int] = []
        for _ in range(new):
            positions = torch.arange(position, position + inputs.shape[1])[None]
            logits = self.model(inputs, past_key_values=cache, position_ids=positions, logits_to_keep=1).logits
            position += inputs.shape[1]
            inputs = logits[:, -1:].argmax(-1)
            out.append(int(inputs))
        return out

    def time(self, method: str, length: int, share: float, steps: int) -> Answer:
        """Times of a prompt and of the decode steps after it."""
        press, quant = _parts(method)
        return self.timed(
            length,
            steps,
            start=lambda: self._cache(quant),
            held=lambda cache: storage_bytes(list(cache.layers)),
            prefill=self._pressed(press, 1 - share),
        )

    def under(self, method: str, share: float) -> AbstractContextManager[Any]:
        """Context manager that applies a method, which keeps a share of the prompt, to the model."""
        return self._pressed(method, share)

    @contextmanager
    def generating(self, method: str, share: float | None, prompt: int, new: int) -> Generator[Any]:
        """A cache for one call of `generate`, during which the press is active."""
        press, quant = _parts(method)
        with self._pressed(press, 0.0 if share is None else 1 - share):
            yield self._cache(quant)

    def _trap_sinks(self, ids: list[int], steps: int, keep: int) -> Answer:
        kvpress: Any = import_module("kvpress")
        inner = press_of("streaming", 0.0)
        press = kvpress.DecodingPress(inner, compression_interval=16, target_size=keep, hidden_states_buffer_size=0)
        full = self._cache("")
        cache = self._cache("")
        row = torch.tensor([ids])
        self.model(row, past_key_values=full)
        with press(self.model):
            self.model(row, past_key_values=cache)
            for step in range(steps):
                position = torch.tensor([[len(ids) + step]])
                self.model(torch.tensor([[step % 500 + 3]]), past_key_values=cache, position_ids=position)
        kept: list[int] = []
        for full_layer, layer in zip(full.layers, cache.layers, strict=True):
            before = full_layer.keys[0]
            after = layer.keys[0]
            for head in range(before.shape[0]):
                kept.append(sum(bool((after[head] == before[head, sink]).all(-1).any()) for sink in range(4)))
        return {"value": min(kept), "of": 4, "held": cache.layers[0].keys.shape[2]}

    def _trap_chunks(self, ids: list[int], chunk: int, method: str) -> Answer:
        row = torch.tensor([ids])
        cache = self._cache("")
        with self._pressed(method, 0.5):
            for start in range(0, len(ids), chunk):
                positions = torch.arange(start, min(start + chunk, len(ids)))
                self.model(
                    row[:, positions],
                    past_key_values=cache,
                    position_ids=positions[None],
                    cache_position=positions,
                )
        return {"value": cache.layers[0].keys.shape[2], "of": len(ids) // 2}

    def _trap_two(self, first: list[int], second: list[int], method: str) -> Answer:
        def prompt(ids: list[int]) -> Any:
            cache = self._cache("")
            with self._pressed(method, 0.5):
                self.model(torch.tensor([ids]), past_key_values=cache)
            return cache

        def step(cache: Any) -> Tensor:
            position = torch.tensor([[len(first)]])
            return self.model(torch.tensor([[5]]), past_key_values=cache, position_ids=position).logits

        expected = step(prompt(first))
        interrupted = prompt(first)
        prompt(second)
        return {"value": float((step(interrupted) - expected).abs().max())}

    def _trap_compiled(self, ids: list[int], method: str) -> Answer:
        model: Any = self.fresh()
        row = torch.tensor([ids])
        compiled = torch.compile(model, backend="eager")
        compiled(row, past_key_values=self._cache(""))
        cache = self._cache("")
        with self._pressed(method, 0.5, model):
            compiled(row, past_key_values=cache)
        return {"value": cache.layers[0].keys.shape[2], "of": len(ids) // 2}

    def _trap_bytes(self, ids: list[int], method: str) -> Answer:
        full = self._cache("")
        cache = self._cache("")
        self.model(torch.tensor([ids]), past_key_values=full)
        with self._pressed(method, 0.5):
            self.model(torch.tensor([ids]), past_key_values=cache)
        return {"value": storage_bytes(list(cache.layers)) / storage_bytes(list(full.layers))}

    def _pressed(self, method: str, ratio: float, model: Any = None) -> AbstractContextManager[Any]:
        return press_of(method, ratio)(model or self.model) if method else nullcontext()

    def _cache(self, quant: str) -> Any:
        return stock_cache(self.model.config, quant)

    def _fits(self, limit: int, length: int, new: int, quant: str) -> int:
        """Largest number of prompt tokens with which the cache stays within a limit of bytes.

        Args:
            limit: Bytes of the cache after the answer.
            length: Length of the prompt.
            new: New tokens, which are not quantized.
            quant: Such as `quanto-4`; empty for none.
        """
        config: Any = self.model.config
        token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * self.model.dtype.itemsize
        share = 1.0
        if quant:
            cache = self._cache(quant)
            self.model(torch.ones(1, 256, dtype=torch.int64), past_key_values=cache)
            share = storage_bytes(list(cache.layers)) / (256 * token)
        return max(min(int((limit / token - new + 1) / share), length), 1)


def _parts(method: str) -> tuple[str, str]:
    """Press and quantization of a method, either of which may be empty."""
    if is_quantized(method):
        return "", method
    press, _, quant = method.partition("+")
    return "" if press == "full" else press, quant


def _positions(full: Tensor, pruned: Tensor) -> list[list[int]]:
    """Positions of the kept keys [H, n, D] in the full cache [H, N, D], by head.

    Raises:
        ValueError: If a kept key is not in the full cache.
    """
    positions: list[list[int]] = []
    for head in range(full.shape[0]):
        same = (pruned[head][:, None] == full[head][None]).all(-1)
        if not bool(same.any(-1).all()):
            raise ValueError("A kept key differs from all keys of the prompt, so that its position is unknown.")
        positions.append(sorted(same.int().argmax(-1).tolist()))
    return positions


if __name__ == "__main__":
    serve(Theirs())
