"""Models that transformers shards by its plan keep on all ranks what they keep on one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import kvpolicy
from kvpolicy import PolicyCache
from kvpolicy.hf.division import divided
from kvpolicy.hf.weights import weights_per_rank
from kvpolicy.parallel.sharding import BY_PLAN
from tests.conformance.models import FAMILIES, LATENT, UNNAMED, VOCABULARY, Config
from tests.deepspeed.checkpoints import MORE
from tests.parallel.ranks import run_ranks

MODELS: dict[str, Config] = {
    name: make
    for name, make in {**FAMILIES, **UNNAMED, "qwen2_moe": MORE["qwen2_moe"], "qwen3_moe": MORE["qwen3_moe"]}.items()
    if name.partition("_")[0] not in ("opt", "falcon", "stablelm", "gpt2", "jetmoe") or name == "falcon_h1"
}
"""Those that have a plan."""
PROMPT = 40
NEW = 4
BATCH = 2
POLICIES = (
    "snapkv@0.5",
    "h2o+kivi:bits=8@0.6",
    "squeeze+kvcrush/snapkv@0.5",
    "cake+keyformer@0.5",
    "critical/snapkv@0.5",
    "kvzip:plus=true@0.5",
    "tova@0.5",
    "uniform/adakv+snapkv@0.5",
)
BY_HEAD = "uniform/adakv"
MEASURED = ("squeeze", "cake", BY_HEAD)
"""Policies whose bytes depend on the text."""
CLOSE = 1e-4
"""Largest difference of logits: gemma's are 20 times as large as others."""

Answers = dict[str, tuple[Tensor, list[Tensor]]]
"""Of each policy the tokens, [B, PROMPT + NEW], and which positions each head of each layer holds, -1 for none."""


def model_of(name: str) -> Any:
    """A whole model with random weights of a fixed seed."""
    torch.manual_seed(sum(map(ord, name)))
    model = transformers.AutoModelForCausalLM.from_config(MODELS[name]())
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.dim() == 1) / 2, std=0.2)
    return model.eval()


def prompt() -> Tensor:
    return torch.randint(3, VOCABULARY - 4, (BATCH, PROMPT), generator=torch.Generator().manual_seed(0))


def generated(model: Any) -> Tensor:
    return model.generate(prompt(), max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False)


def positions(cache: PolicyCache) -> list[Tensor]:
    """The positions that each head of each layer holds, in their order, [B, H, n]."""
    return [layer.head_positions.sort(-1, descending=True).values for layer in cache.policy_layers]


@torch.no_grad()
def answers(model: Any, policies: tuple[str, ...], nbytes: Mapping[str, int] | None = None) -> Answers:
    """What a model answers under each policy; `nbytes` is what its caches hold."""
    found = dict[str, tuple[Tensor, list[Tensor]]]()
    for policy in policies:
        with kvpolicy.attach(model, policy) as handle:
            tokens = generated(model)
            cache = handle.cache
            assert cache is not None
            found[policy] = tokens, positions(cache)
            assert nbytes is None or cache.nbytes == nbytes[policy], policy
    return found


def _load(folder: str, world: int) -> Any:
    from transformers.distributed.configuration_utils import DistributedConfig

    how = DistributedConfig(tp_size=world)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto", distributed_config=how).eval()


def _nbytes(model: Any) -> int:
    """Bytes of the parameters that this rank holds."""
    own: Any = (getattr(parameter, "to_local", lambda p=parameter: p)() for parameter in model.parameters())
    return sum(part.nbytes for part in own)


def _play(rank: int, world: int, folder: str, policies: tuple[str, ...]) -> tuple[Tensor, Tensor, int, Answers]:
    """Logits, tokens and weights of the stock model, and the answers of a rank, whose bytes are those of the plan."""
    model = _load(folder, world)
    sizes: dict[str, Any] = {"batch": BATCH, "prompt": PROMPT, "new": NEW, "tp": world, "backend": "hf"}
    nbytes = {
        policy: kvpolicy.plan(model.config, policy, dtype=torch.float32, **sizes).nbytes
        for policy in policies
        if not policy.startswith(MEASURED)
    }
    with torch.no_grad():
        stock = model(prompt()).logits, generated(model)
    planned = tuple(nbytes)
    return (
        *stock,
        _nbytes(model),
        answers(model, planned, nbytes) | answers(model, tuple(p for p in policies if p not in nbytes)),
    )


