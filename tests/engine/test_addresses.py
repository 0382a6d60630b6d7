"""What CUDA graphs ask of a compiled step, as far as a CPU can tell: it writes only to tensors that stay in place."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._guards import TracingContext
from torch.utils._python_dispatch import TorchDispatchMode

import kvpolicy
from kvpolicy import PolicyCache
from kvpolicy.engine.state import tensors
from tests.conformance.models import build
from tests.conformance.play import forward, make_batch
from tests.conformance.policies import CODECS, words

PROMPT, STEPS = 24, 12
POLICIES = [
    *(words("h2o", codec) for codec in CODECS),
    "squeeze+kvcrush@0.5", "snapkv@0.5", "tova@0.5", "h2o:decode=grow@0.5",
]  # fmt: skip


@pytest.fixture(autouse=True)
def fresh() -> Generator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def held(cache: PolicyCache) -> list[int]:
    """Addresses of all that a step reads and writes."""
    found: list[int] = []
    for layer in cache.policy_layers:
        assert layer.keys is not None and layer.values is not None
        found += [t.data_ptr() for t in (layer.keys, layer.values, layer.positions, layer.length, layer.budget)]
        store = layer.store
        parts = (store.state, store.codes, store.calibrations, store.limits or ())
        found += [t.data_ptr() for part in parts for t in tensors(part)]
    return found


@pytest.mark.parametrize("policy", POLICIES)
def test_a_step_writes_to_static_tensors_alone(policy: str) -> None:
    """The condition under which `mode="reduce-overhead"` records a graph instead of giving up."""
    seen: list[tuple[set[int], set[int]]] = []

    def look(graph: Any, inputs: Any) -> Any:
        context = TracingContext.try_get()
        assert context is not None and context.fw_metadata is not None
        about = context.fw_metadata
        seen.append((set(about.mutated_inp_runtime_indices), set(about.static_input_indices)))
        return graph

    model = build("llama")
    ids, mask = make_batch([PROMPT], [PROMPT] + [1] * STEPS)
    with kvpolicy.attach(model, policy), torch.no_grad():
        cache = PolicyCache(model, new=STEPS + 1)  # a tick makes room for the step behind it
        forward(model, ids, mask, 0, PROMPT, cache)
        before = held(cache)
        step = torch.compile(model, backend=aot_autograd(fw_compiler=look), fullgraph=True)
        for column in range(PROMPT, PROMPT + STEPS):
            forward(step, ids, mask, column, column + 1, cache)
            cache.tick()
    ((written, static),) = seen
    assert written and written <= static
    assert held(cache) == before, "a recorded graph would be recorded again"


class Reads(TorchDispatchMode):
    """Counts what waits for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        self.count += name in ("aten::_local_scalar_dense", "aten::nonzero", "aten::equal")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("policy", ["squeeze+h2o@0.5", "kvcrush@0.5", "snapkv+kivi:group_size=4:residual_length=4@0.5"])
def test_an_eager_step_waits_for_little(policy: str) -> None:
    """Twice, for the offset and the width of a mask, which transformers asks for; never once per layer."""
    model = build("llama")
    ids, mask = make_batch([PROMPT], [PROMPT] + [1] * STEPS)
    with kvpolicy.attach(model, policy), torch.no_grad():
        cache = PolicyCache(model, new=STEPS)
        forward(model, ids, mask, 0, PROMPT, cache)
        counts: list[int] = []
        for column in range(PROMPT, PROMPT + STEPS):
            with Reads() as reads:
                model(ids[:, column, None], position_ids=torch.tensor([[column]]), past_key_values=cache)
            counts.append(reads.count)
    assert min(counts) <= 2
