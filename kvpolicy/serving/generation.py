"""Answers on their way through the rows: what transformers' handlers ask for, and what they get."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from torch import Tensor

from kvpolicy.reporting.detokenizer import Detokenizer
from kvpolicy.serving.grammars import Grammars, Matcher
from kvpolicy.serving.metrics import CacheUsage, Metrics
from kvpolicy.serving.prefix import Prefix
from kvpolicy.serving.prompt import Prompt, ends_of
from kvpolicy.serving.requests import TOO_MANY, Call, RequestError, positions_of
from kvpolicy.serving.sampling import Sampler
from kvpolicy.serving.scheduler import Scheduler
from kvpolicy.serving.streamer import AnswerStreamer, AnswerTokens, StopStrings
from kvpolicy.text.errors import KVPolicyError, is_out_of_memory

DEFAULT_NEW_TOKENS = 1024
"""The most tokens of an answer without a number in its request, if the model's context has room for them."""

BEFORE = 8
"""Tokens before one whose text is asked for: those of a word and of a character."""

SHUTTING_DOWN = "The server is shutting down; try again later."

log = logging.getLogger("kvpolicy.serving")


class Cancelled(Exception):
    """The client of a request is gone."""


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


class Group:
    """The answers of one request, which wait for rows together.

    Args:
        size: How many they are.
    """

    def __init__(self, size: int = 1) -> None:
        """None of them is prepared."""
        self.ready: list[Job] = []
        self.prompts: dict[tuple[int, ...], Prompt] = {}
        self._size = size

    def prompt(self, ids: list[int], config: Any) -> Prompt:
        """The prompt of an answer, which answers with the same tokens share."""
        return self.prompts.setdefault(tuple(ids), Prompt(ids, config))

    def add(self, job: Job) -> list[Job]:
        """Note that an answer is prepared; returns all of them once the last one is, and else none."""
        self.ready.append(job)
        return self.ready if self.is_complete else []

    @property
    def is_complete(self) -> bool:
        """Whether all of them are prepared."""
        return len(self.ready) == self._size


class Job:
    """One answer on its way through the rows.

    Args:
        key: The id of the answer.
        call: The request.
        group: The answers of the same request.

    Attributes:
        client: The same, for the scheduler.
        loop: The event loop.
        cancelled: Set once the client is gone.
        begun: Done once the first token is generated, or there will be none.
        done: Done once the answer has ended.
        wake: Tells the rows that the answer was cancelled.
        ended: Called once the answer has ended.
        times: How long it took.
        matcher: The tokens that the format of the answer allows; None for all.
        written: The text of a whole answer that is not streamed.
        has_stopped: Whether its last token ends it, or completes a string that does.
        prompt: The prompt.
        text: Token ids of the prompt and the answer so far.
        tokens: Generated tokens.
        cached: Tokens of the prompt that were not computed for this answer.
        usage: Content of the cache at the end; None before it.
        failure: The error, or None.
    """

    def __init__(self, key: str, call: Call, group: Group | None = None) -> None:
        """An answer that is not prepared."""
        self.key = key
        self.call = call
        self.group = self.client = group or Group()
        self.cancelled = threading.Event()
        self.prompt = Prompt([], None)
        self.text: list[int] = []
        self.tokens: list[int] = []
        self.cached = 0
        self.usage: CacheUsage | None = None
        self.failure: Failure | None = None
        self.loop = asyncio.get_running_loop()
        self.begun: asyncio.Future[None] = self.loop.create_future()
        self.done: asyncio.Future[None] = self.loop.create_future()
        self.wake: Callable[[], None] = lambda: None
        self.ended: Callable[[Job], None] = lambda job: None
        self.streamer: AnswerStreamer | None = None
        self.times = Times()
        self.matcher: Matcher | None = None
        self.written = ""
        self.has_stopped = False
        self._tokenizer: Any = None
        self._sampler: Sampler | None = None
        self._stops: StopStrings | None = None

    def prepare(self, tokenizer: Any, streamer: AnswerStreamer | None, stop: Sequence[str]) -> None:
        """Note what the text is decoded with, where it goes, and the strings that end it."""
        self.streamer = streamer
        self._tokenizer = tokenizer
        if stop:
            self._stops = StopStrings(tokenizer, stop, self.prompt.ids)
        if streamer is not None:
            streamer.begin(self.prompt.ids)

    def cancel(self) -> None:
        """Let the answer end, since nobody waits for it."""
        self.cancelled.set()
        self.wake()

    @property
    def is_cancelled(self) -> bool:
        """Whether nobody waits for the answer anymore."""
        return self.cancelled.is_set()

    @property
    def is_complete(self) -> bool:
        """Whether the answer has all that its format asks for; False without a format."""
        return self.matcher is not None and self.matcher.is_complete

    @property
    def logprobs(self) -> list[Any]:
        """The log probabilities of the tokens so far, if the request asks for them."""
        return [] if self._sampler is None else self._sampler.logprobs

    def take(self, logits: Tensor, best: int) -> bool:
        """Choose the next token, and send its text; returns whether it is the last one."""
        prompt = self.prompt
        new = prompt.config.max_new_tokens
        if self._sampler is None:
            is_greedy = not prompt.config.do_sample
            self._sampler = Sampler(
                self.call.sampling,
                prompt.ids,
                new,
                prompt.processors or [],
                is_greedy=is_greedy,
                device=logits.device,
                matcher=self.matcher,
            )
        token = self._sampler(logits, best)
        self.tokens.append(token)
        self.text.append(token)
        if len(self.tokens) == 1:
            self.times.begin()
            self.signal(self.begun)
        if self.streamer is not None:
            self.streamer.add(token)
        is_stopped = self._stops is not None and self._stops.add(token)
        self.has_stopped = is_stopped or token in prompt.ends
        return self.has_stopped or len(self.tokens) >= new or self.is_complete

    def texts_at(self, number: int) -> Callable[[int], str]:
        """The texts of tokens in the place of the one with a number in the answer, behind the tokens before it."""
        before = [*self.prompt.ids[-BEFORE:], *self.tokens[max(number - BEFORE, 0) : number]]
        return Detokenizer(self._tokenizer, before, skip_special_tokens=False).text_of

    def end(self, usage: CacheUsage | None, error: Exception | None) -> None:
        """End the answer: with what its cache held, or with an error; with neither if it was cancelled."""
        self.times.end()
        self.usage = usage
        if error is not None:
            self.failure = describe(error)
        if self.streamer is not None:
            try:
                self.streamer.end(self.failure, is_whole=usage is not None)
            except Exception as found:  # of the tokenizer
                self.failure = describe(found)
                self.streamer.end(self.failure)
        self.ended(self)
        self.signal(self.begun)
        self.signal(self.done)

    def signal(self, future: asyncio.Future[None]) -> None:
        """Complete a future of the event loop from another thread."""

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