def _check(name: str, folder: Path) -> None:
    model = model_of(name)
    model.save_pretrained(folder)
    policies = tuple(p for p in POLICIES if name not in LATENT or not p.startswith(BY_HEAD))
    want = answers(model, policies)
    with torch.no_grad():
        logits = model(prompt()).logits
        tokens = generated(model)
    ranks = run_ranks(_play, 2, str(folder), policies)
    parts = divided(model.config)
    assert max(nbytes for *_, nbytes, _ in ranks) == weights_per_rank(model.config, tp=2, backend="hf").nbytes
    for own_logits, own_tokens, *_ in ranks:
        assert (own_logits - logits).abs().max() < CLOSE
        assert torch.equal(own_tokens, tokens)
    for policy, (answer, kept) in want.items():
        assert all(torch.equal(found[policy][0], answer) for *_, found in ranks), policy
        for layer, whole in enumerate(kept):
            each = [found[policy][1][layer] for *_, found in ranks]
            if parts == "heads":
                each = [_joined(each)]
            for own in each:
                assert torch.equal(_joined([own]), _joined([whole])), (policy, layer)


def _joined(parts: list[Tensor]) -> Tensor:
    """The heads of all ranks, of which each holds as many tokens as it needs, [B, H, n]."""
    most = max(PROMPT + NEW, *(part.shape[-1] for part in parts))
    return torch.cat([torch.nn.functional.pad(part, (0, most - part.shape[-1]), value=-1) for part in parts], 1)


@pytest.mark.parametrize("name", MODELS)
def test_two_ranks_keep_what_one_keeps(name: str, tmp_path: Path) -> None:
    _check(name, tmp_path)


def _load_with_policy(rank: int, world: int, folder: str) -> list[int]:
    import kvpolicy_deepspeed

    model = kvpolicy_deepspeed.load(folder, backend="hf", policy="snapkv@0.5")
    with kvpolicy.attach(model, "snapkv@0.5"):
        return generated(model)[0].tolist()


@pytest.mark.parametrize("name", ["qwen3_5", "gemma3n", "deepseek_v2"])
def test_load_takes_what_the_plan_divides(name: str, tmp_path: Path) -> None:
    model = model_of(name)
    model.save_pretrained(tmp_path)
    with kvpolicy.attach(model, "snapkv@0.5"):
        assert run_ranks(_load_with_policy, 2, str(tmp_path)) == [generated(model)[0].tolist()] * 2


@torch.no_grad()
def _go_on(rank: int, world: int, folder: str, policy: str) -> list[Tensor]:
    """Logits of tokens behind a cache, behind the same cache from a file, and behind that of the whole model."""
    model = _load(folder, world)
    path = Path(folder) / "own.safetensors"
    with kvpolicy.attach(model, policy):
        cache = PolicyCache(model)
        model(prompt(), cache=cache)
        cache.save(path)
        torch.distributed.barrier()
        loaded = [PolicyCache.load(model, each) for each in (path, path.with_name("whole.safetensors"))]
        return [_steps(model, each) for each in (cache, *loaded)]


def _steps(model: Any, cache: PolicyCache) -> Tensor:
    return torch.cat([model(prompt()[:, at : at + 1], cache=cache).logits for at in range(NEW)], 1)


SAVED = {
    "gemma2": "heads",
    "gemma3n": "heads",
    "deepseek_v2": "queries",
    "falcon_h1": "nothing",
    "qwen3_5": "heads",
}
"""Windows, shared keys, latent vectors, every head on every rank, and states; and what ranks have parts of."""


@pytest.mark.parametrize("name", SAVED)
def test_a_saved_cache_goes_on_and_so_does_that_of_the_whole_model(name: str, tmp_path: Path) -> None:
    model = model_of(name)
    assert divided(model.config) == SAVED[name]
    model.save_pretrained(tmp_path)
    policy = "snapkv+tokenwise:bits=8@0.5"
    with torch.no_grad(), kvpolicy.attach(model, policy):
        cache = PolicyCache(model)
        model(prompt(), cache=cache)
        cache.save(tmp_path / "whole.safetensors")
        want = _steps(model, cache)
    for stayed, loaded, whole in run_ranks(_go_on, 2, str(tmp_path), policy):
        assert torch.equal(stayed, loaded)
        assert (whole - want).abs().max() < CLOSE
    assert len([*tmp_path.glob("own*")]) == (1 if SAVED[name] == "nothing" else 2)


def test_what_is_tested_may_be_loaded() -> None:
    types = {make().get_text_config(decoder=True).model_type for make in MODELS.values()}
    assert types == BY_PLAN - {"qwen3_next"}
