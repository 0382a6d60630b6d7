"""The forwards of the model: a prompt, and a step of all rows."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kvpolicy.hf.cache import PolicyCache
from kvpolicy.hf.cache_names import CACHE, cache_argument, passed_cache
from kvpolicy.hf.compiled_generation import step_call
from kvpolicy.hf.discovery import find_sites
from kvpolicy.hf.rotary_lookup import changing_kind
from kvpolicy.serving.interruptible import Interruptible
from kvpolicy.serving.metrics import CacheUsage, Metrics
from kvpolicy.serving.prefix import Prefix
from kvpolicy.serving.prefix_caching import PrefixCaching
from kvpolicy.text.errors import KVPolicyError


class Prompts:
    """The forwards of prompts, each of which makes a cache of its own.

    Args:
        model: The model, with a policy attached.
        handle: The handle of the policy.
        metrics: The counters.
        prefix: The cache that every request starts from, or None.
        memory: The most bytes of beginnings that prompts have in common; 0 to compute every prompt alone.
    """

    def __init__(
        self, model: Any, handle: Any, metrics: Metrics, prefix: Prefix | None = None, memory: int = 0
    ) -> None:
        """Nothing was read."""
        self.model = model
        self.handle = handle
        self.metrics = metrics
        self._prefix = prefix
        self._caching = PrefixCaching(model, memory, self._run) if memory else None
        self._kept: dict[str, Any] = {"logits_to_keep": 1} if model._supports_logits_to_keep() else {}

    def read(self, answer: Any) -> tuple[PolicyCache, Tensor]:
        """Run the text of an answer: its cache, and logits [V] of the next token.

        `generate` prepares the cache and the logits processors, and refuses what it cannot do. The processors are left
        in `answer.prompt`.
        """
        processors: list[Any] = []

        def run(model: Any, input_ids: Tensor, logits_processor: Any, generation_config: Any, **kwargs: Any) -> Any:
            cache = passed_cache(kwargs)
            processors.extend(logits_processor)
            return cache, self.forward(model, cache, input_ids[:, cache.get_seq_length() :])[0]

        text = torch.tensor([answer.text], device=self.model.device)
        config = copy.deepcopy(answer.prompt.config)
        config.max_new_tokens -= len(answer.tokens)
        if not answer.tokens:
            self.metrics.prompt_tokens += len(answer.text)
        try:
            with torch.inference_mode():
                start, cached = self._start(answer.text)
                found = self.model.generate(
                    text,
                    attention_mask=torch.ones_like(text),
                    generation_config=config,
                    custom_generate=run,
                    **({} if start is None else {CACHE: start}),
                )
        finally:
            self.handle.cache = None  # holds the newest one
        if answer.prompt.processors is None:
            answer.prompt.processors = processors
        if not answer.tokens:
            answer.cached = cached
            self.metrics.cached_tokens += cached
        return found

    def _start(self, text: list[int]) -> tuple[PolicyCache | None, int]:
        """A cache that a text goes on from, and how many of its tokens it holds already; None to begin anew."""
        prefix = self._prefix
        if prefix is not None and not changing_kind(self.model.config, len(prefix.ids), len(text)):
            return prefix.start(), len(prefix.ids)
        if self._caching is None:
            return None, 0
        found = self._caching.start(text)
        self.metrics.prefix_nbytes = self._caching.nbytes
        return found

    def _run(self, cache: PolicyCache, ids: list[int]) -> None:
        """Run a part of a prompt."""
        self.forward(self.model, cache, torch.tensor([ids], device=self.model.device))

    def step(self, call: Callable[..., Any], cache: Any, tokens: list[int]) -> Tensor:
        """Logits [B, V] of the token behind the newest one of each row."""
        with torch.inference_mode():
            return self.forward(call, cache, torch.tensor(tokens, device=self.model.device)[:, None])

    def forward(self, call: Callable[..., Any], cache: Any, tokens: Tensor) -> Tensor:
        """Logits [B, V] of the token behind `tokens` [B, P]."""
        return call(input_ids=tokens, **cache_argument(self.model, cache), **self._kept).logits[:, -1]


class OneRow:
    """One row, which is the cache of the answer in flight, of exactly the size that it needs.

    Args:
        prompts: The forwards of prompts.
    """

    count = 1

    def __init__(self, prompts: Prompts) -> None:
        """The row is free."""
        self._prompts = prompts
        self.read = prompts.read
        self.drop(0)

    def copy(self, cache: PolicyCache) -> PolicyCache:
        """A copy of a cache that `read` has made."""
        return cache.fork()

    def put(self, row: int, cache: PolicyCache) -> None:
        """Let the row go on from a cache."""
        self._cache = cache
        self._call = step_call(self._prompts.model, cache)
        self._prompts.metrics.hold(cache)

    def drop(self, row: int) -> None:
        """Free the row."""
        self._cache: PolicyCache | None = None
        self._call: Callable[..., Any] = self._prompts.model
        self._prompts.handle.cache = None

    def step(self, tokens: list[int]) -> Tensor:
        """Run a token: logits [1, V] of the next one."""
        return self._prompts.step(self._call, self._cache, tokens)

    def usage(self, row: int) -> CacheUsage:
        """What the cache holds."""
        return CacheUsage.of(self._cache)

    def must_read_again(self, length: int) -> bool:
        """Whether a text must be read as a whole for its token number `length`, as models with `longrope` do."""
        return bool(changing_kind(self._prompts.model.config, length - 1, length))

    def restart(self) -> None:
        """Free the row, after a step that was broken off."""
        self.drop(0)


class ManyRows:
    """Rows of one cache of fixed size, so that a step of all of them is one forward.

    Args:
        prompts: The forwards of prompts.
        count: The number of rows.
        length: The most tokens of a prompt and its answer.

    Raises:
        KVPolicyError: If the policy or the model does not allow it.
    """

    def __init__(self, prompts: Prompts, count: int, length: int) -> None:
        """All rows are free."""
        kind = changing_kind(prompts.model.config, 1, length)
        if kind:
            raise KVPolicyError(
                f"--length must be that of texts with the same angles for --rows {count}, got {length:,} for a model "
                f"with {kind}, whose long texts have others; try a smaller --length, or --rows 1."
            )
        self.count = count
        self._prompts = prompts
        self._length = length
        self.read = prompts.read
        self.restart()

    def copy(self, cache: PolicyCache) -> PolicyCache:
        """The cache itself, which `put` does not change."""
        return cache

    def put(self, row: int, cache: PolicyCache) -> None:
        """Let a row go on from a cache of one row."""
        self._rows.put(row, cache)
        if self._call is None:
            self._call = step_call(self._prompts.model, self._rows)
        self._prompts.metrics.hold(self._rows)

    def drop(self, row: int) -> None:
        """Free a row."""
        if not self._rows.is_free(row):
            self._rows.drop(row)
        self._prompts.handle.cache = None

    def step(self, tokens: list[int]) -> Tensor:
        """Run a token of each row: logits [rows, V] of the next ones."""
        assert self._call is not None
        return self._prompts.step(self._call, self._rows, tokens)

    def usage(self, row: int) -> CacheUsage:
        """What a row holds, of a cache whose bytes are the same for all rows."""
        return CacheUsage.of_row(self._rows, row)

    def must_read_again(self, length: int) -> bool:
        """No: the length of rows is that of texts with the same angles."""
        return False

    def restart(self) -> None:
        """Begin with a new cache, after a step that was broken off."""
        self._rows: Any = None  # freed first
        self._call: Callable[..., Any] | None = None
        self._rows = self._prompts.handle.rows(self.count, self._length)


def make_forwards(prompts: Prompts, rows: int, length: int | None) -> OneRow | ManyRows:
    """The forwards of a number of rows, of so many tokens each.

    Args:
        prompts: The forwards of prompts.
        rows: The number of rows.
        length: The most tokens of each of several rows.
    """
    return OneRow(prompts) if rows == 1 else ManyRows(prompts, rows, length or 1)


def pause_between_tiles(model: Any, reading: Interruptible) -> Callable[[], None]:
    """Let the forward of a prompt pause before each layer, and before each tile of a prompt that is taken in tiles.

    Args:
        model: The model.
        reading: What runs the prompt.

    Returns:
        How to undo it.
    """

    def pause(*args: Any) -> None:
        if not torch.compiler.is_compiling():
            reading.pause()

    hooks = [site.attention.register_forward_pre_hook(pause) for site in find_sites(model).layers]

    def undo() -> None:
        for hook in hooks:
            hook.remove()

    return undo


def settle(model: Any) -> Callable[[], None]:
    """What waits until the device of a model has done its work."""
    if model.device.type == "cpu":
        return lambda: None
    return torch.accelerator.synchronize
