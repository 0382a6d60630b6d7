"""Checkpoints of an unfinished calibration: one file per dictionary, each replaced atomically."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

from torch import Tensor

from kvpolicy.calibration.dictionary import State
from kvpolicy.text.errors import KVPolicyError
from kvpolicy.text.formats import replace_file

UNFINISHED = "unfinished"
"""The subfolder of checkpoints in the folder of a calibration."""


class Progress:
    """Training states on disk.

    Args:
        out: The folder of the calibration.
        facts: Facts that must be equal for a training to be resumed: the model, the text and all options.

    Raises:
        KVPolicyError: If the folder contains checkpoints of another calibration.
    """

    def __init__(self, out: Path, facts: dict[str, Any]) -> None:
        """Read the checkpoints in the folder."""
        self._folder = out / UNFINISHED
        self._digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
        # All are read now, so that those of another calibration are refused before the model runs.
        for file in sorted(self._folder.glob("*.safetensors")):
            self._read(file)

    def load(self, name: str) -> State | None:
        """The state of a dictionary; None if its training has not started."""
        file = self._file(name)
        return self._read(file) if file.exists() else None

    def save(self, name: str, state: State) -> None:
        """Write the state of a dictionary."""
        from safetensors.torch import save

        self._folder.mkdir(parents=True, exist_ok=True)
        tensors = {key: t.detach().cpu().clone() for key, t in state.tensors().items()}
        facts = {"mark": self._digest, "losses": json.dumps(state.losses)}
        replace_file(self._file(name), save(tensors, metadata=facts))

    def _file(self, name: str) -> Path:
        return self._folder / f"{name}.safetensors"

    def _read(self, file: Path) -> State:
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(file, framework="pt") as opened:  # pyright: ignore[reportUnknownVariableType]
                facts: dict[str, str] = opened.metadata() or {}
                tensors: dict[str, Tensor] = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
            losses = [float(loss) for loss in json.loads(facts["losses"])]
            state = State(*(tensors[key] for key in ("atoms", "best")), losses)  # pyright: ignore[reportCallIssue]
        except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
            raise KVPolicyError(
                f"The checkpoint {file} must be a safetensors file of a training, got one that cannot be parsed; try "
                "deleting it."
            ) from error
        if facts.get("mark") != self._digest:
            raise KVPolicyError(
                f"The unfinished calibration in {self._folder} must be of the same model, text and options, got a "
                "different one; try finishing or deleting it, or another folder."
            )
        return state


def clear(out: Path) -> None:
    """Remove all checkpoints in the folder of a calibration."""
    shutil.rmtree(out / UNFINISHED, ignore_errors=True)
