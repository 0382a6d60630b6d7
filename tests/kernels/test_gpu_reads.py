"""Reads of codes in Triton give what the plain functions give, in Triton's interpreter, and compile for GPUs."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from kvpolicy.kernels import compiled, fused_read
from tests.sampling import each_once, product

pytest.importorskip("triton", reason="needs Triton, which is there on Linux")

from triton import knobs

pytestmark = pytest.mark.skipif(not knobs.runtime.interpret, reason="a GPU is there, and tests/codecs/test_fused.py")


@pytest.fixture
def reads() -> Any:
    """The module, whose programs run in Python on a CPU, by `TRITON_INTERPRET` in tests/conftest.py."""
    from kvpolicy.kernels import gpu_reads

    return gpu_reads


class Layer:
    """Random codes of a layer of two rows and three heads, part of longer tensors, so that they have strides."""

    def __init__(self, dim: int, slots: int, group: int, groups: int, bits: int) -> None:
        self.generator = torch.Generator().manual_seed(dim + slots + group)
        shape = (2, 3, slots + 2, dim * bits // 8)
        self.codes = torch.randint(0, 256, shape, generator=self.generator, dtype=torch.uint8)[:, :, :slots]
        self.scale = (self.draw(2, 3, slots, groups).abs() + 0.01).half()
        self.zero = self.draw(2, 3, slots, groups).half()
        self.queries = self.draw(2, 3, group, dim)
        self.sums = self.queries.unflatten(-1, (groups, -1)).sum(-1)
        self.weights = self.draw(2, 3, group, slots).softmax(-1)
        self.bits = bits

    def draw(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)


def check(got: Tensor | None, want: Tensor) -> None:
    assert got is not None and got.dtype == torch.float32 and got.shape == want.shape
    torch.testing.assert_close(got, want, rtol=0, atol=2e-6 * float(want.abs().max()))


SHAPES = [
    (64, 160, 2, 1, 4),
    (64, 100, 4, 2, 4),
    (128, 70, 1, 4, 2),
    (80, 33, 3, 4, 4),
    (96, 50, 8, 3, 8),
    (16, 1, 2, 1, 4),
    (32, 65, 5, 1, 2),
    (128, 40, 4, 1, 8),
]
"""Channels, slots, query heads, groups of channels, and bits."""


@product("shape,has_zero", SHAPES, [True, False], sample=each_once(SHAPES, [True, False]))
def test_groups_of_channels(reads: Any, shape: tuple[int, ...], has_zero: bool) -> None:
    case = Layer(*shape)
    zero = case.zero if has_zero else case.zero[..., :0]
    score = (case.codes, case.scale, zero, case.queries, case.sums, case.bits)
    mix = (case.codes, case.scale, zero, case.weights, case.bits)
    check(reads.score_channel_groups(*score), fused_read.score_channel_groups(*score))
    check(reads.mix_channel_groups(*mix), fused_read.mix_channel_groups(*mix))


@pytest.mark.parametrize(
    ("shape", "size"),
    [((64, 160, 2, 1, 4), 32), ((80, 64, 3, 1, 2), 16), ((96, 32, 8, 1, 8), 32), ((16, 96, 1, 1, 4), 16)],
)
def test_groups_of_tokens(reads: Any, shape: tuple[int, ...], size: int) -> None:
    case = Layer(*shape)
    dim, slots, group, _, bits = shape
    scale = (case.draw(2, 3, slots // size, dim).abs() + 0.01).half()
    given = (case.codes, scale, case.draw(2, 3, group, slots // size), case.queries, bits)
    check(reads.score_token_groups(*given), fused_read.score_token_groups(*given))


def test_extreme_numbers(reads: Any) -> None:
    """Codes of which one slot outweighs the others, groups of equal numbers, and weights of which all but one are 0."""
    case = Layer(64, 96, 4, 2, 4)
    case.scale[:, :, 3] = 60000.0
    case.scale[:, :, 4:9] = 0
    case.queries[:, :, :, 5] = 1e6
    case.weights[:, :, 1] = 0
    case.weights[:, :, 1, 7] = 1
    score = (case.codes, case.scale, case.zero, case.queries, case.sums, case.bits)
    mix = (case.codes, case.scale, case.zero, case.weights, case.bits)
    check(reads.score_channel_groups(*score), fused_read.score_channel_groups(*score))
    want = fused_read.mix_channel_groups(*mix)
    got = reads.mix_channel_groups(*mix)
    check(got[:, :, 1], want[:, :, 1])
    check(got, want)


def test_slots_are_shared_among_programs(reads: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any number of programs gives the same sums but for their order."""
    case = Layer(32, 200, 2, 1, 4)
    mix = (case.codes, case.scale, case.zero, case.weights, case.bits)
    for programs in (1, 12, 10_000):
        monkeypatch.setattr(reads, "PROGRAMS", programs)
        check(reads.mix_channel_groups(*mix), fused_read.mix_channel_groups(*mix))
    assert reads._shares(200, 32, 6, 12) == (128, 2)


def test_other_shapes_are_left_to_inductor(reads: Any) -> None:
    case = Layer(64, 96, 2, 1, 4)
    small = (case.codes, case.draw(2, 3, 12, 64), case.draw(2, 3, 2, 12), case.queries, 4)
    assert reads.score_token_groups(*small) is None  # groups of 8 tokens
    transposed = case.codes.mT.contiguous().mT
    assert reads.mix_channel_groups(transposed, case.scale, case.zero, case.weights, 4) is None
    many = case.weights[:, :, :1].expand(2, 3, 33, 96)
    assert reads.mix_channel_groups(case.codes, case.scale, case.zero, many, 4) is None
    none = (case.codes[:, :, :0], case.scale[:, :, :0], case.zero[:, :, :0])
    assert reads.mix_channel_groups(*none, case.weights[..., :0], 4) is None


def test_a_device_with_kernels_calls_them(reads: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a kernel returns None for is compiled."""
    case = Layer(32, 40, 2, 1, 4)
    mix = (case.codes, case.scale, case.zero, case.weights)
    answers = iter([torch.ones(1), None])
    kernels = {fused_read.mix_channel_groups.__name__: lambda *_, bits: next(answers)}
    assert kernels.keys() <= reads.READS.keys() <= compiled._apart.keys()
    monkeypatch.setattr(compiled, "_kernels", lambda device: kernels)
    monkeypatch.setattr(compiled, "BACKEND", "eager")
    assert compiled.call(fused_read.mix_channel_groups, *mix, bits=4).tolist() == [1.0]
    check(compiled.call(fused_read.mix_channel_groups, *mix, bits=4), fused_read.mix_channel_groups(*mix, bits=4))


def test_programs_compile() -> None:
    """In Python, some of Triton's language would run that its compiler refuses."""
    compile_programs(90, [(64, 4, 2, 2), (80, 8, 1, 1)])


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90])
def test_programs_of_all_shapes_compile(capability: int) -> None:
    shapes = itertools.product((64, 96, 128, 256), (2, 4, 8), (1, 2, 4), (1, 8))
    compile_programs(capability, [*shapes])


def compile_programs(capability: int, shapes: list[tuple[int, ...]]) -> None:
    """Compile programs in a process of their own, since here they run in Python."""
    words = [",".join(map(str, shape)) for shape in shapes]
    command = [sys.executable, "-m", "tests.kernels.compile_programs", str(capability), *words]
    done = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "0"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
