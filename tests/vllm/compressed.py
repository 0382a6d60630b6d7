"""Prompts that an engine compresses, and what kvpolicy itself answers to them under the same policy."""

# vLLM is no dependency of development.
# pyright: reportMissingImports=false

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

import torch

import kvpolicy
from kvpolicy_vllm.prompts import first_request, second_request
from kvpolicy_vllm.recipe import Recipe
from tests.vllm.engines import sampling, scheduler_of
from tests.vllm.models import Answer

LEAST = 64
"""The threshold in tests: `snapkv` keeps its 32 newest tokens and others beside."""

POLICIES = (
    "snapkv@0.4",
    "snapkv:window=8@0.2",
    "window@0.2",
    "streaming@24",
    "kvcrush/snapkv:window=8@0.4",
    "kvcrush/h2o@0.3",
    "keydiff@0.2",
    "h2o@0.3",
    "tova@0.2",
    "expected@0.3",
)


def recipe_of(policy: str, **options: Any) -> Recipe:
    return Recipe.parse(policy, **{"threshold": LEAST, "least": 0, **options})


def compressor_of(llm: Any) -> Any:
    """What compresses in an engine of this process."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    assert llm is not None
    return get_kv_transfer_group()._compressor


def use(llm: Any, recipe: Recipe) -> None:
    """Let an engine of this process compress otherwise: starting one takes long."""
    scheduler_of(llm).connector._ledger._recipe = recipe
    compressor_of(llm)._recipe = recipe


def run(
    llm: Any, prompts: Sequence[Sequence[int]], recipe: Recipe, others: Sequence[Any] = (), **options: Any
) -> list[Any]:
    """Outputs of prompts, whose second requests come as soon as the first ones have ended, and of others beside.

    Args:
        llm: The engine.
        prompts: Token ids.
        recipe: How the engine compresses them.
        others: Requests that run beside them.
        options: Of the second requests.
    """
    core = llm.llm_engine
    names = [secrets.token_hex(8) for _ in prompts]
    for number, (ids, name) in enumerate(zip(prompts, names, strict=True)):
        text, params = first_request(ids, name)
        core.add_request(f"first-{number}", text, sampling(params, tokens=1))
    for number, (text, params) in enumerate(others):
        core.add_request(f"other-{number}", text, params)
    done: dict[str, Any] = {}
    while core.has_unfinished_requests():
        for output in core.step():
            kind, _, number = output.request_id.partition("-")
            if output.finished:
                done[output.request_id] = output
            if output.finished and kind == "first":
                ids = prompts[int(number)]
                name = names[int(number)]
                text, params = second_request(ids, recipe.kept(len(ids)), name)
                core.add_request(f"second-{number}", text, sampling(params, **options))
    return [done[f"second-{n}"] for n in range(len(prompts))] + [done[f"other-{n}"] for n in range(len(others))]


def wanted(model: Any, recipe: Recipe, ids: Sequence[int], tokens: int = 8) -> Answer:
    """What kvpolicy answers behind a prompt under the policy of a recipe."""
    found = Answer([], [])
    with torch.no_grad(), kvpolicy.attach(model, recipe.policy):
        cache = kvpolicy.PolicyCache(model)
        step = torch.tensor([[*ids]])
        for _ in range(tokens):
            scores = model(step, cache=cache).logits[0, -1].float().log_softmax(-1)
            best = int(scores.argmax())
            found.tokens.append(best)
            found.logprobs.append(float(scores[best]))
            step = torch.tensor([[best]])
    return found


def start(llm: Any, ids: Sequence[int], recipe: Recipe, name: str, first: bool | None = True) -> tuple[Any, Any]:
    """The second request of a prompt, after its first one has run.

    Args:
        llm: The engine.
        ids: The prompt.
        recipe: How the engine compresses it.
        name: Its name.
        first: Whether to run the first request; None for that one, as it is.
    """
    text, params = first_request(ids, name)
    if first is None:
        return text, sampling(params, tokens=1)
    if first:
        (output,) = llm.generate([text], [sampling(params, tokens=1)], use_tqdm=False)
        assert output.outputs[0].finish_reason == "length"
    text, params = second_request(ids, recipe.kept(len(ids)), name)
    return text, sampling(params)
