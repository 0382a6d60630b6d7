"""A calibration of KVTC for small models, and caches whose tokens are encoded by it."""

from __future__ import annotations

import functools
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

import kvpolicy
from kvpolicy import PolicyCache
from kvpolicy.calibration import calibrate_kvtc
from kvpolicy.codecs._files import CalibrationFile, load, save
from tests.conformance.models import build
from tests.conformance.play import forward, make_batch

LENGTH = 40
"""Tokens of the longest row."""
SINKS = 2
WINDOW = 5


def windows() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, 40, (120,), generator=generator) for _ in range(3)]


def calibrated(folder: Path, family: str = "llama", layers: int = 1, dtype: torch.dtype = torch.float32) -> Any:
    """A model with a calibration in a folder."""
    file = _calibration(family, layers, dtype)
    save(folder, "kvtc", file.meta, file.tensors)
    return build(family, dtype, layers=2)


@functools.cache
def _calibration(family: str, layers: int, dtype: torch.dtype) -> CalibrationFile:
    with TemporaryDirectory() as folder:
        calibrate_kvtc(build(family, dtype, layers=2), windows(), folder, ratios=[1, 2, 4], layers=layers)
        return load(folder, "kvtc")


def spec(folder: Path, ratio: int = 2, sinks: int = SINKS, window: int = WINDOW) -> str:
    return f"kvtc:calibration={folder}:ratio={ratio}:sinks={sinks}:window={window}"


def filled(model: Any, lengths: list[int], steps: int = 2) -> tuple[PolicyCache, Tensor, Tensor]:
    """A cache of a prompt and some steps, on a model with a policy attached."""
    ids, mask = make_batch(lengths, [max(lengths), *[1] * steps])
    cache = PolicyCache(model)
    forward(model, ids, mask, 0, max(lengths), cache)
    for column in range(max(lengths), ids.shape[1]):
        forward(model, ids, mask, column, column + 1, cache)
    return cache, ids, mask


def passed(model: Any, cache: PolicyCache, path: Path, form: str | None) -> PolicyCache:
    """The cache behind its file."""
    cache.save(path, compress=form)
    return kvpolicy.PolicyCache.load(model, path)
