"""`lm_eval --model kvpolicy`: lm-eval's Hugging Face model with its KV cache under a policy."""

from __future__ import annotations

import logging
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from lm_eval.models import huggingface
from tqdm import tqdm

import kvpolicy
from kvpolicy import Policy
from kvpolicy.spec.errors import KVPolicyError
from kvpolicy_lm_eval import ranks
from kvpolicy_lm_eval.arguments import BACKENDS, at_least, check_spelling, read_division, read_policy
from kvpolicy_lm_eval.scoring import Answer, Scorer, held_lengths, split, whole
from kvpolicy_lm_eval.stats import Stats

log = logging.getLogger("lm_eval.kvpolicy")  # under lm-eval's, which shows what is said there
T = TypeVar("T")

HFLM: Any = huggingface.HFLM  # type checkers cannot see through the decorator that registers it

_EMBEDDED = Path(kvpolicy.__file__).parent / "assets" / "tiny"
_FINGERPRINT = "__kvpolicy__"


class KVPolicyLM(HFLM):
    """Answer every kind of lm-eval request on a KV cache that a policy keeps small.

    Tokenization, chat templates, stop words and truncation are those of lm-eval's `hf` model. With `policy=full` its
    own code answers too, and only the report is added.

    Args:
        pretrained: As in `hf`; without it, the model that kvpolicy ships.
        policy: A policy's words or a `Policy`.
        budget: Replaces the policy's budget.
        holdback: Tokens at the end of a scored context that are not compressed with it, but fed with the answer. With
            0 the first token of an answer is predicted by the uncompressed prefill, as in generation.
        rolling_chunk: Tokens per forward of a rolling log-likelihood, which is compressed after each.
        tp: Ranks that the model's heads are divided over, one process each; `torchrun` or `deepspeed` starts them.
        backend: What divides it: `deepspeed`, the default, or `hf`. Other values are those of `hf`'s own argument.
        **kwargs: Every argument of `hf`.
    """

    def __init__(
        self,
        pretrained: Any = None,
        policy: str | Policy | None = "full",
        budget: float | str | None = None,
        holdback: int = 1,
        rolling_chunk: int = 64,
        tp: int | None = None,
        backend: str = "default",
        **kwargs: Any,
    ) -> None:
        """Read the policy, load the model as `hf` does, and check that they fit."""
        check_spelling(kwargs, pretrained or str(_EMBEDDED))
        self.policy = read_policy(policy, budget)
        self.holdback = at_least("holdback", holdback, 0)
        self.rolling_chunk = at_least("rolling_chunk", rolling_chunk, 2)
        self.division = read_division(tp, backend, kwargs, os.environ)
        self.stats = Stats()
        self._auto_batch: int | None = None
        if pretrained is None:
            pretrained = str(_EMBEDDED)
            kwargs.setdefault("dtype", "float32")  # what it was measured in; its file is in half precision
        if not torch.cuda.is_available():
            kwargs.setdefault("device", "cpu")  # HFLM's default is the GPU, there or not
        if self.division.tp > 1:
            self._load_part(pretrained, kwargs)
        else:
            kwargs["backend"] = "default" if backend in BACKENDS else backend
            ranks.refuse_part(pretrained)
            super().__init__(pretrained=pretrained, **kwargs)
        if self.backend != "causal":
            raise KVPolicyError("kvpolicy supports decoder-only models: this one is an encoder-decoder.")
        accelerator = getattr(self, "accelerator", None)
        if accelerator is not None and accelerator.num_processes > self._world_size:
            # HFLM does this for several GPUs only; on CPU each process would answer everything
            self._rank, self._world_size = accelerator.process_index, accelerator.num_processes
        if self.division.tp == 1:
            ranks.warn_of_copies(self._world_size, os.environ)
        if self.is_full:  # say now what does not fit
            self._full_bytes(1)
        else:
            kvpolicy.attach(self.model, self.policy).detach()

    def _load_part(self, pretrained: Any, arguments: dict[str, Any]) -> None:
        """Load this rank's part of a model; HFLM takes it for the whole, and this process for the only one."""
        model = ranks.load_part(pretrained, self.division, arguments.pop("dtype", "auto"), self.policy)
        if isinstance(pretrained, str):
            arguments["tokenizer"] = arguments.get("tokenizer") or pretrained
        with ranks.no_warnings_of_instances():
            super().__init__(pretrained=model, **arguments)
        if isinstance(pretrained, str):
            self.pretrained: Any = pretrained

    @property
    def is_full(self) -> bool:
        """Whether the policy changes nothing."""
        return self.policy == Policy()

    @property
    def fingerprint(self) -> str:
        """Describe what a cached answer depends on, besides its request."""
        name = self.pretrained if isinstance(self.pretrained, str) else self.model.name_or_path
        return (
            f"{'embedded' if name == str(_EMBEDDED) else name} {self.model.dtype} policy={self.policy}"
            f" holdback={self.holdback} rolling_chunk={self.rolling_chunk} max_length={self.max_length}"
            + (f" tp={self.division.tp} backend={self.division.backend}" if self.division.tp > 1 else "")
        )

    def set_cache_hook(self, cache_hook: Any) -> None:
        """Take lm-eval's request cache, whose keys forget the policy, unless another run filled it."""
        answers = getattr(cache_hook, "dbdict", None)
        if answers is not None:
            owner = answers.get(_FINGERPRINT) or ("a model other than kvpolicy" if len(answers) else None)
            if owner not in (None, self.fingerprint):
                raise KVPolicyError(
                    f"This request cache was filled by {owner}, and this run is {self.fingerprint}: "
                    "give each policy a --use_cache path of its own."
                )
            answers[_FINGERPRINT] = self.fingerprint
            if self.division.tp > 1:
                ranks.same_answers(answers)
        super().set_cache_hook(cache_hook)

    def get_model_info(self) -> dict[str, Any]:
        """Add policy, budget, KV bytes and speed to what the results file says of the model."""
        report, tp = self.stats.report(), self.division.tp
        each = "sequence" if tp == 1 else f"sequence on each of {tp} ranks"
        for name, cost in report.items():
            held, rate = f"{cost['kv_bytes']:,} of {cost['full_kv_bytes']:,}", cost["tokens_per_second"]
            log.info("%s: %s KV bytes per %s, %s tokens per second", name, held, each, rate)
        return super().get_model_info() | {
            "kvpolicy": {
                "version": kvpolicy.__version__,
                "format": 1,
                "policy": str(self.policy),
                "budget": self.policy.budget,
                "holdback": self.holdback,
                "rolling_chunk": self.rolling_chunk,
                "tp": tp,
                "backend": self.division.backend,
                "bytes_are": f"per {each}",
                "tasks": report,
            }
        }

    def barrier(self) -> None:
        """Wait for every process and sum their counts; lm-eval calls it after each kind of request."""
        super().barrier()
        if self.world_size > 1:
            parts = self.gather_object(dict(self.stats.tallies), dst=0)
            self.stats.replace(parts if self.rank == 0 else [])

    # ------------------------------------------------------------------ requests, task by task

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[Answer]:
        """Score answers on their compressed contexts."""
        return self._by_task("loglikelihood", super().loglikelihood, requests, disable_tqdm)

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Score whole texts, fed in chunks with compression in between."""
        return self._by_task("loglikelihood_rolling", super().loglikelihood_rolling, requests, disable_tqdm)

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Generate on a compressed cache."""
        return self._by_task("generate_until", super().generate_until, requests, disable_tqdm)

    def _by_task(self, kind: str, answer: Callable[..., list[Any]], requests: list[Any], quiet: bool) -> list[Any]:
        """Answer each task's requests by themselves, so that they are counted apart."""
        if self.division.tp > 1:
            ranks.same_requests(kind, requests)
        tasks: defaultdict[str, list[int]] = defaultdict(list)
        for index, request in enumerate(requests):
            tasks[getattr(request, "task_name", None) or "unknown"].append(index)
        if self.world_size > 1:  # processes wait for each other inside, and may not hold the same tasks
            tasks = defaultdict(list, {"+".join(sorted(tasks)): list(range(len(requests)))})
        answers: list[Any] = [None] * len(requests)
        for task, places in tasks.items():
            self.stats.current = f"{task}/{kind}"
            self.stats.now.requests += len(places)
            some = answer([requests[place] for place in places], disable_tqdm=quiet)
            for place, one in zip(places, some, strict=True):
                answers[place] = one
        return answers

    # ------------------------------------------------------------------ scoring

    def _loglikelihood_tokens(
        self, requests: Sequence[Any], disable_tqdm: bool = False, override_bs: int | None = None, **kwargs: Any
    ) -> list[Answer]:
        rolling = bool(requests) and requests[0][0] is None  # how HFLM marks the windows of a rolling text
        self.stats.now.prompt_tokens += sum(len(context) for _, context, _ in requests)
        self.stats.now.new_tokens += sum(len(answer) for _, _, answer in requests)
        with self.stats.clock(self.device):
            if not self.is_full:
                return self._score(requests, rolling, override_bs, disable_tqdm)
            answers = super()._loglikelihood_tokens(requests, disable_tqdm=disable_tqdm, override_bs=override_bs)
        for length in held_lengths(split(requests, self.max_length, self.holdback), rolling):
            self._held_full(length)
        return answers

    def _score(self, requests: Sequence[Any], rolling: bool, batch: int | None, quiet: bool) -> list[Answer]:
        batch = batch or self._batch(requests)
        answers: list[Any] = [None] * len(requests)
        hidden = quiet or rolling or self.rank != 0  # a rolling request is one text, and lm-eval shows its own bar
        bar = tqdm(total=len(requests), disable=hidden, desc=f"Scoring under {self.policy}")
        with bar, kvpolicy.attach(self.model, self.policy):
            parts = self._rolled(requests, batch) if rolling else self._shared(requests, batch)
            for index, answer in parts:
                answers[index] = answer
                if not rolling:
                    self.cache_hook.add_partial("loglikelihood", requests[index][0], answer)
                bar.update(1)
        return answers

    def _rolled(self, requests: Sequence[Any], batch: int) -> Iterator[tuple[int, Answer]]:
        texts, scorer = whole(split(requests, self.max_length, 0)), self._scorer(self.policy)
        for some in _batches(texts, batch):
            yield from scorer.stream(some, self.rolling_chunk)

    def _shared(self, requests: Sequence[Any], batch: int) -> Iterator[tuple[int, Answer]]:
        groups = split(requests, self.max_length, self.holdback)
        alone = groups.pop((), [])
        scorer = self._scorer(self.policy)
        for some in _batches(list(groups), batch):
            yield from scorer.shared(some, groups, batch)
        # nothing is compressed before these are scored, so no budget can be too small for them
        exact = self._scorer(Policy())
        for some in _batches(alone, batch):
            yield from exact.stream(some, 2 * self.max_length)

    def _scorer(self, policy: Policy) -> Scorer:
        def held(rows: int, cache: Any) -> None:
            self.stats.now.held(rows, cache.nbytes, cache.full_nbytes)

        def cache(prompt: torch.Tensor) -> Any:
            # one token to come, so that a growing cache does not set aside room for more
            return kvpolicy.PolicyCache(self.model, policy, prompt=prompt, new=1)

        return Scorer(
            model=self.model,
            cache=cache,
            held=held,
            pad=self.tokenizer.pad_token_id or 0,
            device=self.device,
            autocast=self.mixed_precision_dtype,
            softmax_dtype=self.softmax_dtype,
        )

    def _batch(self, requests: Sequence[Any]) -> int:
        """The batch size; `auto` is measured once, with the longest request."""
        if self.batch_size != "auto":
            return int(self.batch_size)
        if self._auto_batch is None:
            longest = max(requests, key=lambda request: len(request[1]) + len(request[2]))
            self._auto_batch = self.batch_sizes[0] = int(self._detect_batch_size([longest], 0))
        return self._auto_batch

    def _held_full(self, tokens: int) -> None:
        size = self._full_bytes(tokens)
        self.stats.now.held(1, size, size)

    def _full_bytes(self, tokens: int) -> int:
        """Give the stock cache's bytes for `tokens` tokens of one row, on one rank."""
        size, dtype = max(tokens, 1), self.model.dtype
        return kvpolicy.plan(self.config, Policy(), prompt=size, dtype=dtype, tp=self.division.tp).full_nbytes

    # ------------------------------------------------------------------ generation

    def _model_generate(self, context: Any, max_length: int, stop: list[str], **kwargs: Any) -> torch.Tensor:
        mask, columns = kwargs.get("attention_mask"), context.shape[1]
        lengths = (torch.ones_like(context) if mask is None else mask).sum(-1)
        prompt = lengths.repeat_interleave(kwargs.get("num_beams") or 1)  # `generate` repeats a row for every beam
        answer = super()._model_generate
        with self.stats.clock(self.device) as tally:
            if self.is_full:
                out = answer(context, max_length, stop, **kwargs)
            else:
                with kvpolicy.attach(self.model, self.policy):
                    cache = kvpolicy.PolicyCache(self.model, self.policy, prompt=prompt, new=max_length - columns)
                    out = answer(context, max_length, stop, **kwargs, past_key_values=cache)
                tally.held(len(prompt), cache.nbytes, cache.full_nbytes)
        tally.prompt_tokens += int(lengths.sum())
        tally.new_tokens += int((out[:, columns:] != self.tokenizer.pad_token_id).sum())
        if self.is_full:
            for length in prompt.tolist():
                self._held_full(length + out.shape[1] - columns - 1)  # the last token is never fed
        return out


def _batches(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    return (items[i : i + size] for i in range(0, len(items), size))
