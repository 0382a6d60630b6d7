"""The measurements and checks of `kvpolicy bench`: time, memory and logits."""

from __future__ import annotations

import inspect
import itertools
import platform
import statistics
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor
from transformers import CompileConfig

import kvpolicy
from kvpolicy.cli.generation import TimedStreamer
from kvpolicy.hf.cache_names import cache_argument, output_cache
from kvpolicy.hf.tile_size import TileSize
from kvpolicy.policy import Policy
from kvpolicy.reporting.logging import without_warning_of_few_tokens

PADDED_LENGTH = 192
"""Columns of the prompt of a check."""

SHORT_LENGTH = 128
"""Tokens of its shorter row; the other columns are padding."""

CHECKED_STEPS = 4
"""Decode steps of a check."""


class Times(NamedTuple):
    """Seconds of the prefill, and of one decode step."""

    prefill: float
    step: float


def machine(model: Any) -> dict[str, Any]:
    """Return the versions of the libraries, and the device, threads and dtype."""
    versions = {"kvpolicy": kvpolicy.__version__, "torch": torch.__version__, "transformers": transformers.__version__}
    return {
        "versions": {name: str(version) for name, version in versions.items()} | {"Python": platform.python_version()},
        "device": str(model.device),
        "threads": torch.get_num_threads(),
        "dtype": str(model.dtype).removeprefix("torch."),
    }


def compare_to_stock(
    model: Any,
    policies: Sequence[Policy],
    length: int,
    steps: int,
    rounds: int,
    tile: TileSize = None,
    *,
    compile: bool = False,
) -> dict[str, Any]:
    """Measure each policy and the stock cache.

    In each round the stock cache and the policy run one after the other, so that noise affects both. The reported
    ratios are medians over the rounds.

    Args:
        model: A model without a policy.
        policies: The policies to measure, at least one.
        length: Prompt length.
        steps: Number of decode steps.
        rounds: Number of measurements of each policy.
        tile: The most tokens of a prompt that a layer takes at a time under a policy, `auto`, or None.
        compile: Whether steps are compiled: those of `generate`, beside those of the compiled static cache.
    """
    ids = _random_tokens(model, 1, length)
    measure_stock = static_times if compile else _measure
    measure_policy = _compiled_policy if compile else _measure_policy
    stock: list[Times] = []
    results: list[dict[str, Any]] = []
    for policy in policies:
        measure_stock(model, ids, 1)  # warm-up, and compilation
        measure_policy(model, policy, ids, 1, tile)
        reference: list[Times] = []
        measured: list[Times] = []
        nbytes = 0
        full_nbytes = 0
        for _ in range(rounds):
            reference.append(measure_stock(model, ids, steps))
            times, nbytes, full_nbytes = measure_policy(model, policy, ids, steps, tile)
            measured.append(times)
        results.append(_result(policy, reference, measured, nbytes, full_nbytes))
        stock.append(_median(reference))
    median = _median(stock)
    full = results[0]["full_bytes"]
    return {
        "stock": {"prefill_seconds": median.prefill, "step_seconds": median.step, "bytes": full},
        "policies": results,
    }


def _result(
    policy: Policy, reference: Sequence[Times], measured: Sequence[Times], nbytes: int, full_nbytes: int
) -> dict[str, Any]:
    median = _median(measured)
    pairs = list(zip(reference, measured, strict=True))
    return {
        "policy": str(policy),
        "prefill_ratio": statistics.median(ours.prefill / stock.prefill for stock, ours in pairs),
        "step_ratio": statistics.median(ours.step / stock.step for stock, ours in pairs),
        "prefill_seconds": median.prefill,
        "step_seconds": median.step,
        "bytes": nbytes,
        "full_bytes": full_nbytes,
    }


def _median(times: Sequence[Times]) -> Times:
    return Times(*(statistics.median(each) for each in zip(*times, strict=True)))


def _measure_policy(model: Any, policy: Policy, ids: Tensor, steps: int, tile: TileSize) -> tuple[Times, int, int]:
    """Return the times under a policy, and the bytes of its cache and of the full cache."""
    with kvpolicy.attach(model, policy, tile=tile), without_warning_of_few_tokens():
        cache = kvpolicy.PolicyCache(model, new=steps + 1)  # one step is for warm-up
        times = _measure(model, ids, steps, cache)
        report = cache.report()
    return times, report.nbytes, report.full_nbytes


def _measure(model: Any, ids: Tensor, steps: int, cache: Any = None) -> Times:
    with torch.inference_mode():
        start = _now(model)
        given = cache_argument(model, cache)
        cache = output_cache(model(ids, **given, use_cache=True, logits_to_keep=1))
        given = cache_argument(model, cache)
        prefilled = _now(model)
        model(ids[:, :1], **given)  # warm-up: the first step allocates what later steps reuse
        decode_start = _now(model)
        for _ in range(steps):
            model(ids[:, :1], **given)
        return Times(prefilled - start, (_now(model) - decode_start) / steps)


