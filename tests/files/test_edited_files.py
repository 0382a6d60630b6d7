"""What a cache file says of its tensors is covered by its hash, and every tensor is written as it is."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvpolicy import KVPolicyError
from kvpolicy.hf import cache_file
from kvpolicy.hf.cache_file import CacheFile
from kvpolicy.hf.cache_header import KEY


@pytest.fixture(autouse=True)
def any_header(monkeypatch: pytest.MonkeyPatch) -> None:
    """Headers here have few fields: what is tested is the hash."""
    monkeypatch.setattr(cache_file, "check_header", lambda *given: None)


def as_floats(tokens: Tensor) -> Tensor:
    return tokens.view(torch.float64)


def with_other_rows(tokens: Tensor) -> Tensor:
    return tokens.reshape(3, 4)


@pytest.mark.parametrize("edit", [as_floats, with_other_rows, torch.flatten], ids=lambda edit: edit.__name__)
def test_the_same_bytes_as_another_tensor(edit: Callable[[Tensor], Tensor], tmp_path: Path) -> None:
    path = tmp_path / "cache.safetensors"
    cache_file.write(path, CacheFile({"rows": 4, "packed": {}}, {"tokens": torch.arange(12).reshape(4, 3)}))
    header = cache_file._read_mapped(path).header
    edited = {"tokens": edit(load_file(path)["tokens"])}
    save_file(edited, path, metadata={"format": "pt", KEY: json.dumps(header)})
    with pytest.raises(KVPolicyError, match="truncated or edited"):
        cache_file.read(path)


def test_parts_of_one_storage_are_written_apart(tmp_path: Path) -> None:
    whole = torch.arange(24.0).reshape(4, 6)
    parts = {"rows": whole[1:3], "columns": whole[:, ::2], "first": whole[:1], "turned": whole.T, "whole": whole}
    cache_file.write(tmp_path / "cache.safetensors", CacheFile({}, parts))
    found = cache_file._read_mapped(tmp_path / "cache.safetensors").tensors
    assert found.keys() == parts.keys() and all(torch.equal(found[name], part) for name, part in parts.items())
    assert (tmp_path / "cache.safetensors").stat().st_size < 4 * (12 + 12 + 6 + 24 + 24) + 1500
