"""Codecs whose codes are summed without decoding them give what decoding gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from kvpolicy import Policy
from kvpolicy.codecs import uniform
from kvpolicy.codecs.common import SingleStage
from kvpolicy.codecs.uniform import is_fused
from kvpolicy.distortion import coded_store
from kvpolicy.engine.columns import CodedColumns
from kvpolicy.engine.state import tensors
from kvpolicy.kernels import compiled, words
from kvpolicy.kernels.rotary import Rope
from kvpolicy.protocols import Codes, StageStore
from kvpolicy_eval.common.synthetic import with_random_calibration
from tests.codecs.compiling import call_directly, compile_all
from tests.sampling import product

CODECS = {
    "kivi:bits=2": 2,
    "kivi:bits=4": 2,
    "kivi:bits=8:group_size=16": 2,
    "tokenwise:bits=2": 2,
    "tokenwise:bits=4:group_size=32": 2,
    "tokenwise:bits=8": 2,
    "tokenwise:bits=4:normalize=false": 2,
    "tokenwise:bits=3": 2,
    "tokenwise:bits=fp8": 2,
    "tokenwise:bits=fp8:group_size=8": 2,
    "staircase:tokens_8bit=32:tokens_4bit=32": 6,
    "zipcache": 4,
    "zipcache:bits=3": 4,
    "mikv": 2,
    "mikv:high_bits=8:group_size=8": 4,
    "rotate:bits=4": 3,
    "rotate:bits=3:group_size=16": 3,
    "kvarn:group_size=32:sinks=8": 2,
    "kvarn:group_size=16:sinks=0:key_bits=2:value_bits=4": 2,
    "kvarn:group_size=16:sinks=0:key_bits=3:value_bits=3": 2,
    "oscar:sinks=4:residual_length=8": 2,
    "oscar:bits=3:group_size=16:sinks=0:residual_length=0": 2,
    "turboquant:bits=4": 2,
    "turboquant:bits=3": 2,
    "turboquant:bits=2": 2,
    "kvquant:bits=4": 3,
    "kvquant:bits=3:outliers=0.1": 3,
    "kvquant:bits=2:outliers=0:norm=false": 3,
    "kvquant:outliers=0.9": 1,
    "csr:nnz=8": 1,
    "lowrank:rank=8": 0,
    "lowrank:rank=5:value_rank=8": 0,
    "lowrank:rank=8:key_space=unrotated": 1,
    "lowrank:rank=8/tokenwise:bits=4": 2,
    "gear:group_size=32": 2,
    "gear:bits=4:rank=4:sparse=0.1": 2,
    "gear:bits=8:rank=0:sparse=0": 2,
    "gear:sparse=0.9": 0,
    "gear:backbone=kcvt:group_size=16": 2,
    "bfp:block_channels=16": 2,
    "bfp:block_channels=12": 0,
    "bfp:mantissa=8:block_channels=8": 2,
    "bfp:mantissa=5:block_channels=16": 2,
    "bfp:exact_values=true:block_channels=16": 1,
}
"""Codecs, and how many functions are compiled: a score and a mix of each stage; for unrotated keys, their rotation, and
what decodes a chunk of them."""


RANKED = ("zipcache", "mikv")


def view(
    codec: str, dim: int, folder: Path, dtype: torch.dtype = torch.float32, tokens: int = 160, device: str = "cpu"
) -> CodedColumns:
    """A layer of two rows that keeps all tokens."""
    generator = torch.Generator().manual_seed(dim)
    config = LlamaConfig(hidden_size=dim, num_attention_heads=1, max_position_embeddings=4096)
    rope = Rope(LlamaRotaryEmbedding(config).to(device), apply_rotary_pos_emb, None)
    keys, values = (torch.randn(2, 3, tokens, dim, generator=generator).to(device) for _ in range(2))
    keys[..., 1] *= 20
    policy = Policy.parse(f"{'h2o' if codec.startswith(RANKED) else 'full'}+{codec}@1.0")
    part = with_random_calibration(policy.codec, folder, 3, dim)
    store = coded_store(part, keys.to(dtype), values.to(dtype), rope=rope)
    assert store.slots is not None
    found = store.slots.codes.view()
    assert found is not None
    return found


class Reads:
    """Queries and weights for a layer, and the largest numbers of its scores and values."""

    def __init__(self, coded: CodedColumns, dtype: torch.dtype = torch.float32) -> None:
        self.coded = coded
        generator = torch.Generator().manual_seed(1)
        pairs = coded.read(torch.float32)
        keys, _ = pairs[0]
        self.queries = torch.randn(2, 3, 2, keys.shape[3], generator=generator).to(keys.device, dtype)
        sizes = [columns.size for columns in coded]
        self.weights = [torch.randn(2, 3, 2, size, generator=generator).softmax(-1) for size in sizes]
        self.weights = [own.to(keys.device, dtype) for own in self.weights]
        self.tolerance = 1e-5 if dtype == torch.float32 else 2e-2
        self.largest = [float(own.abs().max()) for own in self.scores(self.queries)]
        self.largest += [float(values.abs().max()) for _, values in pairs]

    def scores(self, queries: Tensor) -> list[Tensor]:
        return [columns.score(queries) for columns in self.coded]

    def __call__(self, queries: Tensor | None = None, weights: list[Tensor] | None = None) -> list[Tensor]:
        """Scores of all queries, and sums of values."""
        queries = self.queries if queries is None else queries
        weights = self.weights if weights is None else weights
        sums = [columns.mix(own) for columns, own in zip(self.coded, weights, strict=True)]
        return [*self.scores(queries), *sums]

    def check(self, found: list[Tensor], wanted: list[Tensor]) -> None:
        for got, want, most in zip(found, wanted, self.largest, strict=True):
            assert got.dtype == torch.float32 and got.shape == want.shape
            torch.testing.assert_close(got, want, rtol=0, atol=most * self.tolerance)


FORMS = [(16, torch.float32), (80, torch.bfloat16)], [(80, torch.float32), (16, torch.bfloat16)]
TAKEN = [(codec, *form) for number, codec in enumerate(CODECS) for form in FORMS[number % 2]]


@product("codec,dim,dtype", [*CODECS], [16, 80], [torch.float32, torch.bfloat16], sample=TAKEN)
def test_fused_reads_are_those_of_decoding(
    codec: str, dim: int, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = Reads(view(codec, dim, tmp_path, dtype), dtype)
    wanted = reads()
    called = call_directly(monkeypatch)
    reads.check(reads(), wanted)
    assert len(called) == CODECS[codec]


def write_twice(codec: SingleStage, mask: Tensor, slots: Tensor) -> Codes:
    """Codes of 24 slots of which the first write fills some, and the second one overwrites some and fills others."""
    generator = torch.Generator().manual_seed(0)
    codes = codec.alloc(2, 3, 24, 16, "cpu")
    occupied = torch.zeros(2, 3, 24, dtype=torch.bool)
    for own in mask:
        keys, values = (torch.randn(2, 3, slots.shape[-1], 16, generator=generator) for _ in range(2))
        keys[:, :, ::5] = 1.0  # equal elements
        keys[:, :, 1] *= 1e6
        codec.write(StageStore(codes, ()), keys, values, slots, own, occupied)
        occupied = occupied.scatter(2, slots, own | occupied.gather(2, slots))
    return codes


@pytest.mark.parametrize(
    "spec", ["kivi:bits=4:group_size=8", "kivi:bits=2:group_size=4", "tokenwise", "tokenwise:bits=fp8", "turboquant"]
)
@pytest.mark.parametrize("written", ["all", "some", "one", "none"])
def test_encoding_in_compiled_code_makes_the_same_codes(
    spec: str, written: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(1)
    draws = torch.rand(2, 2, 3, 12, generator=generator)
    mask = {"all": draws >= 0, "some": draws > 0.5, "none": draws < 0}.get(written, draws == draws.amax())
    slots = torch.rand(2, 3, 24, generator=generator).argsort(-1)[..., :12]
    codec: Any = Policy.parse(f"full+{spec}").codec
    wanted = write_twice(codec, mask, slots)
    called = call_directly(monkeypatch)
    for found, want in zip(write_twice(codec, mask, slots), wanted, strict=True):
        assert torch.equal(found, want)
    assert called


@pytest.mark.parametrize(("bits", "width", "fused"), [(8, 16, False), (8, 32, True), (4, 16, True)])
def test_single_bytes_are_decoded_without_wide_vectors(
    bits: int, width: int, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_all(monkeypatch)
    monkeypatch.setattr(uniform, "HAS_WIDE_VECTORS", False)
    monkeypatch.setattr(words, "VECTOR", 8)
    assert is_fused(torch.zeros(1, 2, 8, width * bits // 8, dtype=torch.uint8), bits, width) == fused


COMPILER = pytest.mark.skipif(bool(compiled._missing_compiler("cpu")), reason="a compiler is needed")
DEAR = pytest.param("tokenwise:bits=3", marks=pytest.mark.slow)
"""Its code takes 20 s to compile; `test_encoding_in_compiled_code_makes_the_same_codes` has the same function."""


@COMPILER
@pytest.mark.parametrize("spec", ["kivi:bits=4", DEAR])
def test_inductor_makes_the_same_codes(spec: str) -> None:
    codec: Any = Policy.parse(f"full+{spec}").codec
    keys = torch.randn(1, 2, compiled.MIN_SLOTS + 64, 32, generator=torch.Generator().manual_seed(0))
    keys[:, :, 5] = 3.0
    keys[:, 0, 6:90] *= 1e-6
    keys[:, 1, 7] *= 1e6
    with compiled.switched(True):
        found = coded_store(codec, keys, keys)
    wanted = coded_store(codec, keys, keys)
    for got, want in zip(found.tensors.codes[0], wanted.tensors.codes[0], strict=True):
        assert torch.equal(got, want)


@COMPILER
@product("codec", ["kivi:bits=4", "tokenwise:bits=4"], sample=[("tokenwise:bits=4",)])
def test_compiled_reads_are_those_of_decoding(codec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "_failures", [])
    reads = Reads(view(codec, 128, tmp_path, tokens=compiled.MIN_SLOTS + 200))
    with compiled.switched(True):
        found = reads()
    wanted = reads()
    reads.check(found, wanted)
    assert not torch.equal(found[0], wanted[0]), "they are summed in another order"


TRACED = [("kivi:bits=4",), ("kvquant",)]
"""One whose sums are an operation of their own, and one that is traced."""


@product("codec", ["gear", "kivi:bits=4", "kvquant", "turboquant", "rotate", "lowrank:rank=8"], sample=TRACED)
def test_a_compiled_step_reads_as_an_eager_one(codec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced, or called as one operation that compiles its own code."""
    compile_all(monkeypatch)
    reads = Reads(view(codec, 16, tmp_path))
    step = torch.compile(reads, backend="aot_eager", fullgraph=True)
    reads.check(step(reads.queries, reads.weights), reads())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("codec", CODECS)
def test_a_gpu_reads_codes_as_decoding_does(
    codec: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "_is_on", False)
    reads = Reads(view(codec, 64, tmp_path, dtype, device="cuda"), dtype)
    wanted = reads()
    compile_all(monkeypatch, "inductor")
    reads.check(reads(), wanted)
    assert not compiled._failures


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("codec", CODECS)
def test_a_gpu_makes_the_same_codes(codec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "_is_on", False)
    wanted = view(codec, 64, tmp_path, device="cuda")
    compile_all(monkeypatch, "inductor")
    found = view(codec, 64, tmp_path, device="cuda")
    for mine, its in zip(found, wanted, strict=True):
        for got, want in zip(tensors(mine.store.codes), tensors(its.store.codes), strict=True):
            assert torch.equal(got, want), (got.shape, float((got != want).float().mean()))