def make_jobs(key: str, call: Call) -> list[Job]:
    """The answers of a request.

    Args:
        key: The id of the request.
        call: The request.
    """
    calls = call.each()
    group = Group(len(calls))
    return [Job(key if not index else f"{key}-{index}", one, group) for index, one in enumerate(calls)]


class Times:
    """When an answer was asked for, began and ended, in seconds.

    Attributes:
        first: From the request to the first token; None before it.
        whole: From the request to the end; None before it.
    """

    def __init__(self) -> None:
        """The request has arrived."""
        self._arrived = time.monotonic()
        self.first: float | None = None
        self.whole: float | None = None

    def begin(self) -> None:
        """The first token is there."""
        self.first = time.monotonic() - self._arrived

    def end(self) -> None:
        """The answer has ended."""
        self.whole = time.monotonic() - self._arrived


class Generation:
    """What transformers' handlers know as the manager that generates.

    Args:
        scheduler: The rows.
        metrics: The counters.
        prefix: The cache that every request starts from, or None.
        queue: The most answers that wait for a row.
        length: The most tokens of a prompt and its answer, if rows have room for fewer than the model.

    Attributes:
        metrics: The counters.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        metrics: Metrics,
        prefix: Prefix | None,
        queue: int,
        length: int | None = None,
    ) -> None:
        """Start the rows."""
        self._scheduler = scheduler
        self.metrics = metrics
        self._prefix = prefix
        self._queue = queue
        self._length = length
        self._grammars = Grammars()
        self._jobs: dict[str, Job] = {}
        self._receiving: set[asyncio.Task[Any]] = set()
        self._is_stopped = False
        metrics.prefix_nbytes = 0 if prefix is None else prefix.cache.nbytes
        metrics.watch(scheduler)
        scheduler.start()

    def open(self, jobs: list[Job]) -> None:
        """Expect answers of one request, for which a handler will ask by their keys.

        Raises:
            RequestError: If too many others wait.
        """
        most = self._queue + len(self._scheduler.rows)
        if self._jobs and len(self._jobs) + len(jobs) > most:
            raise RequestError(
                f"At most {self._queue:,} answers may wait, got {len(self._jobs):,} that wait or are being generated; "
                "try again later.",
                TOO_MANY,
                "rate_limit_exceeded",
            )
        for job in jobs:
            job.wake = self._scheduler.wake
            job.ended = self._count
            self._jobs[job.key] = job

    def close(self, job: Job) -> None:
        """Cancel a job, and forget it if it did not reach the rows."""
        job.cancel()
        if job not in job.group.ready or not job.group.is_complete:
            self._jobs.pop(job.key, None)
            job.signal(job.begun)
            job.signal(job.done)

    def refuse_new(self) -> None:
        """Refuse all waiting and later requests; those with a row go on."""
        self._scheduler.close(Failure(SHUTTING_DOWN, 503))

    async def receive(self, body: Coroutine[Any, Any, Any]) -> Any:
        """Wait for what a client sends, which may be never.

        Raises:
            Failure: If the server ends before.
        """
        task = asyncio.ensure_future(body)
        self._receiving.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            if self._is_stopped:
                raise Failure(SHUTTING_DOWN, 503) from None
            raise
        finally:
            self._receiving.discard(task)

    async def stop_running(self) -> None:
        """End what runs with an error, and what clients send, and wait for the thread."""
        self._is_stopped = True
        for task in self._receiving:
            task.cancel()
        self._scheduler.stop(Failure(SHUTTING_DOWN, 503))
        await asyncio.get_running_loop().run_in_executor(None, self._scheduler.join)

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
        if job.call.format is not None:  # the text is the answer, whatever it looks like
            response_parser = None
        streamer = AnswerStreamer(processor, queue, job.post, job.cancel, response_parser)
        self._start(job, model, processor, inputs, gen_config, streamer)
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
        self._start(job, model, processor, inputs, gen_config, None)
        await asyncio.sleep(0)  # until here in a thread: see `begin_in_thread`
        await job.done
        if job.failure is not None:
            raise job.failure
        if job.usage is None:
            raise Cancelled
        prompt = job.prompt.ids
        answer = AnswerTokens(processor, prompt, job.tokens)
        job.written = answer.text
        return answer.text, len(prompt), answer

    def _start(self, job: Job, model: Any, processor: Any, inputs: Any, config: Any, streamer: Any) -> None:
        """Check a prompt, and let it wait for a row."""
        ids: list[int] = inputs["input_ids"].flatten().tolist()
        if not ids:
            raise KVPolicyError("The prompt must have at least one token, got none; try a longer prompt.")
        if self._prefix is not None:
            self._prefix.check(ids)
        of_model = config.stop_strings or ()  # those of a request are not among them
        configure(config, job.call, positions_of(model), self._length, len(ids), processor)
        if job.call.format is not None:
            job.matcher = self._grammars.matcher(job.call.format, processor, ends_of(config))
        job.prompt = job.group.prompt(ids, config)
        job.text = [*ids]
        job.prepare(processor, streamer, (*job.call.stop, *([of_model] if isinstance(of_model, str) else of_model)))
        ready = job.group.add(job)  # last: what is added belongs to the rows
        if ready:
            self._scheduler.submit(ready)

    def _count(self, job: Job) -> None:
        """Count an answer that has ended, and write it to the log."""
        outcome = "answered" if job.usage is not None else "cancelled"
        if job.failure is not None:
            outcome = "refused" if job.failure.status < 500 else "failed"
        self.metrics.end(outcome, job)
        self._jobs.pop(job.key, None)
        log.info("%s", _line(outcome, job))


def _line(outcome: str, job: Job) -> str:
    """One line of log about an answer."""
    said = f"{job.key} {outcome}: {len(job.prompt.ids):,} tokens of prompt, {len(job.tokens):,} generated"
    if job.times.first is not None and job.times.whole is not None:
        said += f", the first after {job.times.first:.2f} s and the last after {job.times.whole:.2f} s"
    if job.usage is not None:
        said += f", {job.usage.kept_tokens:,.0f} tokens kept in {job.usage.cache_nbytes:,} bytes"
    return said + ("" if job.failure is None else f": {job.failure}")


def configure(config: Any, call: Call, positions: int | None, rows: int | None, prompt: int, tokenizer: Any) -> None:
    """Set the options that transformers' handler leaves to the model: requested sampling, and a length that fits.

    Args:
        config: The generation config, which is changed.
        call: The request.
        positions: The positions of the model; None without a limit.
        rows: The tokens for which a row has room; None without a limit.
        prompt: Tokens of the prompt.
        tokenizer: The tokenizer.

    Raises:
        KVPolicyError: If the prompt and the answer do not fit.
    """
    config.num_beams = 1  # tokens are streamed
    config.num_return_sequences = 1
    config.stop_strings = None  # see `StopStrings`
    if call.sample is not None:
        config.do_sample = call.sample
    call.sampling.configure(config)
    if config.pad_token_id is None:
        config.pad_token_id = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    limit = min((each for each in (positions, rows) if each is not None), default=None)
    new = call.max_tokens or (DEFAULT_NEW_TOKENS if limit is None else max(min(DEFAULT_NEW_TOKENS, limit - prompt), 1))
    if limit is not None and prompt + new > limit:
        what = "positions" if limit == positions else "tokens, see --length,"
        raise KVPolicyError(
            f"The prompt and max_tokens must fit into {limit:,} {what.rstrip(',')}, got {prompt:,} and {new:,}; try a "
            "shorter prompt or a smaller max_tokens."
        )
    config.max_new_tokens = new


def describe(error: Exception) -> Failure:
    """The failure that a client receives for an error, which is logged unless the client can fix it."""
    if isinstance(error, Failure):
        return Failure(str(error), error.status)  # a new one, without frames
    if isinstance(error, KVPolicyError):
        return Failure(str(error), 400)
    if is_out_of_memory(error):
        return Failure("There is not enough memory for this request: use a shorter prompt or fewer tokens.", 503)
    log.error("A request failed.", exc_info=error)
    return Failure(f"The server failed to answer ({type(error).__name__}); its log says more.", 500)
