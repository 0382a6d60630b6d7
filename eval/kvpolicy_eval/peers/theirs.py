"""The peers' side: kvpress and transformers' QuantizedCache, as their packages have them, in their own environment."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from kvpolicy_eval.peers.side import Answer, Side, serve, storage_bytes


def press_of(method: str, ratio: float) -> Any:
    """A press by name and options, `snapkv:window_size=32`, that removes a share `ratio`; `ada/snapkv` wraps."""
    kvpress: Any = import_module("kvpress")
    outer, slash, inner = method.partition("/")
    if slash:
        return {"ada": kvpress.AdaKVPress}[outer](press_of(inner, ratio))
    name, *options = method.split(":")
    classes = {
        "snapkv": "SnapKVPress", "tova": "TOVAPress", "streaming": "StreamingLLMPress", "knorm": "KnormPress",
        "observed": "ObservedAttentionPress", "expected": "ExpectedAttentionPress", "keydiff": "KeyDiffPress",
        "pyramid": "PyramidKVPress",
    }  # fmt: skip
    given = {key: int(value) for key, value in (option.split("=") for option in options)}
    return getattr(kvpress, classes[name])(compression_ratio=ratio, **given)


class Theirs(Side):
    """kvpress, and QuantizedCache; a method is `press`, `press+backend-bits` or `backend-bits`."""

    packages = ("kvpress", "torch", "transformers", "optimum-quanto", "hqq")

    def load(self, path: str, dtype: str = "float32", threads: int = 1, attention: str = "sdpa") -> Answer:
        """Load a model; importing kvpress changes transformers' attention functions, so that comes first."""
        import_module("kvpress")
        return super().load(path, dtype, threads, attention)

    def kept(self, ids: list[list[int]], method: str, keep: int) -> Answer:
        """Positions kept, found by their keys: a kept key is, to the bit, one of the full cache's."""
        tokens = torch.tensor(ids)
        full, pruned = self._cache(""), self._cache("")
        self.model(tokens, past_key_values=full)
        with self._pressed(method, 1 - (keep + 0.5) / tokens.shape[1]):
            self.model(tokens, past_key_values=pruned)
        pairs = zip(full.layers, pruned.layers, strict=True)
        return {"kept": [_found(a.keys[0], b.keys[0]) for a, b in pairs]}

    def answer(self, ids: list[list[int]], method: str, limit: int | None, new: int, after: int = 0) -> Answer:
        """Greedy tokens after a prompt; as `Ours.answer`, with the press entered for what it should compress."""
        tokens = torch.tensor(ids)
        press, _, quant = method.partition("+")
        if press and not press[-1].isalpha() and "-" in press and ":" not in press:
            press, quant = "", press
        length = tokens.shape[1] - after
        ratio = 0.0
        if limit is not None:
            keep = self._fits(limit, length, new + after, quant)
            ratio = 0.0 if keep >= length else 1 - (keep + 0.5) / length
        cache = self._cache(quant)
        if after:
            with self._pressed(press, ratio):
                self.model(tokens[:, :-after], past_key_values=cache, logits_to_keep=1)
            out = self._by_hand(tokens, after, new, cache)
        else:
            with self._pressed(press, ratio):
                out = self.greedy(tokens, new, cache)
        return {"ids": out, "held": storage_bytes(list(cache.layers))}

    def _by_hand(self, tokens: Tensor, after: int, new: int, cache: Any) -> list[int]:
        """As kvpress' pipeline does: the question at its true positions, then greedily."""
        place, out, step = tokens.shape[1] - after, list[int](), tokens[:, -after:]
        for _ in range(new):
            at = torch.arange(place, place + step.shape[1])[None]
            logits = self.model(step, past_key_values=cache, position_ids=at, logits_to_keep=1).logits
            place, step = place + step.shape[1], logits[:, -1:].argmax(-1)
            out.append(int(step))
        return out

    def time(self, method: str, length: int, share: float, steps: int) -> Answer:
        """Times of a prompt and of the steps after it."""
        press, _, quant = method.partition("+")
        press = "" if press == "full" else press
        return self.timed(
            length, steps, lambda: self._cache(quant), lambda cache: storage_bytes(list(cache.layers)),
            self._pressed(press, 1 - share),
        )  # fmt: skip

    def under(self, method: str, share: float) -> AbstractContextManager[Any]:
        """The model under a method that keeps a share of the prompt."""
        return self._pressed(method, share)

    def _trap_sinks(self, ids: list[int], steps: int, keep: int) -> Answer:
        kvpress: Any = import_module("kvpress")
        inner = press_of("streaming", 0.0)
        press = kvpress.DecodingPress(inner, compression_interval=16, target_size=keep, hidden_states_buffer_size=0)
        full, cache = self._cache(""), self._cache("")
        row = torch.tensor([ids])
        self.model(row, past_key_values=full)
        with press(self.model):
            self.model(row, past_key_values=cache)
            for step in range(steps):
                at = torch.tensor([[len(ids) + step]])
                self.model(torch.tensor([[step % 500 + 3]]), past_key_values=cache, position_ids=at)
        pairs = list(zip(full.layers, cache.layers, strict=True))
        alive = [
            sum(bool((now[head] == before[head, place]).all(-1).any()) for place in range(4))
            for before, now in ((a.keys[0], b.keys[0]) for a, b in pairs)
            for head in range(before.shape[0])
        ]
        return {"value": min(alive), "of": 4, "held": cache.layers[0].keys.shape[2]}

    def _trap_chunks(self, ids: list[int], chunk: int, method: str) -> Answer:
        row, cache = torch.tensor([ids]), self._cache("")
        with self._pressed(method, 0.5):
            for start in range(0, len(ids), chunk):
                at = torch.arange(start, min(start + chunk, len(ids)))
                self.model(row[:, at], past_key_values=cache, position_ids=at[None], cache_position=at)
        return {"value": cache.layers[0].keys.shape[2], "of": len(ids) // 2}

    def _trap_two(self, first: list[int], second: list[int], method: str) -> Answer:
        def prompt(ids: list[int]) -> Any:
            cache = self._cache("")
            with self._pressed(method, 0.5):
                self.model(torch.tensor([ids]), past_key_values=cache)
            return cache

        def step(cache: Any) -> Tensor:
            at = torch.tensor([[len(first)]])
            return self.model(torch.tensor([[5]]), past_key_values=cache, position_ids=at).logits

        wanted = step(prompt(first))
        again = prompt(first)
        prompt(second)
        return {"value": float((step(again) - wanted).abs().max())}

    def _trap_compiled(self, ids: list[int], method: str) -> Answer:
        model: Any = self.fresh()
        row, compiled = torch.tensor([ids]), torch.compile(model, backend="eager")
        compiled(row, past_key_values=self._cache(""))
        cache = self._cache("")
        with self._pressed(method, 0.5, model):
            compiled(row, past_key_values=cache)
        return {"value": cache.layers[0].keys.shape[2], "of": len(ids) // 2}

    def _trap_bytes(self, ids: list[int], method: str) -> Answer:
        full, cache = self._cache(""), self._cache("")
        self.model(torch.tensor([ids]), past_key_values=full)
        with self._pressed(method, 0.5):
            self.model(torch.tensor([ids]), past_key_values=cache)
        return {"value": storage_bytes(list(cache.layers)) / storage_bytes(list(full.layers))}

    def _pressed(self, method: str, ratio: float, model: Any = None) -> AbstractContextManager[Any]:
        return press_of(method, ratio)(model or self.model) if method else nullcontext()

    def _cache(self, quant: str) -> Any:
        from transformers import DynamicCache, QuantizedCache

        if not quant:
            return DynamicCache(config=self.model.config)
        backend, bits = quant.split("-")
        config: Any = self.model.config
        group = min(64, config.head_dim * config.num_key_value_heads)
        axis = 1 if backend == "hqq" else 0
        return QuantizedCache(backend, config, nbits=int(bits), axis_key=axis, axis_value=axis, q_group_size=group)

    def _fits(self, limit: int, length: int, new: int, quant: str) -> int:
        """The most tokens of the prompt that leave the cache under a limit of bytes at the end; new ones are exact."""
        config: Any = self.model.config
        token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * self.model.dtype.itemsize
        share = 1.0
        if quant:
            cache = self._cache(quant)
            self.model(torch.ones(1, 256, dtype=torch.int64), past_key_values=cache)
            share = storage_bytes(list(cache.layers)) / (256 * token)
        return max(min(int((limit / token - new + 1) / share), length), 1)


def _found(full: Tensor, pruned: Tensor) -> list[list[int]]:
    """Where each key [H, n, D] stands in the full cache [H, N, D]."""
    places: list[list[int]] = []
    for head in range(full.shape[0]):
        same = (pruned[head][:, None] == full[head][None]).all(-1)
        if not bool(same.any(-1).all()):
            raise ValueError("A kept key is none of the prompt's: positions cannot be told.")
        places.append(sorted(same.int().argmax(-1).tolist()))
    return places


if __name__ == "__main__":
    serve(Theirs())
