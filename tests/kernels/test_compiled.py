"""Functions that are compiled once: how often, when, and what happens if they cannot be."""

from __future__ import annotations

import itertools
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from kvpolicy.kernels import compiled
from kvpolicy.kernels.compiled import MIN_SLOTS, call, is_compiled, widen

ROOT = Path(__file__).parents[2]


def scaled(t: Tensor, by: Tensor, power: int) -> Tensor:
    return t.float() * by**power


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is compiled yet, and dynamo alone compiles: what it does is tested, and not what inductor makes of it."""
    monkeypatch.setattr(compiled, "BACKEND", "eager")
    monkeypatch.setattr(compiled, "_compiled", {})
    monkeypatch.setattr(compiled, "_failures", [])
    monkeypatch.setattr(compiled, "_is_on", True)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def test_many_shapes_are_compiled_each_and_none_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "MOST_GRAPHS", 2)
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        for heads in range(1, 4):
            for power in range(1, 4):
                t = torch.randn(1, heads, 7, 2)
                by = torch.randn(1, heads, 7, 2)
                assert torch.equal(call(scaled, t, by, power=power), scaled(t, by, power))
    assert graphs() == len(compiled._compiled) == 9


def test_any_number_of_slots_needs_one_graph() -> None:
    for slots in (5, 9, 13, 17, 40, 41, 5):
        t = torch.randn(2, 3, slots, 4)
        assert torch.equal(call(scaled, t, t, power=2), scaled(t, t, 2))
    assert graphs() == len(compiled._compiled) == 1


def test_tensors_of_the_caller_are_not_marked() -> None:
    t = torch.randn(2, 3, 5, 4)
    call(scaled, t, t.clone(), power=2)
    assert not [name for name in vars(t) if "dynamic" in name]


def of_groups(t: Tensor, by: Tensor) -> Tensor:
    return t.unflatten(2, (by.shape[2], -1)) * by[:, :, :, None]


def test_any_number_of_groups_and_rows_needs_two_graphs() -> None:
    for rows, groups in ((1, 64), (1, 65), (1, 200), (2, 70), (3, 7)):
        t = torch.randn(rows, 3, 4 * groups, 2)
        by = torch.randn(rows, 3, groups, 2)
        assert torch.equal(call(of_groups, t, by), of_groups(t, by))
    assert graphs() == 2 and len(compiled._compiled) == 1


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, lambda: torch.autocast("cpu", torch.bfloat16)])
def test_modes_of_the_caller_compile_nothing_anew(mode: Any) -> None:
    t = torch.randn(1, 2, 5, 4)
    call(scaled, t, t, power=2)
    before = graphs()
    with mode():
        out = call(scaled, t, t, power=2)
    assert graphs() == before and out.dtype == torch.float32


def test_tensors_of_every_mode_are_read_by_one_graph() -> None:
    made = {mode: [] for mode in ("inference", "gradient", "ordinary")}
    for mode, tensors in made.items():
        with torch.inference_mode(mode == "inference"):
            tensors += [torch.randn(1, 2, 5, 4, requires_grad=mode == "gradient") for _ in range(2)]
    for first, second in itertools.product(made, made):
        for inside in (True, False):
            with torch.inference_mode(inside), torch.no_grad():
                t = made[first][0]
                by = made[second][1]
                out = call(scaled, t, by, power=2)
                assert torch.equal(out, scaled(t, by, 2)) and not out.requires_grad
    assert graphs() == 1


def test_too_many_graphs_are_not_silent(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(compiled, "MOST_GRAPHS", 2)
    for rows in range(1, 5):  # the second number of rows is compiled as any number
        t = torch.randn(rows, 2, 5, 4)
        for given in (t, t.mT.contiguous().mT, torch.randn(rows, 2, 5, 8)[..., ::2]):
            assert torch.equal(call(scaled, given, given.clone(), power=2), scaled(given, given.clone(), 2))
    assert "codes are decoded" in caplog.text and compiled.obstacle() == "scaled could not be compiled"


def test_threads_share_what_is_compiled() -> None:
    t = torch.randn(1, 2, 5, 4)
    found: list[Tensor] = []
    threads = [threading.Thread(target=lambda: found.append(call(scaled, t, t, power=3))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 6 and all(torch.equal(out, scaled(t, t, 3)) for out in found)
    assert len(compiled._compiled) == 1


def test_only_many_slots_on_a_cpu_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_compiled(torch.empty(1, 2, MIN_SLOTS, 4)) == (not compiled.obstacle())
    assert is_compiled(torch.empty(4, 2, MIN_SLOTS // 4, 4)) == (not compiled.obstacle())
    assert not is_compiled(torch.empty(1, 2, MIN_SLOTS - 1, 4))
    assert not is_compiled(torch.empty(3, 2, MIN_SLOTS // 4, 4))
    assert not is_compiled(torch.empty(1, 2, MIN_SLOTS, 4, device="meta"))
    monkeypatch.setattr(compiled, "_is_on", False)
    assert not is_compiled(torch.empty(1, 2, MIN_SLOTS, 4)) and compiled.obstacle() == "KVPOLICY_KERNELS is 0"


def test_a_mode_that_sees_every_operation_sees_decoding() -> None:
    with FlopCounterMode(display=False):
        assert not is_compiled(torch.empty(1, 2, MIN_SLOTS, 4))


def test_a_compiler_that_is_missing_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compiled.shutil, "which", lambda name: None)
    compiled._missing_compiler.cache_clear()
    try:
        for _ in range(3):
            assert not is_compiled(torch.empty(1, 2, MIN_SLOTS, 4))
        assert compiled.obstacle() == "no C++ compiler was found"
    finally:
        compiled._missing_compiler.cache_clear()
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


def test_a_compiler_that_fails_is_not_asked_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(module: Any, inputs: Any) -> Any:
        raise RuntimeError("no linker")

    monkeypatch.setattr(compiled, "BACKEND", broken)
    t = torch.randn(1, 2, 5, 4)
    assert torch.equal(call(scaled, t, t, power=2), scaled(t, t, 2))
    assert "no linker" in caplog.text and compiled.obstacle() == "scaled could not be compiled"
    assert not is_compiled(torch.empty(1, 2, MIN_SLOTS, 4))


def test_small_tensors_are_widened_in_compiled_code_too() -> None:
    half = torch.randn(2, 3).half()
    assert torch.equal(widen(half), half.float()) and widen(half.float()).dtype == torch.float32
    inside = torch.compile(lambda t: widen(t) * 2, backend="eager", fullgraph=True)
    assert torch.equal(inside(half), half.float() * 2)


SUM = """
import torch
from kvpolicy.kernels import compiled
from tests.kernels.test_compiled import sums

