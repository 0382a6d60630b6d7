"""The life of a layer on a device that is not the host's, which `test_host_memory.py` runs in a process of its own.

Prompts, padded rows, steps that evict or grow, sorted slots, selected rows, a rollback and a file: what touches keys
and values. What is computed is what the same calls compute on a CPU.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from kvpolicy.engine import snapshot
from kvpolicy.engine.invariants import check_invariants
from kvpolicy.engine.layer_store import LayerStore
from kvpolicy.protocols import SINGLE_RANK
from kvpolicy.readers.shadowkv import ShadowKV
from tests.engine.elsewhere import DEVICE, elsewhere, local, traffic
from tests.engine.parts import index_of
from tests.readers.bench import HEADS, Layer, draw

HERE = torch.device("cpu")


def live(policy: str, device: torch.device) -> tuple[Layer, list[Tensor]]:
    """The layer after its life on a device, and every output."""
    layer = Layer(policy, [13, 9] if "@" in policy else [26, 17], new=6)
    outs: list[Tensor] = []

    def there(*given: Tensor) -> list[Tensor]:
        return [t.to(device) for t in given]

    def steps(count: int, seed: int, rows: int, valid: bool = False) -> None:
        for step in range(count):
            mask = torch.tensor([[True], [step % 3 > 0]]) if valid else None
            given = there(*draw(1, seed + step, batch=rows))
            given += [] if mask is None else there(mask)
            traffic.clear()
            outs.append(layer.step(*given))
            if device != HERE and mask is None and layer.store.contents.undo is None:
                check_traffic(layer, rows)
            layer.between()

    prompt = there(*draw(26, 1, batch=2), torch.arange(26) >= torch.tensor([[0], [9]]))
    outs.append(layer.prompt(*prompt))
    steps(3, 20, 2, valid=True)
    layer.budgets = [budget + 5 for budget in layer.budgets]
    outs.append(layer.prompt(*there(*draw(5, 77, batch=2))))
    steps(5, 40, 2)
    layer.store.map_rows(lambda t: t[torch.tensor([1, 0, 1], device=t.device)])
    layer.store.journal.mark(4)
    steps(4, 60, 3)
    layer.store.journal.roll_back(2)
    layer.store = reloaded(layer, device)
    steps(2, 80, 3)
    return layer, local(outs)


def check_traffic(layer: Layer, rows: int) -> None:
    """The bytes that crossed between the devices are those that the layer counted, and the numbers of slots."""
    moved = layer.store.step_bytes
    assert traffic["there", True] == moved.loaded and traffic["back", True] == moved.stored
    assert traffic["there", False] == 0
    shape = index_of(layer.store).shape
    numbers = 0
    if layer.store.spec.host:  # of the new token, of its page, and of what was chosen
        reader = layer.policy.reader
        # Keys that are read as they are stored.
        own = reader.traits.recent + reader.sinks if isinstance(reader, ShadowKV) else 0
        numbers = 1 + (0 if shape is None else shape.page + shape.slots + own)
    assert traffic["back", False] == 8 * rows * HEADS * numbers


def reloaded(layer: Layer, device: torch.device) -> LayerStore:
    """A store that was filled with the content of another one."""
    other = LayerStore(layer.store.spec)
    held = snapshot.take(layer.store)
    snapshot.put(other, held, SINGLE_RANK, torch.float32, device)
    check_invariants(other, keeps_newest=False)
    return other


def main(policies: list[str]) -> None:
    """Compare both devices; `check_invariants` looks at where tensors lie after every change."""
    with torch.no_grad():
        wanted = {policy: live(policy, HERE)[1] for policy in policies}
    with torch.no_grad(), elsewhere():
        for policy, expected in wanted.items():
            layer, found = live(policy, DEVICE)
            assert layer.store.tensors.device == DEVICE
            assert layer.store.tensors.keys.device == (HERE if layer.store.spec.host else DEVICE), policy
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
            print("same", policy)


if __name__ == "__main__":
    main(sys.argv[1:])
