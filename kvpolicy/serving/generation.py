"""The thread that generates: one request after the other, each with a cache of its own."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from typing import Any

import torch

from kvpolicy.hf.cache_names import CACHE
from kvpolicy.serving import handlers
from kvpolicy.serving.metrics import CacheUsage, Metrics
from kvpolicy.serving.prefix import Prefix
from kvpolicy.serving.requests import Call, positions_of
from kvpolicy.serving.streamer import AnswerStreamer, AnswerTokens, StopStrings
from kvpolicy.text.errors import KVPolicyError

DEFAULT_NEW_TOKENS = 1024
"""The most tokens of an answer without a number in its request, if the model's context has room for them."""

SHUTTING_DOWN = "The server is shutting down; try again later."

log = logging.getLogger("kvpolicy.serving")


class Cancelled(Exception):
    """The client of the running request is gone."""


class Failure(Exception):
    """An error while generating, without the frames that would keep the cache alive.

    Args:
        message: One sentence.
        status: The HTTP status.
    """

    def __init__(self, message: str, status: int) -> None:
        """Remember the status."""
        super().__init__(message)
        self.status = status


class Job:
    """One request on its way through the thread.

    Args:
        key: The id of the request.
        call: The request.

    Attributes:
        loop: The event loop.
        cancelled: Set once the client is gone.
        begun: Done once the first token is generated, or there will be none.
        done: Done once the thread is done with it.
        tokens: Generated tokens.
        usage: Content of the cache at the end; None before it.
        failure: The error, or None.
    """

    def __init__(self, key: str, call: Call) -> None:
        """A request that has not reached the thread."""
        self.key = key
        self.call = call
        self.cancelled = threading.Event()
        self.tokens: list[int] = []
        self.usage: CacheUsage | None = None
        self.failure: Failure | None = None
        self.loop = asyncio.get_running_loop()
        self.begun: asyncio.Future[None] = self.loop.create_future()
        self.done: asyncio.Future[None] = self.loop.create_future()

    def signal(self, future: asyncio.Future[None]) -> None:
        """Complete a future of the event loop from the thread."""

        def complete() -> None:
            # `begun` is signaled twice, and asyncio cancels a future together with the task that awaits it.
            if not future.done():
                future.set_result(None)

        self.post(complete)

    def post(self, function: Callable[..., Any], *args: Any) -> None:
        """Call a function in the event loop, unless the loop has ended."""
        try:
            self.loop.call_soon_threadsafe(function, *args)
        except RuntimeError:
            if not self.loop.is_closed():
                raise


class Watcher:
    """The streamer of a job: it counts tokens, measures the cache, and ends `generate` if the client is gone.

    Args:
        job: The job.
        cache: The cache of the running `generate`.
        metrics: The counters.
        stopping: Set if the server ends.
        inner: The streamer that sends the text, or None.
    """

    def __init__(
        self, job: Job, cache: Callable[[], Any], metrics: Metrics, stopping: threading.Event, inner: Any
    ) -> None:
        """A streamer for one `generate`."""
        self._job = job
        self._cache = cache
        self._metrics = metrics
        self._stopping = stopping
        self._inner = inner
        self._is_prompt = True

    def put(self, value: torch.Tensor) -> None:
        """Take the prompt in the first call, and one token in each later call.

        Raises:
            Cancelled: If the client is gone.
            Failure: If the server ends.
        """
        job = self._job
        if job.cancelled.is_set():
            raise Cancelled
        if self._stopping.is_set():
            raise Failure(SHUTTING_DOWN, 503)
        if not self._is_prompt:
            if not job.tokens:
                self._metrics.hold(self._cache())
                job.signal(job.begun)
            job.tokens += value.flatten().tolist()
        self._is_prompt = False
        if self._inner is not None:
            self._inner.put(value)

    def end(self) -> None:
        """Measure the cache, then end the text, since the last chunk of a stream contains the measures."""
        self._job.usage = CacheUsage.of(self._cache())
        if self._inner is not None:
            self._inner.end()


