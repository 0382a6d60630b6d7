"""No compiled step copies the cache: what inductor generates writes only the slots of the step's tokens.

Vectors of one number for each slot, such as scores and positions, are exempt: a step reads and ranks all slots anyway.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
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
from tests.engine.generated_code import Generated, Write, generated
from tests.engine.parts import slots_of
from tests.sampling import product

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inductor's own

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

EXCEPTIONS: dict[tuple[str, str, str], str] = {}
"""Selector or codec, step, and a part of what is written: why it cannot be avoided. There is nothing to excuse now."""


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
    excused = [part for name, at, part in EXCEPTIONS if name in (selector, codec) and at == step]
    left = [write for write in found if not any(part in str(write) for part in excused)]
    assert not left, "\n".join(map(str, left))
    unused = [part for part in excused if not any(part in str(write) for write in found)]
    assert not unused, f"these exceptions are not needed: {unused}"


def scattered(target: Tensor, slots: Tensor, data: Tensor, index: Tensor | None = None) -> None:
    """What `write_slots` would be at first sight."""
    places = slots.reshape(*slots.shape, *(1,) * (target.dim() - 3)).expand(*slots.shape, *target.shape[3:])
    target.scatter_(2, places, data)


def rebuilt(target: Tensor, slots: Tensor, data: Tensor, index: Tensor | None = None) -> None:
    """A masked write over all slots."""
    at = torch.arange(target.shape[2])[:, None] == slots[..., None, :]
    at = at.any(-1).reshape(*target.shape[:3], *(1,) * (target.dim() - 3))
    target.copy_(torch.where(at, data, target))


@pytest.mark.parametrize("write", [scattered, rebuilt])
def test_copies_are_found(write: Callable[..., None], tmp_path: Path) -> None:
    store = make_store("window", "plain", tmp_path)
    with mock.patch.object(slot_writer, "write_slots", write):
        found = copies(step_code(store, "append"), store, 1)
    assert len(found) >= 2, "keys and values"
    assert all(one.elements == HEADS * SLOTS * DIM for one in found)


@pytest.mark.slow
def test_copies_of_codes_are_found(tmp_path: Path) -> None:
    store = make_store("h2o", "kivi", tmp_path)
    with mock.patch.object(slot_writes, "write_slots", scattered):
        found = copies(step_code(store, "demote"), store, store.spec.codec.traits.block)
    assert len({one.shape for one in found}) >= 3, "codes, scales of values, scales of keys"
