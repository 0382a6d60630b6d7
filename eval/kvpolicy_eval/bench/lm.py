"""Overhead of lm-eval's model `kvpolicy` over its model `hf`, with a policy that changes nothing."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import kvpolicy
from kvpolicy_eval.bench.timing import Row, compare
from kvpolicy_lm_eval.data import prompts

LIMIT = 1.05


def measure(count: int = 24, rounds: int = 9) -> Iterator[Row]:
    """Time the same requests through `hf` and through `kvpolicy` with `policy=full`.

    Args:
        count: Requests of each kind.
        rounds: Repetitions.
    """
    from lm_eval.models.huggingface import HFLM

    from kvpolicy_lm_eval.model import KVPolicyLM

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    path = str(Path(kvpolicy.__file__).parent / "assets" / "tiny")
    options: dict[str, Any] = {"pretrained": path, "device": "cpu", "dtype": "float32", "batch_size": 8}
    make_stock: Any = HFLM
    stock = make_stock(**options)
    ours = KVPolicyLM(policy="full", **options)
    texts = [prompts.recall(Random(seed), records=60) for seed in range(count)]
    kinds: dict[str, list[tuple[Any, ...]]] = {
        "loglikelihood": [(text, " " + answer) for text, answer in texts],
        "generate_until": [(text, {"until": [], "max_gen_toks": 16, "do_sample": False}) for text, _ in texts],
    }
    for kind, arguments in kinds.items():
        requests = [_request(kind, one, index) for index, one in enumerate(arguments)]
        ratio = compare(partial(_ask, stock, kind, requests), partial(_ask, ours, kind, requests), rounds)
        yield Row(f"lm-eval, {count} of `{kind}`", "full", ratio, LIMIT)


def _request(kind: str, arguments: tuple[Any, ...], index: int) -> Any:
    from lm_eval.api.instance import Instance

    make: Any = Instance
    return make(kind, {}, arguments, index, task_name="bench", doc_id=index, repeats=1)


def _ask(model: Any, kind: str, requests: list[Any]) -> None:
    getattr(model, kind)(requests, disable_tqdm=True)
