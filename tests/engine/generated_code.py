"""What the code that inductor generates writes to memory.

The kernels are read between scheduling and the C++ compiler: what is fused is known by then, and nothing runs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch._inductor import config
from torch._inductor.cpu_vec_isa import VecAVX2
from torch._inductor.graph import GraphLowering
from torch._inductor.ir import ComputedBuffer, MutationLayoutSHOULDREMOVE
from torch._inductor.virtualized import V


class Write(NamedTuple):
    """A write of one kernel to one buffer.

    Attributes:
        buffer: Name of the buffer in the generated code.
        shape: Its shape; of an input that is written in place, the shape of the input.
        dtype: Its dtype.
        elements: How many of its elements are written.
        in_place: Whether it is an input.
        operations: What is computed, as operations of the traced graph.
    """

    buffer: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    elements: int
    in_place: bool
    operations: tuple[str, ...]

    def __str__(self) -> str:
        """As a line of a failing test."""
        where = "in place" if self.in_place else "to a new buffer"
        return f"{self.elements:,} elements of {list(self.shape)} {self.dtype} {where}: {', '.join(self.operations)}"


class Generated(NamedTuple):
    """What inductor makes of a function.

    Attributes:
        writes: Every write to memory.
        inputs: Shape and dtype of every input of the graph.
        code: The generated code.
    """

    writes: list[Write]
    inputs: list[tuple[tuple[int, ...], torch.dtype]]
    code: str


class _Done(Exception):
    """The code is known, and need not be compiled."""


def generated(function: Callable[..., Any], *args: Any) -> Generated:
    """What inductor generates for a call that is one graph; the call itself does not happen."""
    writes: list[Write] = []
    inputs: list[tuple[tuple[int, ...], torch.dtype]] = []
    codes: list[str] = []

    def look(nodes: list[Any]) -> list[Any]:
        held: dict[str, Any] = V.graph.graph_inputs
        inputs.extend((_ints(box.get_size()), box.get_dtype()) for box in held.values() if hasattr(box, "get_size"))
        writes.extend(write for node in nodes for part in node.get_nodes() for write in _writes(part, held))
        return nodes

    def stop(code: str) -> None:
        codes.append(code)
        raise _Done

    torch.compiler.reset()
    patched = config.patch(_post_fusion_custom_pass=look, fx_graph_cache=False)
    # Inductor would compile a program for each instruction set that the processor has, to see which ones work.
    one_set = mock.patch("torch._inductor.cpu_vec_isa.valid_vec_isa_list", lambda: [VecAVX2()])
    stopped = mock.patch.object(GraphLowering, "save_output_code", staticmethod(stop))
    with patched, one_set, stopped, torch.no_grad():
        try:
            torch.compile(function, fullgraph=True, dynamic=False)(*args)
        except Exception:
            if not codes:
                raise
    torch.compiler.reset()
    (code,) = codes
    used = set(re.findall(r"\bbuf\d+\b", code))
    # A buffer that only its own kernel reads is never in memory, and the code does not name it.
    return Generated([write for write in writes if write.in_place or write.buffer in used], inputs, code)


def _writes(node: Any, inputs: dict[str, Any]) -> list[Write]:
    """The writes of one node of the schedule."""
    ir: Any = node.node
    operations = tuple(sorted({str(origin.target) for origin in ir.get_origins() if origin.op == "call_function"}))
    found: list[Write] = []
    for output in node.get_outputs():
        buffer: Any = output.node
        targets: list[str] = [name for name in output.get_mutations() if name in inputs]
        if isinstance(ir, ComputedBuffer):
            # A scatter iterates over what it writes, and not over its target.
            elements = math.prod(_ints(ir.data.ranges))
        elif targets:
            elements = max(math.prod(_ints(inputs[name].get_size())) for name in targets)
        elif buffer.has_tensor_output():
            elements = math.prod(_ints(buffer.get_size()))
        else:
            continue
        for name in targets:
            shape = _ints(inputs[name].get_size())
            dtype = inputs[name].get_dtype()
            found.append(Write(name, shape, dtype, elements, True, operations))
        if not targets and not isinstance(buffer.get_output_spec(), MutationLayoutSHOULDREMOVE):
            shape = _ints(buffer.get_size())
            found.append(Write(buffer.get_name(), shape, buffer.get_dtype(), elements, False, operations))
    return found


def _ints(sizes: Any) -> tuple[int, ...]:
    return tuple(int(size) for size in sizes)
