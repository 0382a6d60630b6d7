"""`python -m tests.kernels.compile_programs CAPABILITY SHAPE ...`: compile `gpu_reads` for a GPU, without one.

A shape has channels, bits, groups of channels and query heads, such as `128,4,1,4`.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from kvpolicy.kernels import gpu_programs, gpu_reads

TYPES = {"codes": "*u8", "scale": "*fp16", "zero": "*fp16"}
FLOATS = ("queries", "sums", "out", "weights", "offsets")


def compile_program(program: Any, constants: dict[str, Any], warps: int, capability: int) -> None:
    """Compile a program for a GPU of NVIDIA."""
    names = program.arg_names
    types = {name: TYPES.get(name, "*fp32" if name in FLOATS else "i32") for name in names}
    types |= dict.fromkeys(constants, "constexpr")
    given = {(names.index(name),): value for name, value in constants.items()}
    aligned = [(number,) for number, name in enumerate(names) if types[name].startswith("*")]
    attributes = {key: [["tt.divisibility", 16]] for key in aligned}
    source = ASTSource(program, types, given, attributes)
    target = GPUTarget("cuda", capability, 32)
    compile(source, target=target, options={"num_warps": warps, "num_stages": 3})


def main() -> None:
    """Compile all programs for the shapes."""
    capability = int(sys.argv[1])
    for words in sys.argv[2:]:
        dim, bits, groups, heads = map(int, words.split(","))
        codes = torch.zeros(1, 1, 64, dim * bits // 8, dtype=torch.uint8)
        scale = torch.zeros(1, 1, 64, groups)
        tokens = gpu_reads._sizes(codes, scale, heads, dim, bits)
        channels = gpu_reads._channel_sizes(codes, scale, heads, dim, bits)
        assert tokens is not None and channels is not None
        channels |= {"HAS_ZERO": True}
        compile_program(gpu_programs.score_channel_groups, channels | {"BLOCK": gpu_reads.SCORED}, 2, capability)
        compile_program(gpu_programs.mix_channel_groups, channels | {"BLOCK": gpu_reads.MIXED}, 2, capability)
        compile_program(gpu_programs.score_token_groups, tokens | {"SIZE": 32}, 1, capability)


if __name__ == "__main__":
    main()
