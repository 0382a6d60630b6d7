"""Keys that are moved meet every later query at the distance of the whole text."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor

from kvpolicy.hf.dense_cache import moved, skeleton
from tests.sampling import each_once, product
from tests.vllm.models import LLAMA3, ROPE, SIZES, YARN

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "default": ("LlamaConfig", {"rope_parameters": ROPE}),
    "linear": ("LlamaConfig", {"rope_parameters": ROPE | {"rope_type": "linear", "factor": 3.0}}),
    "llama3": ("LlamaConfig", {"rope_parameters": LLAMA3}),
    "yarn": ("LlamaConfig", {"rope_parameters": YARN}),
    "interleaved": ("CohereConfig", {"rope_parameters": ROPE}),
    "partial": ("StableLmConfig", {"rope_parameters": ROPE | {"partial_rotary_factor": 0.25}}),
    "partial, interleaved": ("GlmConfig", {"rope_parameters": ROPE | {"partial_rotary_factor": 0.5}, "head_dim": 32}),
}
HEADS = 2
TOKENS = 11
QUERIES = 5
TOTAL = 700


def rope_of(kind: str) -> tuple[Any, int]:
    name, fields = KINDS[kind]
    config = getattr(transformers, name)(**(SIZES | {"hidden_size": 128} | fields))
    return skeleton(config).rotations[1], 32


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@product("kind,kept", [*KINDS], [TOKENS, 350, TOTAL], sample=each_once([*KINDS], [TOKENS, 350, TOTAL]))
def test_scores_are_those_of_the_whole_text(kind: str, kept: int) -> None:
    """Of queries at engine positions, behind as many slots as are kept; some keys then stand in front of zero."""
    rope, dim = rope_of(kind)
    keys = draw(1, HEADS, TOKENS, dim)
    queries = draw(1, HEADS, QUERIES, dim)
    at = torch.randint(0, TOTAL, (1, HEADS, TOKENS), generator=torch.Generator().manual_seed(0))
    at[..., 0] = 0
    stored = rope.rotate(keys, at)
    steps = torch.arange(QUERIES).expand(1, HEADS, -1)
    wanted = rope.rotate(queries, TOTAL + steps) @ stored.mT
    found = rope.rotate(queries, kept + steps) @ moved(stored[0], TOTAL - kept, rope)[None].mT
    torch.testing.assert_close(found, wanted, atol=3e-3, rtol=1e-4)
    torch.testing.assert_close(moved(stored[0], TOTAL - kept, rope).norm(dim=-1), stored[0].norm(dim=-1))


def test_nothing_is_moved_where_everything_is_kept() -> None:
    rope, dim = rope_of("yarn")
    keys = draw(HEADS, TOKENS, dim)
    assert moved(keys, 0, rope) is keys


def test_half_precision_is_rounded_once() -> None:
    rope, dim = rope_of("llama3")
    keys = draw(HEADS, TOKENS, dim).bfloat16()
    found = moved(keys, 33, rope)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, moved(keys.float(), 33, rope).bfloat16())
