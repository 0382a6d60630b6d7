"""What every test shares."""

from __future__ import annotations

import gc
import os
from collections.abc import Generator
from importlib.metadata import EntryPoint
from typing import TYPE_CHECKING, Any

# Tests that happen to have many coded slots do not compile for seconds: `tests/codecs/compiling.py` switches compiled
# functions on where they are tested, which is with every codec.
os.environ.setdefault("KVPOLICY_KERNELS", "0")

import pytest
import torch

# Programs of Triton run in Python where no GPU is; Triton reads this when it is imported.
os.environ.setdefault("TRITON_INTERPRET", str(int(not torch.cuda.is_available())))

# Before pytest imports a module of the package for its doctests: it would load a second copy of that module, whose
# classes and tables are not those that the tests see.
from kvpolicy import registry
from tests.jobs import heavy_tests, missing, part_of
from tests.sampling import cases

if TYPE_CHECKING:
    from xdist.scheduler import WorkStealingScheduling

for name in registry.names():
    registry.lookup(name)

torch.set_num_threads(1)  # tiny tensors: more threads only wait for each other
os.environ.setdefault("OMP_NUM_THREADS", "1")  # the same in the processes that tests start


def pytest_collection() -> None:
    """Importing and collecting makes millions of objects that stay: there is nothing to look for."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Leave these objects out of all later garbage collections, which take a tenth of the time of tests otherwise."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make the cases of tests that are parametrized by `tests.sampling.product`."""
    for mark in metafunc.definition.iter_markers("product"):
        (some,) = mark.args
        metafunc.parametrize(some.names, [*cases(some, metafunc.config.option.markexpr)], ids=some.ids)


@pytest.hookimpl(tryfirst=True, wrapper=True)  # around the selection by markers
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Generator[None]:
    """Mark what `bash .ci/run slow` runs in place of `bash .ci/run`, and leave out other parts than `TESTS_PART`."""
    others = [item for item in items if not any(map(item.get_closest_marker, ("full", "slow", "heavy", "gpu", "vllm")))]
    heavy = heavy_tests(item.nodeid for item in others)
    for item in others:
        if item.nodeid in heavy:
            item.add_marker("heavy")
    yield
    mine = set(part_of(range(len(items)), os.environ.get("TESTS_PART", "1/1")))
    config.hook.pytest_deselected(items=[item for place, item in enumerate(items) if place not in mine])
    items[:] = [item for place, item in enumerate(items) if place in mine]


@pytest.fixture
def plugins(monkeypatch: pytest.MonkeyPatch) -> Generator[list[EntryPoint]]:
    """Entry points of plug-ins, to which a test appends."""
    points: list[EntryPoint] = []
    monkeypatch.setattr(registry, "_entry_points", lambda: points)
    registry._table.cache_clear()
    yield points
    registry._table.cache_clear()


@pytest.fixture
def fresh_compiler() -> Generator[None]:
    """What other tests compiled counts in no recompilation of this one, nor the other way round."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.hookimpl(tryfirst=True)  # before fixtures need it
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test without a tool that it needs, unless the tests with this marker are what was asked for."""
    tools = [name for mark in item.iter_markers("needs") for name in mark.args]
    if "needs" not in item.config.option.markexpr and (absent := missing(tools)):
        pytest.skip(f"needs {absent} of the extra dev: `bash .ci/run` runs it where it checks types and docs")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> WorkStealingScheduling | None:
    """Give each process of `pytest -n` neighboring tests, which share fixtures, models and ranks.

    Where `--dist` is not set, xdist would deal tests out one by one.
    """
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log) if config.option.dist == "load" else None
