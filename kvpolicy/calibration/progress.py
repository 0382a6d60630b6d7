"""What is done of a calibration that was interrupted, one file per dictionary, each written at once."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

from torch import Tensor

from kvpolicy.calibration.dictionary import State
from kvpolicy.codecs._files import replace_file
from kvpolicy.spec.errors import KVPolicyError

UNFINISHED = "unfinished"
"""The folder inside the calibration's."""


class Progress:
    """States of trainings on disk.

    Args:
        out: The calibration's folder.
        facts: What must be the same for a training to go on: the model, the text and all options.

    Raises:
        KVPolicyError: Where another calibration is unfinished there.
    """

    def __init__(self, out: Path, facts: dict[str, Any]) -> None:
        """Look for what is there."""
        self._folder = out / UNFINISHED
        self._mark = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
        for file in sorted(self._folder.glob("*.safetensors")):
            self._read(file)

    def load(self, name: str) -> State | None:
        """How far a dictionary is; None where it was not begun."""
        file = self._file(name)
        return self._read(file) if file.exists() else None

    def save(self, name: str, state: State) -> None:
        """Write how far a dictionary is."""
        from safetensors.torch import save

        self._folder.mkdir(parents=True, exist_ok=True)
        tensors = {key: t.detach().cpu().clone() for key, t in state.tensors().items()}
        facts = {"mark": self._mark, "losses": json.dumps(state.losses)}
        replace_file(self._file(name), save(tensors, metadata=facts))

    def clear(self) -> None:
        """Remove all, once the calibration is written."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _file(self, name: str) -> Path:
        return self._folder / f"{name}.safetensors"

    def _read(self, file: Path) -> State:
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(file, framework="pt") as opened:  # pyright: ignore[reportUnknownVariableType]
                facts: dict[str, str] = opened.metadata() or {}
                tensors: dict[str, Tensor] = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
            losses = [float(loss) for loss in json.loads(facts["losses"])]
            state = State(*(tensors[key] for key in ("atoms", "first", "second", "best")), losses)  # pyright: ignore[reportCallIssue]
        except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
            raise KVPolicyError(f"The unfinished training {file} cannot be read: delete it to begin anew.") from error
        if facts.get("mark") != self._mark:
            raise KVPolicyError(
                f"The unfinished calibration {self._folder} is of another model, text or options: finish that one, "
                "delete it, or write to another folder."
            )
        return state
