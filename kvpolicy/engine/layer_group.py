"""Layers that store a part of what they hold together, in the first of them.

The layers of a group hold the same tokens in the same slots, and empty and fill them in the same order, each when its
own turn comes. A block can be encoded only when every layer has given its keys and values. So the blocks of the first
layers wait for those of the last one. Nothing reads the codes in between: layers are demoted one after the other, in a
prompt before the attention of the next layer, and between steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, cast

from torch import Tensor

from kvpolicy.engine.layer_spec import LayerSpec
from kvpolicy.engine.layer_tensors import LayerTensors
from kvpolicy.engine.state import owned
from kvpolicy.protocols import Codes, GroupStage, StageStore
from kvpolicy.text.errors import KVPolicyError


class Member(Protocol):
    """A layer of a group.

    Attributes:
        spec: The parts of the policy.
        tensors: Every tensor of the layer.
    """

    spec: LayerSpec
    tensors: LayerTensors


class Block(NamedTuple):
    """Tokens that one layer writes to a stage.

    Attributes:
        stage: The stage.
        store: Gives the tensors of the stage in this layer, when the block is encoded.
        keys: [B, H, n, D], in the codec's key space.
        values: [B, H, n, D].
        slots: Slot of each token in the stage, [B, H, n] int64.
        write_mask: Which of the n tokens are written, [B, H, n] bool.
        occupied: Which slots hold a token that stays, [B, H, C] bool.
    """

    stage: int
    store: Callable[[], StageStore]
    keys: Tensor
    values: Tensor
    slots: Tensor
    write_mask: Tensor
    occupied: Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return self.keys.nbytes + self.values.nbytes

    def owned(self) -> Block:
        """Copy keys and values that are views, so that their base can be freed."""
        return self._replace(keys=owned(self.keys), values=owned(self.values))


class LayerGroup:
    """Layers that store a part of what they hold together.

    Attributes:
        layers: The layers, by their number in the group.
    """

    def __init__(self, size: int) -> None:
        """Make a group of `size` layers, which join it one by one."""
        self.layers: dict[int, Member] = {}
        self._waiting: dict[int, list[Block]] = {number: [] for number in range(size)}

    def join(self, number: int, layer: Member) -> None:
        """Take in a layer, in place of one of the same number."""
        self.layers[number] = layer
        self._waiting[number] = []

    @property
    def waits(self) -> bool:
        """Whether a block of some layers waits for those of the others."""
        return any(self._waiting.values())

    def waiting_nbytes(self, number: int) -> int:
        """Bytes of the blocks of a layer that wait for the others."""
        return sum(block.nbytes for block in self._waiting[number])

    def shared(self, stage: int) -> Codes:
        """The part of the first layer that the stages of all layers read; see `GroupStage.shared`."""
        first = self.layers[0]
        return self._stage(stage).shared(first.tensors.codes[stage])

    def write(self, number: int, block: Block) -> None:
        """Encode a block of a layer together with those of the other layers, once it is there in all of them.

        Raises:
            KVPolicyError: If the layers are on different devices.
        """
        is_last = all(self._waiting[other] for other in self._waiting if other != number)
        self._waiting[number].append(block if is_last else block.owned())
        if not is_last:
            return
        blocks = [waiting.pop(0) for waiting in self._waiting.values()]
        devices = {each.keys.device for each in blocks}
        if len(devices) > 1:
            indices = [layer.spec.layer_idx for _, layer in sorted(self.layers.items())]
            raise KVPolicyError(
                f"Layers that share what they store must be on one device, got {sorted(map(str, devices))} for the "
                f"layers {indices}; try a codec that encodes every layer by itself, such as tokenwise."
            )
        alike = {(each.stage, each.slots.shape) for each in blocks}
        assert len(alike) == 1, "the layers of a group fill their stages alike"
        last = blocks[-1]
        self._stage(last.stage).write_group(
            tuple(each.store() for each in blocks),
            tuple(each.keys for each in blocks),
            tuple(each.values for each in blocks),
            last.slots,
            last.write_mask,
            last.occupied,
        )

    def _stage(self, stage: int) -> GroupStage:
        return cast(GroupStage, self.layers[0].spec.stages[stage])


def places(groups: Sequence[Sequence[int]]) -> dict[int, tuple[LayerGroup, int]]:
    """The group of each layer that is in one, and its number there, by its index in the model.

    Args:
        groups: The layers of each group.
    """
    made = [(LayerGroup(len(layers)), layers) for layers in groups]
    return {index: (group, number) for group, layers in made for number, index in enumerate(layers)}
