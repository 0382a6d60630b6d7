"""PyTorch's default dtype and default device, which a program may set, change nothing."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

import kvpolicy
from kvpolicy import registry
from tests.sampling import product

PROMPT = 90
STEPS = 12


@contextmanager
def defaults(dtype: torch.dtype = torch.bfloat16) -> Generator[None]:
    """Another default dtype; and a device without numbers, so that what is created there by mistake is an error."""
    torch.set_default_dtype(dtype)
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)  # "cpu" would leave a mode behind
        torch.set_default_dtype(torch.float32)


@pytest.fixture(scope="module")
def tiny() -> tuple[Any, Any]:
    return kvpolicy.tiny()


def inputs(model: Any) -> tuple[Tensor, Tensor]:
    """Two rows, of which the second one is padded, and a mask for the prompt and all steps."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, model.config.vocab_size, (2, PROMPT + STEPS), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, :17] = 0
    return ids, mask


def run(model: Any, policy: str, ids: Tensor, mask: Tensor) -> Tensor:
    """Logits of a prompt, of steps, and of a step after some were taken back."""
    with torch.no_grad(), kvpolicy.attach(model, policy):
        cache = kvpolicy.PolicyCache(model)
        logits = [model(ids[:, :PROMPT], attention_mask=mask[:, :PROMPT], cache=cache).logits[:, -1]]
        for end in range(PROMPT + 1, PROMPT + STEPS + 1):
            seen = mask[:, :end]
            logits.append(model(ids[:, end - 1 : end], attention_mask=seen, cache=cache).logits[:, -1])
        return torch.stack(logits)


SPECS = {
    "allocator": "{}+snapkv@0.5",
    "head_allocator": "uniform/{}+snapkv@0.5",
    "selector": "{}@0.5",
    "merger": "h2o+{}@0.5",
    "codec": "h2o+{}@0.7",
    "reader": "full+{}:read=0.3",
}
OTHERS = {"full": "full", "minicache": "full+minicache", "all": "full+all", "reuse": "full+reuse"}
POLICIES = [OTHERS.get(name, SPECS[kind].format(name)) for kind, names in registry.BUILT_IN.items() for name in names]
TAKEN = ["compactor@0.5", "zigzag+snapkv@0.5", "h2o+d2o@0.5", "h2o+csr@0.7", "h2o+gear@0.7", "full+retrieval:read=0.3"]


@product("policy", POLICIES, sample=[(policy,) for policy in TAKEN])
def test_the_defaults_of_pytorch_change_no_logits(policy: str, tiny: tuple[Any, Any]) -> None:
    model, _ = tiny
    ids, mask = inputs(model)
    wanted = run(model, policy, ids, mask)
    with defaults():
        found = run(model, policy, ids, mask)
    assert torch.equal(found, wanted)


def test_the_defaults_of_pytorch_change_no_edits_of_a_cache(tiny: tuple[Any, Any], tmp_path: Path) -> None:
    model, _ = tiny
    ids, _ = inputs(model)

    def edited(path: Path) -> tuple[Tensor, int]:
        with torch.no_grad(), kvpolicy.attach(model, "h2o+kivi:residual_length=32@0.5"):
            cache = kvpolicy.PolicyCache(model, new=STEPS)
            model(ids[:, :PROMPT], cache=cache)
            cache.mark(most=2)
            model(ids[:, PROMPT : PROMPT + 1], cache=cache)
            cache.rollback(0)
            model(ids[:, PROMPT : PROMPT + 1], cache=cache)
            cache.batch_repeat_interleave(2)
            cache.save(path)
            loaded = kvpolicy.PolicyCache.load(model, path)
            last = ids[:, PROMPT + 1 : PROMPT + 2].repeat_interleave(2, 0)
            return model(last, cache=loaded).logits, kvpolicy.plan(model, "h2o@0.5", prompt=PROMPT).nbytes

    wanted = edited(tmp_path / "plain")
    with defaults():
        found = edited(tmp_path / "other")
    assert torch.equal(found[0], wanted[0]) and found[1] == wanted[1]


def test_the_defaults_of_pytorch_change_no_generated_token(tiny: tuple[Any, Any]) -> None:
    model, _ = tiny
    ids, _ = inputs(model)
    prompt = ids[:1, :PROMPT]
    wanted = kvpolicy.speculate(model, "snapkv@0.5", prompt, max_new_tokens=12)
    with defaults():
        found = kvpolicy.speculate(model, "snapkv@0.5", prompt, max_new_tokens=12)
    assert torch.equal(found, wanted)
