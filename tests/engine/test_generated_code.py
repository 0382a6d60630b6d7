"""No compiled step copies the cache: what inductor generates writes only the slots of the step's tokens.

Vectors of one number for each slot, such as scores and positions, are exempt: a step reads and ranks all slots anyway.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch._inductor import config
from torch._inductor.cpu_vec_isa import VecAVX2
from torch._inductor.graph import GraphLowering
from torch._inductor.ir import ComputedBuffer, MutationLayoutSHOULDREMOVE
from torch._inductor.virtualized import V
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from kvpolicy import Policy
from kvpolicy.engine import slot_writer
from kvpolicy.engine.layer_spec import LayerSpec
from kvpolicy.engine.layer_store import LayerStore
from kvpolicy.engine.row_limits import RowBudget
from kvpolicy.engine.slot_geometry import SlotGeometry
from kvpolicy.kernels import slot_writes
from kvpolicy.kernels.rotary import Rope
from kvpolicy.registry import lookup, names
from kvpolicy.selectors.filter_files import FILTER_FILES, FilterFile
from kvpolicy.selectors.gate_files import GATE_FILES, GateFile, LayerGate
from kvpolicy.statistics import Forward
from kvpolicy.statistics.windows import ScoreTransform
from kvpolicy_eval.common.codecs import short_windows
from kvpolicy_eval.common.synthetic import with_random_calibration
from tests.engine.parts import slots_of
from tests.sampling import product

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inductor's own


class Write(NamedTuple):
    """A write of one kernel to a buffer, or in place to an input: how many elements, and by which operations."""

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
    """What inductor makes of a function: every write to memory, and shape and dtype of every input of the graph."""

    writes: list[Write]
    inputs: list[tuple[tuple[int, ...], torch.dtype]]


class _Done(Exception):
    """The code is known, and need not be compiled."""


def generated(function: Callable[..., Any], *args: Any) -> Generated:
    """What inductor generates for a call that is one graph.

    It is read between scheduling and the C++ compiler: what is fused is known by then, and nothing runs.
    """
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
    return Generated([write for write in writes if write.in_place or write.buffer in used], inputs)


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
        is_new = not targets and not isinstance(buffer.get_output_spec(), MutationLayoutSHOULDREMOVE)
        written = [inputs[name] for name in targets] if targets else [buffer] * is_new
        for one in written:
            form = one.get_name(), _ints(one.get_size()), one.get_dtype()
            found.append(Write(*form, elements, bool(targets), operations))
    return found


def _ints(sizes: Any) -> tuple[int, ...]:
    return tuple(int(size) for size in sizes)


HEADS = 2
DIM = 32
SLOTS = 504
PROMPT = 540
CHUNK = 112
"""Codecs decode a chunk at a time, which must be a small part of the slots."""

MERGING = [f"h2o+{name}" for name in names("merger") if lookup(name)[1]().traits.when == "always"]
SELECTORS = [*names("selector"), *MERGING]
CODECS = [*names("codec")]
STEPS = ["append", "demote"]


def make_store(selector: str, codec: str, folder: Path) -> LayerStore:
    """A layer whose budget is full, after a prompt."""
    if selector == "qfilters":
        FILTER_FILES.save(folder / "filters", FilterFile({0: torch.randn(HEADS, DIM)}))
        selector = f"qfilters:file={folder / 'filters'}"
    if selector == "kvzap":
        GATE_FILES.save(folder / "gate", GateFile({0: LayerGate(torch.randn(HEADS, DIM), torch.randn(HEADS))}))
        selector = f"kvzap:file={folder / 'gate'}"
    policy = Policy.parse(f"{selector}+{short_windows(codec)}" + ("" if selector == "full" else f"@{SLOTS}"))
    stored = with_random_calibration(policy.codec, folder, HEADS, DIM, atoms=40)
    rope = None
    if stored.traits.key_space == "unrotated":
        config = LlamaConfig(hidden_size=HEADS * DIM, num_attention_heads=HEADS, max_position_embeddings=1024)
        rope = Rope(LlamaRotaryEmbedding(config), apply_rotary_pos_emb, None)
    store = LayerStore(LayerSpec(0, policy.selector, stored, policy.decode, policy.merger, rope=rope))
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, HEADS, PROMPT, DIM, generator=generator) for _ in range(3))
    keep = torch.tensor([PROMPT if selector == "full" else SLOTS])
    room = torch.full_like(keep, 7 if policy.decode == "grow" else 0)
    with torch.no_grad():
        store.initialize(k)
        _, pending = store.attend_prompt(q, k, v, None, ScoreTransform(DIM**-0.5), of_inputs(q))
        massive = torch.zeros(1, PROMPT, dtype=torch.bool)
        store.compress(pending, RowBudget(keep, room, keep + room, keep + room), massive=massive)
    return store


def of_inputs(hidden: Tensor) -> Forward:
    """Arguments of an attention module, for selectors that score its input: one head of [1, H, P, D]."""
    return Forward(nn.Identity(), hidden[:, 0], {})


def step_code(store: LayerStore, step: str) -> Generated:
    """What is generated for a decode step, or for the demotion of a block."""
    if step == "demote":
        return generated(SlotGeometry.demote, slots_of(store))
    token = [torch.zeros(1, HEADS, 1, DIM) for _ in range(3)]
    return generated(LayerStore.append, store, *token, None, ScoreTransform(DIM**-0.5), of_inputs(token[0]))


def copies(code: Generated, store: LayerStore, tokens: int) -> list[Write]:
    """Writes of more than `tokens` tokens to a tensor of slots or groups, or to a new buffer of the size of one."""
    held = [(shape, dtype) for shape, dtype in code.inputs if len(shape) >= 4]
    group_size = store.spec.codec.traits.group_size
    counts = {store.layout.slots, *store.layout.coded, *(size // group_size for size in store.layout.coded)}
    vector = HEADS * store.layout.slots
    sizes = {(math.prod(shape), shape[-1]) for shape, _ in held if shape[2] in counts and math.prod(shape) > vector}

    def is_copy(write: Write) -> bool:
        if not write.in_place:
            # A copy may be flat, but its vectors stay together; what is decoded of a chunk has others.
            is_whole = (write.elements, write.shape[-1] if write.shape else 1) in sizes
            return is_whole or write.elements >= vector * DIM // 2
        # What has as many entries as tokens or fewer can be written whole, such as parameters of a head.
        is_held = (write.shape, write.dtype) in held and write.shape[2] > tokens
        return is_held and write.elements > math.prod(write.shape) // write.shape[2] * tokens

    return [write for write in code.writes if is_copy(write)]


def is_case(row: tuple[Any, ...]) -> bool:
    """Each selector with `plain`, each codec with `h2o`; what codes no blocks demotes none in compiled code."""
    selector, codec, step = row
    traits = lookup(codec)[1]().traits
    recodes = traits.demotion is not None and traits.demotion.recodes
    if step == "demote" and (traits.block == 0 or recodes):
        return False
    return selector == "h2o" or codec == "plain"


SAMPLE = [("h2o+compensate", "plain", "append"), ("h2o", "bfp", "demote")]


@product("selector,codec,step", SELECTORS, CODECS, STEPS, sample=SAMPLE, allowed=is_case)
def test_no_copy_of_the_cache(
    selector: str, codec: str, step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvpolicy.codecs.common.CHUNK_SLOTS", CHUNK)
    store = make_store(selector, codec, tmp_path)
    appended = 2 if selector in MERGING else 1  # the new token, and the slot that takes in the evicted one
    found = copies(step_code(store, step), store, appended if step == "append" else store.spec.codec.traits.block)
    assert not found, "\n".join(map(str, found))


def scattered(target: Tensor, slots: Tensor, data: Tensor, index: Tensor | None = None) -> None:
    """What `write_slots` would be at first sight."""
    places = slots.reshape(*slots.shape, *(1,) * (target.dim() - 3)).expand(*slots.shape, *target.shape[3:])
    target.scatter_(2, places, data)


def rebuilt(target: Tensor, slots: Tensor, data: Tensor, index: Tensor | None = None) -> None:
    """A masked write over all slots."""
    at = torch.arange(target.shape[2])[:, None] == slots[..., None, :]
    at = at.any(-1).reshape(*target.shape[:3], *(1,) * (target.dim() - 3))
    target.copy_(torch.where(at, data, target))


@pytest.mark.parametrize(
    ("codec", "step", "module", "write", "shapes"),
    [
        ("plain", "append", slot_writer, scattered, 1),  # of keys and values
        ("plain", "append", slot_writer, rebuilt, 1),
        pytest.param("kivi", "demote", slot_writes, scattered, 3, marks=pytest.mark.slow),  # codes and two scales
    ],
)
def test_copies_are_found(
    codec: str, step: str, module: Any, write: Callable[..., None], shapes: int, tmp_path: Path
) -> None:
    store = make_store("h2o", codec, tmp_path)
    with mock.patch.object(module, "write_slots", write):
        found = copies(step_code(store, step), store, store.spec.codec.traits.block or 1)
    assert len(found) >= 2 and len({one.shape for one in found}) >= shapes