class Generation(handlers.BaseGeneration):
    """Transformers' manager of `generate` on one thread, with the cache of each request measured and released.

    Args:
        handle: The attached policy.
        metrics: The counters.
        prefix: The cache that every request starts from, or None.
    """

    def __init__(self, handle: Any, metrics: Metrics, prefix: Prefix | None = None) -> None:
        """Start the thread."""
        super().__init__()
        self._handle = handle
        self._metrics = metrics
        self._prefix = prefix
        self._jobs: dict[str, Job] = {}
        self._closing = threading.Event()
        self._stopping = threading.Event()
        metrics.prefix_nbytes = 0 if prefix is None else prefix.cache.nbytes

    def open(self, job: Job) -> None:
        """Expect a job, which a handler will ask for by its key."""
        self._jobs[job.key] = job

    def close(self, job: Job) -> None:
        """Forget a job that did not reach the thread."""
        self._jobs.pop(job.key, None)

    def refuse_new(self) -> None:
        """Refuse all waiting and later requests; the running one goes on."""
        self._closing.set()

    async def stop_running(self) -> None:
        """End what runs with an error, and wait for the thread."""
        self._closing.set()
        self._stopping.set()
        await asyncio.wrap_future(self.submit(lambda: None))

    def generate_streaming(
        self,
        model: Any,
        processor: Any,
        inputs: Any,
        gen_config: Any,
        request_id: str,
        response_parser: Any = None,
        **kwargs: Any,
    ) -> tuple[Any, Any]:
        """Start to generate, and return the queue of the text and its streamer."""
        job = self._jobs[request_id]
        queue: asyncio.Queue[Any] = asyncio.Queue()
        streamer = AnswerStreamer(processor, queue, job.post, job.cancelled.set, response_parser)

        def after() -> None:
            if job.failure is not None:
                job.post(queue.put_nowait, handlers.stream_error(str(job.failure)))
            elif job.usage is None:  # cancelled
                job.post(queue.put_nowait, None)

        self._start(job, model, processor, inputs, gen_config, streamer, after)
        return queue, streamer

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str, **kwargs: Any
    ) -> tuple[str, int, Any]:
        """Generate, and return the text, the length of the prompt and the generated tokens.

        Raises:
            Cancelled: If the client is gone.
            Failure: If the policy refuses the prompt, or something else goes wrong.
        """
        job = self._jobs[request_id]
        self._start(job, model, processor, inputs, gen_config, None, lambda: None)
        await asyncio.sleep(0)  # until here in a thread: see `begin_in_thread`
        await job.done
        if job.failure is not None:
            raise job.failure
        if job.usage is None:
            raise Cancelled
        prompt: list[int] = inputs["input_ids"][0].tolist()
        answer = AnswerTokens(processor, prompt, job.tokens)
        return answer.text, len(prompt), answer

    def _start(
        self,
        job: Job,
        model: Any,
        processor: Any,
        inputs: Any,
        gen_config: Any,
        inner: Any,
        after: Callable[[], None],
    ) -> None:
        """Check a prompt, and queue it for the thread."""
        ids = inputs["input_ids"]
        if not ids.numel():
            raise KVPolicyError("The prompt must have at least one token, got none; try a longer prompt.")
        if self._prefix is not None:
            self._prefix.check(ids[0].tolist())
        _configure(gen_config, job.call, model, ids.shape[1], processor)
        arguments = {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "generation_config": gen_config,
            "tokenizer": processor,
        }
        self._metrics.queue(1)
        self.submit(self._run, job, model, arguments, inner, after)

    def _run(self, job: Job, model: Any, arguments: dict[str, Any], inner: Any, after: Callable[[], None]) -> None:
        """Answer one request, on the thread. Nothing is raised: an error would keep the frames, and so the cache."""
        metrics = self._metrics
        metrics.queue(-1)
        metrics.running = 1
        try:
            if job.cancelled.is_set():  # also while the server ends: nobody is refused
                raise Cancelled
            if self._closing.is_set():
                raise Failure(SHUTTING_DOWN, 503)
            self._generate(job, model, arguments, inner)
        except Cancelled:
            pass
        except Exception as error:
            job.failure = describe(error)
        finally:
            # Frees the cache: the arguments hold a prefix's copy, and the handle holds the cache that `generate` made.
            arguments.clear()
            self._handle.cache = None
        outcome = "answered" if job.usage is not None else "cancelled"
        if job.failure is not None:
            outcome = "refused" if job.failure.status < 500 else "failed"
        metrics.count(outcome)
        metrics.generated_tokens += len(job.tokens)
        metrics.last = job.usage or metrics.last
        metrics.running = 0
        self._jobs.pop(job.key, None)
        after()
        job.signal(job.begun)
        job.signal(job.done)

    def _generate(self, job: Job, model: Any, arguments: dict[str, Any], inner: Any) -> None:
        # Here, and not where the request arrived: the request before may have been sampling then.
        if job.call.seed is not None:
            torch.manual_seed(job.call.seed)
        cache = None
        if self._prefix is not None:
            cache = arguments[CACHE] = self._prefix.start()
        self._metrics.prompt_tokens += arguments["input_ids"].shape[1]
        watcher = Watcher(
            job, lambda: self._handle.cache if cache is None else cache, self._metrics, self._stopping, inner
        )
        if job.call.stop:
            arguments["stopping_criteria"] = [StopStrings(arguments["tokenizer"], job.call.stop)]
        with torch.inference_mode():
            model.generate(**arguments, streamer=watcher)


def _configure(config: Any, call: Call, model: Any, prompt: int, tokenizer: Any) -> None:
    """Set the options that transformers' handler leaves to the model: requested sampling, and a length that fits."""
    config.num_beams = 1  # tokens are streamed
    if call.sample is not None:
        config.do_sample = call.sample
    if not config.do_sample:  # generate warns of what has no effect
        config.temperature = config.top_p = config.top_k = None
    if config.pad_token_id is None:
        config.pad_token_id = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    limit = positions_of(model)
    new = call.max_tokens or (DEFAULT_NEW_TOKENS if limit is None else max(min(DEFAULT_NEW_TOKENS, limit - prompt), 1))
    if limit is not None and prompt + new > limit:
        raise KVPolicyError(
            f"The prompt and max_tokens must fit into {limit:,} positions, got {prompt:,} and {new:,}; try a shorter "
            "prompt or a smaller max_tokens."
        )
    config.max_new_tokens = new


def describe(error: Exception) -> Failure:
    """The failure that a client receives for an error, which is logged unless the client can fix it."""
    if isinstance(error, Failure):
        return Failure(str(error), error.status)  # a new one, without frames
    if isinstance(error, KVPolicyError):
        return Failure(str(error), 400)
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return Failure("There is not enough memory for this request: use a shorter prompt or fewer tokens.", 503)
    log.error("A request failed.", exc_info=error)
    return Failure(f"The server failed to answer ({type(error).__name__}); its log says more.", 500)