compiled.SLOW_COMPILATION = 1000.0
t = torch.arange(1000.0).repeat(1, 1, 7, 1)
print(float((compiled.call(sums, t) - t.sum(-1)).abs().max()), torch.backends.cpu.get_cpu_capability())
"""


def sums(t: Tensor) -> Tensor:
    return (t * 1.0).sum(-1)


@pytest.mark.slow
@pytest.mark.skipif(bool(compiled._missing_compiler("cpu")), reason="a compiler is needed")
@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() != "AVX512", reason="two kinds of vectors are needed")
def test_a_cache_on_disk_serves_processors_with_other_vectors(tmp_path: Path) -> None:
    for capability in (None, "avx2", None):
        env = dict(os.environ, TORCHINDUCTOR_CACHE_DIR=str(tmp_path), KVPOLICY_KERNELS="1")
        env.pop("ATEN_CPU_CAPABILITY", None)
        env |= {} if capability is None else {"ATEN_CPU_CAPABILITY": capability}
        done = subprocess.run(
            [sys.executable, "-c", SUM], env=env, cwd=ROOT, capture_output=True, text=True, check=True
        )
        error, vectors = done.stdout.split()
        assert float(error) < 1, done.stdout
        assert vectors == ("AVX2" if capability else "AVX512")


def test_the_options_of_a_compilation_name_the_vectors_of_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "BACKEND", "inductor")
    widths: list[int] = []
    for capability in ("default", "avx2"):
        monkeypatch.setenv("ATEN_CPU_CAPABILITY", capability)
        options = compiled._options_of("cpu")
        assert options is not None
        widths.append(options["cpp.simdlen"])
    assert widths[0] == 0
    assert compiled._options_of("cuda") == compiled.INDUCTOR_OPTIONS
    if torch.backends.cpu.get_cpu_capability() != "DEFAULT":
        assert widths[1] > 0
