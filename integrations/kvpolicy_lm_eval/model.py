"""The model `kvpolicy` of lm-eval: its Hugging Face model `hf` with a KV cache under a policy."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from lm_eval.models import huggingface
from tqdm import tqdm

import kvpolicy
from kvpolicy import Policy
from kvpolicy.hf.attachment import Hold, check_compile, check_hold
from kvpolicy.hf.plan import check_readable
from kvpolicy.hf.tile_size import TileSize, check_tile
from kvpolicy.reporting.logging import without_warning_of_few_tokens
from kvpolicy.text.budget import Budget, json_budget
from kvpolicy.text.embedded_names import EMBEDDED
from kvpolicy.text.errors import KVPolicyError, KVPolicyWarning
from kvpolicy_lm_eval import ranks, scoring
from kvpolicy_lm_eval.arguments import (
    BACKENDS,
    at_least,
    check_spelling,
    check_values,
    loading_error,
    named_arguments,
    read_policy,
    read_sharding,
)
from kvpolicy_lm_eval.auto_batch import AutoBatch
from kvpolicy_lm_eval.fingerprint import describe_others, fingerprint_of
from kvpolicy_lm_eval.generating import Batch, Completer, end_of_answers, new_tokens_of
from kvpolicy_lm_eval.held_back import NOTHING_HELD
from kvpolicy_lm_eval.prefix_search import PrefixSearch
from kvpolicy_lm_eval.prefixes import SharedText, Tokens, check_processes, read_least
from kvpolicy_lm_eval.progress import one_bar
from kvpolicy_lm_eval.request_cache import RequestCache
from kvpolicy_lm_eval.request_groups import group_by_task, join_tasks, without_prefixes
from kvpolicy_lm_eval.rows import REFILLS, answer_in_rows, is_greedy, rows_obstacle, stack_answers
from kvpolicy_lm_eval.scoring import Answer, Scorer
from kvpolicy_lm_eval.stats import Stats

log = logging.getLogger("lm_eval.kvpolicy")  # a child of lm-eval's logger, so that its messages are shown

HFLM: Any = huggingface.HFLM  # its type is lost in the decorator that registers it

_ASSETS = Path(kvpolicy.__file__).parent / "assets"
_EMBEDDED = {name: str(_ASSETS / name) for name in EMBEDDED}
"""Folders of the embedded models, by name."""
_NAMES = {folder: f"embedded {name}" for name, folder in _EMBEDDED.items()}


class KVPolicyLM(HFLM):
    """Evaluate every request type of lm-eval on a KV cache under a policy.

    Tokenization, chat templates, stop words and truncation are those of lm-eval's model `hf`. With `policy=full`, its
    own code answers the requests, and only the report of the costs is added.

    Args:
        pretrained: As in `hf`, or the name of an embedded model: `tiny`, the default, or `tiny-4k`.
        policy: A policy or its spec.
        budget: Overrides the budget of the policy.
        holdback: The number of tokens at the end of a scored context that are fed with the answer, instead of being
            compressed with the context. With 0, the first token of an answer is predicted by the uncompressed prefill,
            as in generation. If the document of a request has a text `held_back`, with which its prompt ends, at least
            that text is held back, in generation too. If it also has a true `beyond`, what is held back is kept in
            addition to the budget; an answer that is scored is fed in the same forward pass, for which nothing is
            evicted either way.
        rolling_chunk: Tokens per forward pass of a rolling log-likelihood; the cache is compressed after each.
        tp: The number of ranks over which the model is sharded. Each is a process, started by `torchrun` or
            `deepspeed`.
        backend: The library that shards the model: `deepspeed`, the default, or `hf`. Other values are passed on to
            `hf`, which has an argument of this name too.
        tile: The most tokens of a prompt that a layer takes at a time; `auto`, the default, chooses by the free memory
            of a GPU, and `none` takes all.
        hold: How a prompt is held that waits, such as for its replay: `plain`, or in the codec's `codes`.
        compile: Whether the steps of generated answers are compiled: `true` on a CPU too, `false` nowhere. By default
            as transformers does for a static cache, on a GPU.
        group_by_prefix: Whether to group requests whose contexts begin with the same tokens, 256 or more, or as many as
            the number says. Each common prefix is prefilled and compressed once, without what follows it, and its
            slots are shared by all rows behind it.
        **kwargs: All other arguments of `hf`.
    """

    def __init__(
        self,
        pretrained: Any = None,
        policy: str | Policy | None = "full",
        budget: Budget | None = None,
        holdback: int = 1,
        rolling_chunk: int = 64,
        tp: int | None = None,
        backend: str = "default",
        tile: int | str | None = "auto",
        hold: str = "plain",
        compile: bool | None = None,
        group_by_prefix: bool | int = False,
        **kwargs: Any,
    ) -> None:
        """Parse the policy, load the model as `hf` does, and check that the policy can be used with it."""
        pretrained = pretrained or EMBEDDED[0]
        resolved = _EMBEDDED.get(pretrained, pretrained) if isinstance(pretrained, str) else pretrained
        check_spelling(kwargs, named_arguments(KVPolicyLM.__init__), resolved)
        check_values(kwargs, backend)
        self.others = describe_others(kwargs)
        self.policy = read_policy(policy, budget)
        self.holdback = at_least("holdback", holdback, 0)
        self.rolling_chunk = at_least("rolling_chunk", rolling_chunk, 2)
        self.tile: TileSize = check_tile(None if tile in (None, "none", "None") else tile)
        self.hold: Hold = check_hold(hold)
        self.compile = check_compile(compile)
        self.least_prefix = read_least(group_by_prefix)
        self._shared: SharedText | None = None  # of the requests in progress
        self._prefixes = PrefixSearch(self.least_prefix)
        self.sharding = read_sharding(tp, backend, kwargs, os.environ)
        self.stats = Stats()
        self._held_back = NOTHING_HELD  # of the documents of the requests in progress
        self._auto = AutoBatch(lambda *requests: self._detect_batch_size(*requests))
        self._rows = 0  # rows that the requests in progress are answered in; 0 for whole batches
        self._rows_obstacle: str | None = None  # why there are none; None if it is not known yet
        if isinstance(pretrained, str) and pretrained in _EMBEDDED:
            pretrained = _EMBEDDED[pretrained]
            kwargs.setdefault("dtype", "float32")  # the checkpoint is in half precision; its results are for float32
        if not torch.cuda.is_available():
            kwargs.setdefault("device", "cpu")  # HFLM's default is the GPU, even if there is none
        if self.sharding.tp > 1:
            self._load_shard(pretrained, kwargs)
        else:
            kwargs["backend"] = "default" if backend in BACKENDS else backend
            self._load_whole(pretrained, kwargs)
        if self.backend != "causal":
            raise KVPolicyError("The model must be decoder-only, got an encoder-decoder; try a causal language model.")
        accelerator = getattr(self, "accelerator", None)
        if accelerator is not None and accelerator.num_processes > self._world_size:
            # HFLM divides the requests among processes only on several GPUs. On CPU, each would answer all of them.
            self._rank = accelerator.process_index
            self._world_size = accelerator.num_processes
        if self.sharding.tp == 1:
            ranks.warn_of_copies(self._world_size, os.environ)
        self._check_policy()

    def _check_policy(self) -> None:
        """Raise errors about the model and the policy now, not at the first request."""
        check_processes(self.least_prefix, self._world_size)
        if self.is_full:
            self._full_bytes(1)
        if self.least_prefix:
            check_readable(self.policy)
        if not self._is_stock:
            self._attached().detach()

    def _attached(self) -> kvpolicy.Handle:
        """The policy, attached to the model."""
        return kvpolicy.attach(self.model, self.policy, tile=self.tile, hold=self.hold, compile=self.compile)

    def _load_whole(self, pretrained: Any, arguments: dict[str, Any]) -> None:
        """Load the model as `hf` does."""
        ranks.refuse_shard(pretrained)
        try:
            super().__init__(pretrained=pretrained, **arguments)
        except (OSError, TypeError) as error:
            wrong = loading_error(error, pretrained, arguments)
            if wrong is None:
                raise
            raise wrong from error

    def _load_shard(self, pretrained: Any, arguments: dict[str, Any]) -> None:
        """Load this rank's shard of the model. HFLM treats it as a whole model, and this process as the only one."""
        model = ranks.load_shard(pretrained, self.sharding, arguments.pop("dtype", "auto"), self.policy)
        if isinstance(pretrained, str):
            arguments["tokenizer"] = arguments.get("tokenizer") or pretrained
        with ranks.no_instance_warnings():
            super().__init__(pretrained=model, **arguments)
        if isinstance(pretrained, str):
            self.pretrained: Any = pretrained

    @property
    def is_full(self) -> bool:
        """Whether the policy is `full`, which changes nothing."""
        return self.policy == Policy()

    @property
    def _is_stock(self) -> bool:
        """Whether the code of HFLM answers the requests."""
        return self.is_full and not self.least_prefix

    @property
    def fingerprint(self) -> str:
        """Everything that an answer depends on besides its request."""
        name = self.pretrained if isinstance(self.pretrained, str) else self.model.name_or_path
        return fingerprint_of(self, _NAMES.get(name, name))

    def set_cache_hook(self, cache_hook: Any) -> None:
        """Use lm-eval's request cache, unless a run with another fingerprint filled it."""
        self.stats.begin()
        answers = getattr(cache_hook, "dbdict", None)
        self._prefixes.cache = RequestCache(answers)
        if answers is not None:
            self._prefixes.cache.claim(self.fingerprint)
            if self.sharding.tp > 1:
                ranks.synchronize_answers(answers)
        super().set_cache_hook(cache_hook)

    def get_model_info(self) -> dict[str, Any]:
        """Add the policy, its budget, KV bytes and speed to the entries of the results file."""
        report = self.stats.report()
        self.stats.is_told = True
        tp = self.sharding.tp
        unit = "sequence" if tp == 1 else f"sequence on each of {tp} ranks"
        for name, cost in report.items():
            kv_bytes = f"{cost['kv_bytes']:,} of {cost['full_kv_bytes']:,}"
            log.info("%s: %s KV bytes per %s, %s tokens per second", name, kv_bytes, unit, cost["tokens_per_second"])
        return super().get_model_info() | {
            "kvpolicy": {
                "version": kvpolicy.__version__,
                "format": 1,
                "policy": str(self.policy),
                "budget": json_budget(self.policy.budget),
                "holdback": self.holdback,
                "rolling_chunk": self.rolling_chunk,
                "group_by_prefix": self.least_prefix,
                "tp": tp,
                "backend": self.sharding.backend,
                "bytes_are": f"per {unit}",
                "tasks": report,
            }
        }

    def barrier(self) -> None:
        """Wait for all processes, and sum their tallies. lm-eval calls it after each request type."""
        super().barrier()
        if self.world_size > 1:
            parts = self.gather_object(dict(self.stats.tallies), dst=0)
            self.stats.replace(parts if self.rank == 0 else [])

    # Requests, by task

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[Answer]:
        """Score answers on their compressed contexts."""
        return self._by_task("loglikelihood", super().loglikelihood, requests, disable_tqdm)

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Score whole texts, fed in chunks; the cache is compressed after each chunk."""
        with self._measured_batch():
            return self._by_task("loglikelihood_rolling", super().loglikelihood_rolling, requests, disable_tqdm)

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Generate on a compressed cache; greedy answers in rows that are refilled, if there are several."""
        generate = super().generate_until

        def answer(some: list[Any], disable_tqdm: bool) -> list[str]:
            if not self._refills(some):
                return generate(some, disable_tqdm=disable_tqdm)
            rows = self.batch_size_per_gpu
            self.batch_size_per_gpu = REFILLS * rows  # what HFLM pads and passes on at a time
            self._rows = rows
            try:
                return generate(some, disable_tqdm=disable_tqdm)
            finally:
                self.batch_size_per_gpu = rows
                self._rows = 0

        with self._measured_batch():
            return self._by_task("generate_until", answer, requests, disable_tqdm)

    @contextmanager
    def _measured_batch(self) -> Generator[None]:
        """Replace `auto` by a number meanwhile: HFLM would measure it for each group of requests."""
        if self.batch_size != "auto":
            yield
            return
        self.batch_size_per_gpu: Any = self._auto.to_generate()
        self.batch_sizes[0] = self.batch_size_per_gpu
        try:
            yield
        finally:
            self.batch_size_per_gpu = "auto"

    def _refills(self, requests: list[Any]) -> bool:
        """Whether answers are generated in rows that are refilled: in one process, greedily, of whole prompts."""
        rows = self.batch_size_per_gpu
        alone = self.sharding.tp == 1 and self.world_size == 1 and self.mixed_precision_dtype is None
        plain = not self._is_stock and self._shared is None and not self._held_back.tokens
        if not alone or not plain or not isinstance(rows, int) or rows < 2:
            return False
        if not all(is_greedy(request.args[1]) for request in requests):
            return False
        if self._rows_obstacle is None:
            with self._attached() as handle:
                self._rows_obstacle = rows_obstacle(handle, rows, self.max_length)
            if self._rows_obstacle:
                log.info("Answers wait for the longest one of their batch, since %s", self._rows_obstacle)
        return not self._rows_obstacle

    def _by_task(self, kind: str, answer: Callable[..., list[Any]], requests: list[Any], quiet: bool) -> list[Any]:
        """Answer the requests of each task separately, so that each task has its own tally."""
        self.stats.begin()
        if self.sharding.tp > 1:
            ranks.check_same_requests(kind, requests)
        groups = group_by_task(kind, requests, self.tok_encode)
        self._prefixes.cache.check_distinct(groups, requests)
        if self.world_size > 1:
            groups = join_tasks(groups, self.batch_size)
        if self.least_prefix and kind == "generate_until":
            together = self._prefixes.share(kind, groups, requests, [*map(self._prompt, requests)])
        else:
            together = without_prefixes(groups)
        answers: list[Any] = [None] * len(requests)
        # lm-eval has a bar for each call, which are many if a task has several groups.
        many = kind != "loglikelihood_rolling" and len(together) > len({some.task for some in together})
        hidden = quiet or self.rank != 0
        bar = one_bar(self, f"Running {kind} requests", len(requests), hidden) if many else nullcontext()
        with self._prefixes.of(kind, len(requests)), bar:
            for task, held_back, prefix, members in together:
                self.stats.current = f"{task}/{kind}"
                self.stats.now.requests += len(members)
                self._held_back = held_back
                with self._sharing(prefix), without_warning_of_few_tokens():
                    task_answers = answer([requests[index] for index in members], disable_tqdm=quiet or many)
                for index, task_answer in zip(members, task_answers, strict=True):
                    answers[index] = task_answer
        self._held_back = NOTHING_HELD
        return answers

    def _prompt(self, request: Any) -> Tokens:
        """Token ids of a prompt to generate from, as HFLM passes them on: without the begin of one that is too long."""
        text, options = request.args
        room = self.max_length - new_tokens_of(options, self.max_gen_toks)
        ids, _ = self.tok_batch_encode([text], truncation=self.truncation)
        return tuple(ids[0].tolist())[-room:]

    @contextmanager
    def _sharing(self, prefix: Tokens) -> Generator[None]:
        """Attach the policy, and hold a prefix that the rows of several batches share; nothing without one."""
        if not prefix:
            yield
            return
        with self._attached():
            with self.stats.clock(self.device):
                cache = self._completer().share(torch.tensor([prefix], device=self.device))
            self._shared = SharedText(prefix, cache)
            try:
                yield
            finally:
                self._shared = None

    # Scoring

    def _loglikelihood_tokens(
        self, requests: Sequence[Any], disable_tqdm: bool = False, override_bs: int | None = None, **kwargs: Any
    ) -> list[Answer]:
        rolling = bool(requests) and requests[0][0] is None  # HFLM marks the windows of a rolling text like this
        self.stats.now.prompt_tokens += sum(len(context) for _, context, _ in requests)
        self.stats.now.new_tokens += sum(len(answer) for _, _, answer in requests)
        with self.stats.clock(self.device):
            if not self._is_stock:
                return self._score(requests, rolling, override_bs, disable_tqdm)
            answers = super()._loglikelihood_tokens(requests, disable_tqdm=disable_tqdm, override_bs=override_bs)
        for length in scoring.reported_lengths(scoring.split(requests, self.max_length, self._holdback), rolling):
            self._add_full_cache(length)
        return answers

    def _score(self, requests: Sequence[Any], rolling: bool, batch: int | None, quiet: bool) -> list[Answer]:
        batch = batch or self._batch(requests)
        answers: list[Any] = [None] * len(requests)
        hidden = quiet or rolling or self.rank != 0  # lm-eval shows its own bar for rolling texts
        bar = tqdm(total=len(requests), disable=hidden, desc=f"Scoring under {self.policy}")
        with bar, self._attached(), warnings.catch_warnings():
            # A rolling text is compressed after each chunk on purpose: see `rolling_chunk`.
            warnings.filterwarnings("ignore", "Each chunk of the prompt", KVPolicyWarning)
            scorer = self._scorer(self.policy)
            if rolling:
                scored = scoring.score_texts(requests, scorer, self.max_length, self.rolling_chunk, batch)
            else:
                whole = self._scorer(Policy())  # no budget of it is too small
                scored = scoring.score_answers(
                    requests, scorer, whole, self.max_length, self._holdback, batch, self._prefixes.of_scored(requests)
                )
            for index, answer in scored:
                answers[index] = answer
                if not rolling:
                    self.cache_hook.add_partial("loglikelihood", requests[index][0], answer)
                bar.update(1)
        return answers

    @property
    def _holdback(self) -> int:
        """Tokens at the end of a scored context that are fed with the answer, in the requests in progress."""
        return max(self.holdback, self._held_back.tokens)

    def _scorer(self, policy: Policy) -> Scorer:
        def new_cache(prompt: torch.Tensor) -> Any:
            # Announce one new token, so that a policy with decode=grow does not preallocate slots for more.
            return kvpolicy.PolicyCache(self.model, policy, prompt=prompt, new=1)

        return Scorer(
            model=self.model,
            new_cache=new_cache,
            on_filled=self._add_cache,
            pad=self._pad,
            device=self.device,
            autocast=self.mixed_precision_dtype,
            softmax_dtype=self.softmax_dtype,
        )

    def _add_cache(self, rows: int, cache: Any) -> None:
        self.stats.now.add_cache(rows, cache.nbytes, cache.full_nbytes)

    @property
    def _pad(self) -> int:
        return self.tokenizer.pad_token_id or 0

    def _batch(self, requests: Sequence[Any]) -> int:
        """Return the batch size. `auto` is measured with the longest request, and again with a longer one of a task."""
        if self.batch_size != "auto":
            return int(self.batch_size)
        # Processes measure together, and each has other requests: there, the first measurement stays.
        self.batch_sizes[0] = self._auto.to_score(requests, again=self.world_size == 1)
        return self.batch_sizes[0]

    def _add_full_cache(self, tokens: int) -> None:
        nbytes = self._full_bytes(tokens)
        self.stats.now.add_cache(1, nbytes, nbytes)

    def _full_bytes(self, tokens: int) -> int:
        """Return the bytes of the stock cache of one row, on one rank."""
        dtype = self.model.dtype
        plan = kvpolicy.plan(self.config, Policy(), prompt=max(tokens, 1), dtype=dtype, tp=self.sharding.tp)
        return plan.full_nbytes

    # Generation

    def _model_generate(self, context: Any, max_length: int, stop: list[str], **kwargs: Any) -> torch.Tensor:
        max_length = end_of_answers(self.model, context.shape[1], max_length)
        if self._rows:
            return self._generate_in_rows(context, max_length, stop, kwargs["attention_mask"])
        mask = kwargs.get("attention_mask")
        mask = torch.ones_like(context) if mask is None else mask
        batch = Batch(context, mask, max_length, kwargs.get("num_beams") or 1)
        columns = context.shape[1]
        with self.stats.clock(self.device) as tally:
            if self._is_stock:
                out = super()._model_generate(context, max_length, stop, **kwargs)
            else:
                out = self._complete(batch, stop, kwargs)
        tally.prompt_tokens += int(mask.sum())
        tally.new_tokens += int((out[:, columns:] != self.tokenizer.pad_token_id).sum())
        if self._is_stock:
            for length in batch.lengths.tolist():
                self._add_full_cache(length + out.shape[1] - columns - 1)  # the last token is not in the cache
        return out

    def _complete(self, batch: Batch, stop: list[str], options: dict[str, Any]) -> torch.Tensor:
        """Generate under the policy, behind the prefix that the requests in progress share, if there is one."""
        if self._shared is None:
            with self._attached():
                return self._completer(stop).whole(batch, self._held_back, options)
        completer = self._completer(stop)
        out = completer.behind(batch, self._shared, options)
        return completer.whole(batch, self._held_back, options) if out is None else out

    def _completer(self, stop: Sequence[str] = ()) -> Completer:
        plain = super()._model_generate

        def generate(ids: torch.Tensor, end: int, **options: Any) -> torch.Tensor:
            return plain(ids, end, stop, **options)

        return Completer(
            model=self.model,
            policy=self.policy,
            generate=generate,
            forward=self._scorer(self.policy).forward,
            on_answered=self._add_cache,
            pad=self._pad,
        )

    def _generate_in_rows(self, context: Any, max_length: int, stop: list[str], mask: Any) -> torch.Tensor:
        columns = context.shape[1]
        prompts = [ids[valid.bool()].tolist() for ids, valid in zip(context, mask, strict=True)]
        with self.stats.clock(self.device) as tally, self._attached() as handle:
            new = max_length - columns
            found = answer_in_rows(handle, self.model, self.tokenizer, prompts, self._rows, new, stop)
        out = stack_answers(context, found, max_length, self._pad)
        for answer in found:
            if answer.usage is not None:
                tally.add_cache(1, answer.usage.cache_nbytes, answer.usage.full_nbytes)
            tally.new_tokens += sum(token != self.tokenizer.pad_token_id for token in answer.tokens)  # as of a batch
        tally.prompt_tokens += sum(map(len, prompts))
        return out
