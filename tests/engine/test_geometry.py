"""Both geometries have what a store asks for, and count what a step reads."""

from __future__ import annotations

import pytest

from kvpolicy import AdaKV
from kvpolicy.engine.geometry import step_bytes
from tests.engine.paged import Run
from tests.readers.bench import Layer, draw


@pytest.mark.parametrize(
    "policy", ["h2o@0.5", "full+kivi:group_size=4:residual_length=4", "full+quest:read=6:page=2:dense=0"]
)
def test_a_step_reads_what_is_counted(policy: str) -> None:
    layer = Layer(policy, [20], new=4)
    layer.prompt(*draw(40, 1))
    expected = step_bytes(layer.store.geometry).moved
    layer.step(*draw(1, 2))
    assert layer.store.contents.link.moved == layer.store.step_bytes.moved == expected > 0


def test_a_step_reads_all_pages() -> None:
    run = Run("h2o", AdaKV(), [40])
    run.prompt([60])
    expected = step_bytes(run.store.geometry).moved
    run.step()
    kinds = run.store.nbytes_by_kind()
    assert run.store.contents.link.moved == expected == kinds["exact"] + kinds["positions"]
