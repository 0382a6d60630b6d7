"""Backends of `torch.compile` that run what was traced, and know what it was.

`Graphs` knows what CUDA graphs ask of compiled code, as far as a CPU can tell: it writes only to tensors that stay in
place.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._guards import TracingContext
from transformers import CompileConfig


class Counter:
    """A backend that counts graphs and their dynamic sizes; copies of a config share it."""

    def __init__(self) -> None:
        self.graphs = 0
        self.sizes = 0

    def __call__(self, graph: Any, inputs: Any, **options: Any) -> Any:
        self.graphs += 1
        self.sizes += sum(isinstance(each, torch.SymInt) for each in inputs)
        return graph

    def __deepcopy__(self, memo: Any) -> Counter:
        return self

    @property
    def config(self) -> CompileConfig:
        return CompileConfig(backend=self, mode="default")


class Graphs:
    """A backend of `torch.compile` that runs what was traced, and knows what each graph writes to.

    Attributes:
        count: How often something was compiled.
        written: The inputs that each graph writes to.
        static: The inputs of each graph whose addresses stay: parameters, and tensors that were marked.
    """

    def __init__(self) -> None:
        self.count = 0
        self.written: list[set[int]] = []
        self.static: list[set[int]] = []
        self._backend: Any = aot_autograd(fw_compiler=self._look)

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.count += 1
        return self._backend(graph, inputs)

    def _look(self, graph: Any, _: Any) -> Any:
        context = TracingContext.try_get()
        assert context is not None and context.fw_metadata is not None
        self.written.append(set(context.fw_metadata.mutated_inp_runtime_indices))
        self.static.append(set(context.fw_metadata.static_input_indices))
        return graph
