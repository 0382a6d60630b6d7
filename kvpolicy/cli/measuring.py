"""Times, bytes and checks of `kvpolicy bench`."""

from __future__ import annotations

import inspect
import platform
import statistics
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor

import kvpolicy
from kvpolicy.policy import Policy

CHECKED, UNPADDED, AFTER = 192, 128, 4
"""Tokens of a check's prompt, of its shorter row, and of what is decoded behind it."""


class Times(NamedTuple):
    """Seconds of a prompt and of a token behind it."""

    prefill: float
    step: float


def machine(model: Any) -> dict[str, Any]:
    """Versions, device, threads and dtype."""
    versions = {"kvpolicy": kvpolicy.__version__, "torch": torch.__version__, "transformers": transformers.__version__}
    return {
        "versions": {name: str(version) for name, version in versions.items()} | {"Python": platform.python_version()},
        "device": str(model.device),
        "threads": torch.get_num_threads(),
        "dtype": str(model.dtype).removeprefix("torch."),
    }


def compared(model: Any, policies: Sequence[Policy], length: int, steps: int, rounds: int) -> dict[str, Any]:
    """The stock cache, and each policy beside it, measured in turn so that both share the machine's noise."""
    ids = _tokens(model, 1, length)
    stock: list[Times] = []
    found: list[dict[str, Any]] = []
    for policy in policies:
        _policy_times(model, policy, ids, 1)  # to warm up
        runs = [(_times(model, ids, steps), *_policy_times(model, policy, ids, steps)) for _ in range(rounds)]
        found.append(_line(policy, [(theirs, ours) for theirs, ours, _ in runs], runs[-1][2]))
        stock.append(_middle([theirs for theirs, _, _ in runs]))
    middle = _middle(stock)
    full = found[0]["full_bytes"] if found else 0
    head = {"prefill_seconds": middle.prefill, "step_seconds": middle.step, "bytes": full}
    return {"stock": head, "policies": found}


def _line(policy: Policy, pairs: list[tuple[Times, Times]], held: tuple[int, int]) -> dict[str, Any]:
    ours = _middle([ours for _, ours in pairs])
    return {
        "policy": str(policy),
        "prefill_ratio": statistics.median(ours.prefill / theirs.prefill for theirs, ours in pairs),
        "step_ratio": statistics.median(ours.step / theirs.step for theirs, ours in pairs),
        "prefill_seconds": ours.prefill,
        "step_seconds": ours.step,
        "bytes": held[0],
        "full_bytes": held[1],
    }


def _middle(times: Sequence[Times]) -> Times:
    return Times(*(statistics.median(each) for each in zip(*times, strict=True)))


def _policy_times(model: Any, policy: Policy, ids: Tensor, steps: int) -> tuple[Times, tuple[int, int]]:
    with kvpolicy.attach(model, policy):
        cache = kvpolicy.PolicyCache(model, new=steps + 1)
        times = _times(model, ids, steps, cache)
        report = cache.report()
    return times, (report.nbytes, report.full_nbytes)


def _times(model: Any, ids: Tensor, steps: int, cache: Any = None) -> Times:
    with torch.inference_mode():
        start = _now(model)
        cache = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).past_key_values
        prefilled = _now(model)
        model(ids[:, :1], past_key_values=cache)  # the first makes what the others use again
        begun = _now(model)
        for _ in range(steps):
            model(ids[:, :1], past_key_values=cache)
        return Times(prefilled - start, (_now(model) - begun) / steps)


def _now(model: Any) -> float:
    if model.device.type != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter()


def checks(model: Any, policies: Sequence[Policy]) -> list[dict[str, Any]]:
    """Whether the policy that changes nothing changes nothing, and whether padding does, under each policy."""
    ids = _tokens(model, 2, CHECKED)
    mask = torch.ones_like(ids)
    mask[0, : CHECKED - UNPADDED] = 0
    padded: list[float] = []
    with torch.inference_mode():
        plain = _logits(model, ids)
        with kvpolicy.attach(model, Policy()):
            same = _difference(plain, _logits(model, ids))
        for policy in policies:
            with kvpolicy.attach(model, policy):
                row, alone = _logits(model, ids, mask)[:1], _logits(model, ids[:1, CHECKED - UNPADDED :])
            padded.append(_difference(alone, row))
    told = [_check("logits under full are those of the stock cache", model, same)]
    return [*told, _check("a padded row's logits are those of the row alone, under each policy", model, max(padded))]


def _logits(model: Any, ids: Tensor, mask: Tensor | None = None) -> Tensor:
    """The last logits of a prompt and of a few tokens behind it, [B, 1 + AFTER, V] fp32."""
    mask = torch.ones_like(ids) if mask is None else mask
    found = model(ids, attention_mask=mask, use_cache=True, **_places(model, mask, ids.shape[1]))
    last = [found.logits[:, -1]]
    for at in range(AFTER):
        mask = torch.cat([mask, mask[:, -1:]], -1)
        given = {"attention_mask": mask, "past_key_values": found.past_key_values} | _places(model, mask, 1)
        found = model(ids[:, -1 - at : -at or None], **given)
        last.append(found.logits[:, -1])
    return torch.stack(last, 1).float()


def _places(model: Any, mask: Tensor, new: int) -> dict[str, Tensor]:
    """Positions without padding, as `generate` gives them: a learned embedding of the columns' would be another."""
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return {}
    return {"position_ids": (mask.cumsum(-1) - 1).clamp_min(0)[:, -new:]}


def _difference(wanted: Tensor, found: Tensor) -> float:
    """How far numbers differ at most, as a share of the largest."""
    return float((wanted - found).abs().max() / wanted.abs().max())


def _check(what: str, model: Any, difference: float) -> dict[str, Any]:
    """In a short dtype, rounding alone may choose other tokens; so more is allowed."""
    allowed = 1e-3 if model.dtype in (torch.float32, torch.float64) else 5e-2
    return {"what": what, "difference": difference, "allowed": allowed, "passed": difference <= allowed}


def _tokens(model: Any, rows: int, length: int) -> Tensor:
    """Random tokens, the same each time, [rows, length] int64."""
    vocabulary = model.get_input_embeddings().num_embeddings
    generator = torch.Generator().manual_seed(0)
    return torch.randint(min(3, vocabulary - 1), vocabulary, (rows, length), generator=generator).to(model.device)
