"""Policies keep the same tokens on a sharded model as on a whole one, and hold the bytes of their plan.

tests/parallel tests that N ranks keep exactly the same tokens as one, with sharded heads only. Here linear layers are
sharded too, so that hidden states differ in their last bits, and tokens with nearly equal scores can change places.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import kvpolicy
from kvpolicy import PolicyCache
from kvpolicy.engine.state import tensors
from tests.conformance.access import ranks_of, stage_codes
from tests.conformance.policies import CODECS, SELECTORS, every_pair, is_refused, words
from tests.deepspeed.checkpoints import make, save
from tests.parallel.ranks import run_ranks
from tests.sampling import pairwise, product

pytest.importorskip("deepspeed")
PROMPT = 25
STEPS = 8
BACKENDS = ["deepspeed", "hf"]
MODELS = ["llama", "mixtral"]


ROWS = pairwise(SELECTORS, CODECS, allowed=lambda row: not is_refused(*row))[: len(CODECS)]
SOME = [words(*row) for row in [*ROWS, ("squeeze", "tova", "plain"), ("squeeze", "kvcrush", "kivi")]]
SHARDED = [*itertools.product(MODELS, BACKENDS)]


def _play(model: Any, policy: str) -> tuple[PolicyCache, torch.Tensor]:
    """Run a padded batch, and decode given tokens, so that a single difference does not cause others."""
    draw = torch.Generator().manual_seed(5)
    tokens = torch.randint(3, model.config.vocab_size, (2, PROMPT + STEPS), generator=draw).to(model.device)
    mask = torch.ones_like(tokens)
    mask[1, : PROMPT // 2] = 0
    found: list[torch.Tensor] = []
    with torch.no_grad(), kvpolicy.attach(model, policy):
        cache = PolicyCache(model, new=STEPS)
        for begin, end in [(0, PROMPT), *((at, at + 1) for at in range(PROMPT, PROMPT + STEPS))]:
            out = model(tokens[:, begin:end], attention_mask=mask[:, :end], cache=cache)
            found.append(out.logits[:, -1].float())
    return cache, torch.stack(found)


def _share_of(one: PolicyCache, some: PolicyCache, held: slice) -> tuple[float, float]:
    """The fraction of the positions of a single rank, and of their codes, that this rank holds too."""
    kept = codes = all_kept = all_codes = 0
    for left, right in zip(one.policy_layers, some.policy_layers, strict=True):
        expected = left.positions[:, held].flatten(0, 1).tolist()
        actual = right.positions.flatten(0, 1).tolist()
        for whole, part in zip(expected, actual, strict=True):
            kept += len({*whole} & {*part} - {-1})
            all_kept += len({*whole} - {-1})
        for a, b in zip(stage_codes(left), stage_codes(right), strict=True):
            for x, y in zip(tensors(a), tensors(b), strict=True):
                own = x[:, held] if x.shape[1] > 1 else x
                if x.dtype in (torch.uint8, torch.int8, torch.int16) and own.shape == y.shape:
                    codes += int((own == y).sum())
                    all_codes += own.numel()
    return kept / all_kept, codes / all_codes if all_codes else 1.0


def _compare(
    rank: int, world: int, name: str, folder: str, backend: str, dtype: str, policies: list[str]
) -> dict[str, tuple[float, float, float]]:
    """For each policy, the fractions of equal positions and codes, and the largest difference of logits."""
    import kvpolicy_deepspeed

    model = kvpolicy_deepspeed.load(folder, backend=backend, dtype=dtype)  # pyright: ignore[reportArgumentType]
    alone = make(name).to(model.device, getattr(torch, dtype))
    found = dict[str, tuple[float, float, float]]()
    for policy in policies:
        one, logits = _play(alone, policy)
        some, others = _play(model, policy)
        held = ranks_of(some.policy_layers[0]).held
        found[policy] = (*_share_of(one, some, held), float((logits - others).abs().max()))
        planned = kvpolicy.plan(
            alone.config,
            policy,
            batch=2,
            prompt=[PROMPT, PROMPT - PROMPT // 2],
            new=STEPS,
            tp=world,
            dtype=getattr(torch, dtype),
        )
        assert some.plan is not None and some.nbytes == some.plan.nbytes, policy
        assert not planned.measured or some.nbytes == planned.nbytes, policy
    return found


def _run(name: str, folder: Path, backend: str, dtype: str, policies: list[str], world: int = 2) -> Any:
    where = save(name, folder, getattr(torch, dtype))
    return run_ranks(_compare, world, name, where, backend, dtype, policies, limit=900)


def _check(results: Any) -> None:
    """Check that every policy keeps nearly all tokens of a single rank, and nearly every policy exactly the same.

    Fewer codes are equal: if the last bit of a vector changes an atom of CSR's search, all later atoms can change.
    """
    for found in results:
        if "full" in found:
            same, _, far = found.pop("full")
            assert same == 1 and far <= 5e-6
        positions, codes = ([values[i] for values in found.values()] for i in range(2))
        assert min(positions) > 0.98 and min(codes) > 0.95, found
        assert sum(share == 1 for share in positions) >= 0.95 * len(positions), found


@pytest.mark.full
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_every_method_keeps_the_same(name: str, world: int, tmp_path: Path) -> None:
    _check(_run(name, tmp_path, "deepspeed", "float32", every_pair(), world))


@pytest.mark.parametrize(("name", "backend"), SHARDED)
def test_methods_keep_the_same(name: str, backend: str, tmp_path: Path) -> None:
    """Each policy meets one of the four ways to shard a model, and the full cache all of them."""
    _check(_run(name, tmp_path, backend, "float32", ["full", *SOME[SHARDED.index((name, backend)) :: len(SHARDED)]]))


@pytest.mark.full
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", MODELS)
def test_all_methods_keep_the_same(name: str, backend: str, tmp_path: Path) -> None:
    _check(_run(name, tmp_path, backend, "float32", SOME))


def _check_half_precision(results: Any) -> None:
    for found in results:
        shares = [values[0] for values in found.values()]
        assert sum(shares) / len(shares) >= 0.95, found


@product("backend,begin", BACKENDS, range(4), sample=[("deepspeed", 1)])
def test_half_precision_keeps_nearly_the_same(backend: str, begin: int, tmp_path: Path) -> None:
    """In bf16, ranks differ from one rank by rounding alone."""
    _check_half_precision(_run("llama", tmp_path, backend, "bfloat16", SOME[begin::4]))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_two_ranks_on_one_gpu_keep_nearly_the_same(tmp_path: Path) -> None:
    """Products are in another order than on one rank."""
    policies = ["squeeze+kvcrush@0.5", "tova@0.5", "h2o+kivi:group_size=4:residual_length=4@0.5"]
    for found in _run("llama", tmp_path, "deepspeed", "float32", ["full", *policies]):
        assert found.pop("full")[2] < 1e-4
        assert all(positions > 0.95 for positions, _, _ in found.values()), found


def _generate(rank: int, world: int, name: str, folder: str, backend: str) -> list[str]:
    """The policies under which a sharded model generates other tokens than the whole model."""
    import kvpolicy_deepspeed

    model = kvpolicy_deepspeed.load(folder, backend=backend)  # pyright: ignore[reportArgumentType]
    alone = make(name)
    wrong = list[str]()
    tokens = torch.randint(3, model.config.vocab_size, (3, PROMPT), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(tokens)
    mask[1, :9] = 0
    given: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 10, "min_new_tokens": 10, "do_sample": False}
    for policy in ("full", words("squeeze", "kvcrush"), words("tova", "kivi"), words("h2o", "tokenwise")):
        output: list[torch.Tensor] = []
        for some in (alone, model):
            some.generation_config.repetition_penalty = 1.0
            with torch.no_grad(), kvpolicy.attach(some, policy):
                output.append(some.generate(tokens, **given))
        if not torch.equal(*output):
            wrong.append(policy)
    return wrong


@product("name,backend", MODELS, BACKENDS, sample=[("mixtral", "hf")])
def test_generates_the_same(name: str, backend: str, tmp_path: Path) -> None:
    assert run_ranks(_generate, 2, name, save(name, tmp_path), backend) == [[], []]


ASKING = words("tova")
SILENT = words("snapkv", "kivi")
"""Policies that ask other ranks in each step, and that do not."""


def _compiled(rank: int, world: int, folder: str, backend: str, policy: str) -> int:
    """The number of graphs of compiled steps."""
    import kvpolicy_deepspeed

    model = kvpolicy_deepspeed.load(folder, backend=backend)  # pyright: ignore[reportArgumentType]
    tokens = torch.randint(3, model.config.vocab_size, (2, PROMPT), generator=torch.Generator().manual_seed(1))
    torch.compiler.reset()
    counter = CompileCounterWithBackend("eager")
    with torch.no_grad(), kvpolicy.attach(model, policy):
        cache = PolicyCache(model, new=12)
        model(tokens, cache=cache)
        step = torch.compile(model, backend=counter, fullgraph=True)
        for column in range(PROMPT, PROMPT + 12):
            place = torch.full((2, 1), column)
            step(tokens[:, :1].clone(), position_ids=place, cache=cache, use_cache=True)
            cache.tick()
    return int(counter.frame_count)


@product("backend,policy", BACKENDS, [ASKING, SILENT], sample=[("deepspeed", ASKING)])
def test_a_compiled_step_is_one_graph(backend: str, policy: str, tmp_path: Path) -> None:
    assert run_ranks(_compiled, 2, save("llama", tmp_path), backend, policy) == [1, 1]
