"""Shares what is computed of a prompt among policies.

A policy changes what is read after a prompt. While the prompt itself is read, each token attends to all earlier ones,
so that layers get the same numbers under every policy. `SharedPrefill` keeps what they returned, and returns it again
only where the input is equal bit for bit. Whatever differs is computed, as the replay of `kvzip` is. What a policy does
with the prompt (its statistics, selection and codes) and each later step are always computed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

TOKENS = 64
"""Shorter inputs are computed each time: questions and steps."""
KEPT = 2
"""Inputs that are kept of each layer: one of the prompt, others of replays."""


class SharedPrefill:
    """A context in which a model remembers what parts of its layers returned, until `clear`.

    The parts are linear layers, modules named `mlp`, and causal attention without a mask.

    Args:
        model: The model; its weights must not change in the context.
    """

    def __init__(self, model: nn.Module) -> None:
        """Remember nothing yet."""
        named = {name: module for name, module in model.named_modules() if name.endswith("mlp")}
        inside = {part for module in named.values() for part in module.modules()}
        linear = [part for part in model.modules() if isinstance(part, nn.Linear) and part not in inside]
        self.parts = [*named.values(), *linear]
        self.reused = 0
        self._known: dict[Any, list[tuple[tuple[Tensor, ...], Tensor]]] = {}
        self._compared: tuple[Tensor | None, Tensor | None] = (None, None)
        self._stock: Callable[..., Tensor] = F.scaled_dot_product_attention

    def __enter__(self) -> SharedPrefill:
        """Replace the functions that are remembered."""
        for part in self.parts:
            vars(part)["forward"] = partial(self._forward, part, part.forward)
        F.scaled_dot_product_attention = self._attend
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Restore them, and forget what was returned."""
        F.scaled_dot_product_attention = self._stock
        for part in self.parts:
            del vars(part)["forward"]
        self.clear()

    def clear(self) -> None:
        """Forget what was returned: another prompt begins."""
        self._known.clear()
        self._compared = (None, None)

    def _forward(self, part: nn.Module, forward: Callable[[Tensor], Tensor], tokens: Tensor) -> Tensor:
        if tokens.dim() < 2 or tokens.shape[-2] < TOKENS:
            return forward(tokens)
        return self._remembered(part, (tokens,), lambda: forward(tokens))

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        def run() -> Tensor:
            return self._stock(query, key, value, **options)

        if torch.compiler.is_compiling() or not options.get("is_causal") or query.shape[-2] < TOKENS:
            return run()
        some = tuple(query[..., -1, :4].flatten().tolist())  # layers have different ones
        return self._remembered((query.shape, some, *options.items()), (query, key, value), run)

    def _remembered(self, part: Any, inputs: tuple[Tensor, ...], run: Callable[[], Tensor]) -> Tensor:
        known = self._known.setdefault(part, [])
        for earlier, found in known:
            if all(map(self._equal, earlier, inputs)):
                self.reused += 1
                return found.clone()  # a cache may keep it and write to it
        found = run()
        if len(known) < KEPT:
            known.append((inputs, found.clone()))
        return found

    def _equal(self, earlier: Tensor, now: Tensor) -> bool:
        """Whether two inputs are equal; one that several parts get in a row is compared once."""
        if self._compared[0] is earlier and self._compared[1] is now:
            return True
        equal = torch.equal(earlier, now)
        if equal:
            self._compared = (earlier, now)
        return equal
