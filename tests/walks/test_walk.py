"""Whatever is done to caches in whatever order, what must hold holds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.sampling import product
from tests.walks.compiled import CompiledWalk
from tests.walks.walk import Walk


def run(walk: Walk, seed: int) -> None:
    try:
        walk.run()
    except Exception as error:
        raise AssertionError("\n".join([f"walk {seed}", *walk.notes])) from error


@product("seed", range(3000), sample=[(seed,) for seed in range(6)])
@pytest.mark.filterwarnings("ignore")
def test_the_life_of_caches(seed: int, tmp_path: Path) -> None:
    run(Walk(seed, tmp_path), seed)


@product("seed", range(500), sample=[(seed,) for seed in range(6)])
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("fresh_compiler")
def test_the_life_of_caches_with_compiled_steps(seed: int, tmp_path: Path) -> None:
    with torch._dynamo.config.patch(recompile_limit=200):  # else many steps of one model run uncompiled
        run(CompiledWalk(seed, tmp_path), seed)
