"""Bases of KVTC in a calibration folder: principal components, and their bits for each ratio."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from kvpolicy.codecs import _files
from kvpolicy.codecs._files import CalibrationFile
from kvpolicy.hf.kvtc.quantizer import Group
from kvpolicy.hf.kvtc.transform import Components
from kvpolicy.protocols import ModelInfo
from kvpolicy.text.errors import KVPolicyError
from kvpolicy.text.model_file import digest

METHOD = "kvtc"
"""The name of the calibration."""

SIDES = ("keys", "values")
"""What is encoded: keys without their rotation, and values."""


class Plan(NamedTuple):
    """How vectors of keys or of values are encoded.

    Attributes:
        components: Their principal components.
        groups: The groups of the first ones; the others are dropped.
    """

    components: Components
    groups: tuple[Group, ...]


class Bases:
    """The bases of a calibration, for one ratio."""

    def __init__(self, folder: str, ratio: int, model: ModelInfo) -> None:
        """Read a calibration.

        Args:
            folder: The folder.
            ratio: 16 bits over the mean bits of a number.
            model: The model that it must be for.

        Raises:
            KVPolicyError: If it cannot be read, is of another model, or was made for other ratios.
        """
        file = _files.load(folder, METHOD)
        _files.check_model(file, folder, model)
        ratios: list[int] = file.meta["ratios"]
        if ratio not in ratios:
            raise KVPolicyError(
                f"KVTC.ratio must be one that the calibration {folder!r} was made for, {', '.join(map(str, ratios))}, "
                f"got {ratio}; try ratio={min(ratios, key=lambda each: abs(each - ratio))}."
            )
        self.folder = folder
        self.ratio = ratio
        self._file: CalibrationFile = file

    @property
    def sha256(self) -> str:
        """A hash of the calibration: codes mean something with this one only."""
        return digest(self._file.meta, self._file.tensors)

    @property
    def spans(self) -> list[list[int]]:
        """The layers whose heads have components together, in order: every layer that a policy manages, once."""
        return [[*span] for span in self._file.meta["spans"]]

    def joint(self, side: str, layers: Sequence[int]) -> Plan:
        """The plan for all heads of the layers of a span together, or of one layer."""
        return self._plan(f"joint{len(layers)}.{side}", layers[0])

    def of_head(self, side: str, layer: int, head: int) -> Plan:
        """The plan for one KV head of a layer."""
        return self._plan(f"heads.{side}.{head}", layer)

    def _plan(self, name: str, layer: int) -> Plan:
        mean, directions, groups = (
            self._tensor(f"{name}.{part}", layer) for part in ("mean", "directions", f"groups{self.ratio}")
        )
        return Plan(Components(mean, directions), tuple(Group(size, bits) for size, bits in groups.tolist()))

    def _tensor(self, name: str, layer: int) -> Tensor:
        return _files.layer_tensor(self.folder, METHOD, name, layer)
