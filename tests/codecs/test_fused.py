"""Codecs whose codes are summed without decoding them give what decoding gives."""

from __future__ import annotations

import pytest
import torch

from kvpolicy import Policy
from kvpolicy.distortion import coded_store
from kvpolicy.engine.codec_view import CodecView
from kvpolicy.kernels import compiled

CODECS = [
    "kivi:bits=2",
    "kivi:bits=4",
    "kivi:bits=8:group_size=16",
    "tokenwise:bits=2",
    "tokenwise:bits=4:group_size=32",
    "tokenwise:bits=8",
    "tokenwise:bits=4:normalize=false",
    "tokenwise:bits=3",
    "tokenwise:bits=fp8",
]
NOT_FUSED = CODECS[-2:]


def view(codec: str, dim: int, dtype: torch.dtype = torch.float32, tokens: int = 160) -> CodecView:
    """A layer of two rows that keeps all tokens."""
    generator = torch.Generator().manual_seed(dim)
    keys, values = (torch.randn(2, 3, tokens, dim, generator=generator) for _ in range(2))
    keys[..., 1] *= 20
    store = coded_store(Policy.parse(f"full+{codec}").codec, keys.to(dtype), values.to(dtype))
    assert store.slots is not None
    found = store.slots.codes.view()
    assert found is not None
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [16, 80])
@pytest.mark.parametrize("codec", CODECS)
def test_fused_reads_are_those_of_decoding(
    codec: str, dim: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    coded = view(codec, dim, dtype)
    queries = torch.randn(2, 3, 2, dim, generator=torch.Generator().manual_seed(1)).to(dtype)
    slots = sum(coded.sizes)
    weights = [torch.randn(2, 3, 2, slots, generator=torch.Generator().manual_seed(2)).softmax(-1).to(dtype)]
    wanted = coded.score(queries)[0], coded.mix(weights)[0]
    (decoded,) = coded.read(torch.float32)
    called: list[str] = []
    plain = compiled.call

    def counted(function: object, *given: object, **options: object) -> object:
        called.append(getattr(function, "__name__", ""))
        return plain(function, *given, **options)  # pyright: ignore

    monkeypatch.setattr(compiled, "BACKEND", "eager")
    monkeypatch.setattr(compiled, "MIN_SLOTS", 1)
    monkeypatch.setattr(compiled, "_is_on", True)
    monkeypatch.setattr(compiled, "_failures", [])
    monkeypatch.setattr(compiled, "_has_compiler", lambda: True)
    for module in ("kivi", "tokenwise"):
        monkeypatch.setattr(f"kvpolicy.codecs.{module}.call", counted)
    found = coded.score(queries)[0], coded.mix(weights)[0]
    assert len(called) == (0 if codec in NOT_FUSED else 2)
    exact = dtype == torch.float32
    for got, want, largest in zip(found, wanted, (wanted[0].abs().max(), decoded[1].abs().max()), strict=True):
        assert got.dtype == torch.float32 and got.shape == want.shape
        torch.testing.assert_close(got, want, rtol=0, atol=float(largest) * (1e-5 if exact else 2e-2))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inductor's own
@pytest.mark.skipif(bool(compiled.obstacle()), reason="codes are summed in compiled code")
@pytest.mark.parametrize("codec", ["kivi:bits=4", "tokenwise:bits=4"])
def test_compiled_reads_are_those_of_decoding(codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    coded = view(codec, 32, tokens=compiled.MIN_SLOTS + 200)
    queries = torch.randn(2, 3, 2, 32, generator=torch.Generator().manual_seed(1))
    weights = [torch.randn(2, 3, 2, sum(coded.sizes), generator=torch.Generator().manual_seed(2)).softmax(-1)]
    found = coded.score(queries)[0], coded.mix(weights)[0]
    monkeypatch.setattr(compiled, "_is_on", False)
    wanted = coded.score(queries)[0], coded.mix(weights)[0]
    (decoded,) = coded.read(torch.float32)
    for got, want, largest in zip(found, wanted, (wanted[0].abs().max(), decoded[1].abs().max()), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-5 * float(largest))
    assert not torch.equal(found[0], wanted[0]), "they are summed in another order"