def generation_times(model: Any, ids: Tensor, steps: int, **how: Any) -> tuple[Times, float]:
    """Generate greedily, and return the times of the prompt and of a step, and the seconds of the first step.

    The first step is none of those that are counted: it may wait for a compilation.

    Args:
        model: The model, with a policy attached or without.
        ids: The prompt, [1, P].
        steps: Number of steps that count, at least 1.
        **how: Further arguments of `generate`.
    """
    new = steps + 2  # the prompt gives the first token
    timed = TimedStreamer()
    ended: dict[str, Any] = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False}
    start = _now(model)
    model.generate(ids, attention_mask=torch.ones_like(ids), streamer=timed, **ended, **how)
    first, *rest = [after - before for before, after in itertools.pairwise(timed.times)]
    return Times(timed.times[0] - start, statistics.median(rest)), first


def static_times(model: Any, ids: Tensor, steps: int) -> Times:
    """Times of `generate` on the static cache, compiled on any device, as `generation_times`."""
    config = CompileConfig()
    config._compile_all_devices = True  # pyright: ignore[reportAttributeAccessIssue, reportPrivateUsage]
    return generation_times(model, ids, steps, cache_implementation="static", compile_config=config)[0]


def _compiled_policy(model: Any, policy: Policy, ids: Tensor, steps: int, tile: TileSize) -> tuple[Times, int, int]:
    """As `_measure_policy`, of `generate` with compiled steps."""
    with kvpolicy.attach(model, policy, tile=tile, compile=True), without_warning_of_few_tokens():
        cache = kvpolicy.PolicyCache(model, new=steps + 2)
        times, _ = generation_times(model, ids, steps, **cache_argument(model, cache))
        report = cache.report()
    return times, report.nbytes, report.full_nbytes


def _now(model: Any) -> float:
    if model.device.type != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter()


def checks(model: Any, policies: Sequence[Policy]) -> list[dict[str, Any]]:
    """Check that the policy `full` reproduces the stock cache, and that padding does not change logits."""
    ids = _random_tokens(model, 2, PADDED_LENGTH)
    padding = PADDED_LENGTH - SHORT_LENGTH
    mask = torch.ones_like(ids)
    mask[0, :padding] = 0
    differences: list[float] = []
    with torch.inference_mode():
        stock = _logits(model, ids)
        with kvpolicy.attach(model, Policy()):
            full_difference = _difference(stock, _logits(model, ids))
        for policy in policies:
            with kvpolicy.attach(model, policy), without_warning_of_few_tokens():
                padded = _logits(model, ids, mask)[:1]
                alone = _logits(model, ids[:1, padding:])
            differences.append(_difference(alone, padded))
    return [
        _check("the policy full reproduces the logits of the stock cache", model, full_difference),
        _check("under each policy, a padded row has the logits of the row alone", model, max(differences)),
    ]


def _logits(model: Any, ids: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return the last logits of the prompt and of each decode step, [B, 1 + CHECKED_STEPS, V] fp32."""
    mask = torch.ones_like(ids) if mask is None else mask
    output = model(ids, attention_mask=mask, use_cache=True, **_position_ids(model, mask, ids.shape[1]))
    logits = [output.logits[:, -1]]
    for step in range(CHECKED_STEPS):
        mask = torch.cat([mask, mask[:, -1:]], -1)
        # The tokens of the decode steps are the last ones of the prompt, in reverse order.
        output = model(
            ids[:, -1 - step : -step or None],
            attention_mask=mask,
            **cache_argument(model, output_cache(output)),
            **_position_ids(model, mask, 1),
        )
        logits.append(output.logits[:, -1])
    return torch.stack(logits, 1).float()


def _position_ids(model: Any, mask: Tensor, new: int) -> dict[str, Tensor]:
    """Return position ids that do not count padding, as `generate` passes them.

    Without them, a model with learned position embeddings would use the column index.
    """
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return {}
    return {"position_ids": (mask.cumsum(-1) - 1).clamp_min(0)[:, -new:]}


def _difference(expected: Tensor, actual: Tensor) -> float:
    """Return the largest absolute difference, relative to the largest expected value."""
    return float((expected - actual).abs().max() / expected.abs().max())


def _check(what: str, model: Any, difference: float) -> dict[str, Any]:
    # In half precision, rounding alone can change which tokens are kept, so the tolerance is larger.
    allowed = 1e-3 if model.dtype in (torch.float32, torch.float64) else 5e-2
    return {"what": what, "difference": difference, "allowed": allowed, "passed": difference <= allowed}


def _random_tokens(model: Any, rows: int, length: int) -> Tensor:
    """Return random tokens with a fixed seed, [rows, length] int64."""
    vocabulary = model.get_input_embeddings().num_embeddings
    generator = torch.Generator().manual_seed(0)
    # The lowest ids are special tokens in many vocabularies.
    return torch.randint(min(3, vocabulary - 1), vocabulary, (rows, length), generator=generator, device="cpu").to(
        model.device
    )
