"""Whatever is done to caches in whatever order, what must hold holds."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sampling import product
from tests.walks.walk import Walk


@product("seed", range(3000), sample=[(seed,) for seed in range(6)])
@pytest.mark.filterwarnings("ignore")
def test_the_life_of_caches(seed: int, tmp_path: Path) -> None:
    walk = Walk(seed, tmp_path)
    try:
        walk.run()
    except Exception as error:
        raise AssertionError("\n".join([f"walk {seed}", *walk.notes])) from error
