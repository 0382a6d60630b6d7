"""What tests of files share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where a cache file is written."""
    return tmp_path / "cache.safetensors"
