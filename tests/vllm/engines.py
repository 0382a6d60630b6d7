"""Engines of vLLM, and what tests ask them."""

# vLLM is no dependency of development.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import gc
import os
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.vllm.models import Answer

BLOCK = 32
"""Tokens of a block: the fewest that the CPU backend has."""

ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


@contextmanager
def model_classes_kept() -> Generator[None]:
    """Take back what vLLM does to classes of transformers.

    Its backend of transformers makes models compilable by changing their class, from which no model can be made
    outside an engine any more.
    """
    from vllm.model_executor.models.transformers.base import Base

    decorate = Base._decorate_cls_for_torch_compile
    before: dict[type, tuple[tuple[type, ...], dict[str, Any]]] = {}

    def noted(self: Any, cls: type, *args: Any, **kwargs: Any) -> None:
        before.setdefault(cls, (cls.__bases__, dict(vars(cls))))
        decorate(self, cls, *args, **kwargs)

    Base._decorate_cls_for_torch_compile = noted
    try:
        yield
    finally:
        Base._decorate_cls_for_torch_compile = decorate
        for cls, (bases, members) in before.items():
            for name in set(vars(cls)) - set(members):
                delattr(cls, name)
            for name, member in members.items():
                if vars(cls)[name] is not member:
                    setattr(cls, name, member)
            cls.__bases__ = bases


@contextmanager
def engine(model: Path, **options: Any) -> Generator[Any]:
    """A `vllm.LLM` with the connector, and the `extra` config of that.

    With `processes`, its scheduler and its ranks are in processes of their own.
    """
    processes = str(int(options.pop("processes", False)))
    os.environ.update(ENVIRONMENT | {"VLLM_ENABLE_V1_MULTIPROCESSING": processes})
    from vllm import LLM
    from vllm.config import KVTransferConfig
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

    extra: dict[str, Any] = options.pop("extra", {})
    defaults: dict[str, Any] = {
        "dtype": "float32",
        "block_size": BLOCK,
        "enforce_eager": True,
        "max_model_len": 512,
        "num_gpu_blocks_override": 128,
        "skip_tokenizer_init": True,
        "disable_log_stats": True,
    }
    transfer = KVTransferConfig(
        kv_connector="KVPolicyConnector",
        kv_connector_module_path="kvpolicy_vllm.connector",
        kv_role="kv_both",
        kv_connector_extra_config=extra,
    )
    llm: Any = None
    with model_classes_kept():
        try:
            llm = LLM(str(model), kv_transfer_config=transfer, **(defaults | options))
            yield llm
        finally:
            # Also of an engine that has not started, whose connector the next one would use.
            ensure_kv_transfer_shutdown()
            if llm is not None:
                llm.llm_engine.engine_core.shutdown()
            cleanup_dist_env_and_memory()
            gc.collect()


def sampling(params: dict[str, Any] | None = None, tokens: int = 8, **options: Any) -> Any:
    """Greedy sampling parameters."""
    from vllm import SamplingParams

    extra = None if params is None else {"kv_transfer_params": params}
    defaults = {"temperature": 0.0, "logprobs": 0, "ignore_eos": True, "detokenize": False}
    return SamplingParams(max_tokens=tokens, extra_args=extra, **(defaults | options))


def about(path: Path, question: Sequence[int], llm: Any = None, **options: Any) -> tuple[Any, Any]:
    """A request about a document: what `LLM.generate` takes."""
    from kvpolicy_vllm import prompt

    text, params = prompt(path, [*question], llm)
    return text, sampling(params, **options)


def plain(question: Sequence[int], **options: Any) -> tuple[Any, Any]:
    """A request without a document."""
    return {"prompt_token_ids": [*question]}, sampling(**options)


def ask(llm: Any, requests: Sequence[tuple[Any, Any]]) -> list[Any]:
    """The outputs of requests, as one batch."""
    prompts, params = zip(*requests, strict=True)
    return llm.generate([*prompts], [*params], use_tqdm=False)


def answers(llm: Any, requests: Sequence[tuple[Any, Any]]) -> list[Answer]:
    """The first output of each of some requests, none of which may fail."""
    return answers_of(ask(llm, requests))


def answers_of(outputs: Sequence[Any]) -> list[Answer]:
    """The answers of outputs, none of which may have failed."""
    assert reasons(outputs) == ["length"] * len(outputs)
    return [_answer(each.outputs[0]) for each in outputs]


def reasons(outputs: Sequence[Any]) -> list[str]:
    return [each.outputs[0].finish_reason for each in outputs]


def scheduler_of(llm: Any) -> Any:
    """The scheduler of an engine in this process."""
    return llm.llm_engine.engine_core.engine_core.scheduler


def free_blocks(llm: Any) -> int:
    return scheduler_of(llm).kv_cache_manager.block_pool.get_num_free_blocks()


def _answer(output: Any) -> Answer:
    tokens = [*output.token_ids]
    return Answer(tokens, [scores[token].logprob for token, scores in zip(tokens, output.logprobs, strict=True)])
