"""Generate a text under a policy, and count what it took."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """How to generate.

    Attributes:
        new: Tokens at most.
        temperature: 0 takes the most probable token.
        seed: Of the draws.
    """

    new: int
    temperature: float = 0.0
    seed: int = 0

    def words(self, tokenizer: Any) -> dict[str, Any]:
        """As `generate` takes them."""
        end = tokenizer.eos_token_id
        padding = end if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        words = {"max_new_tokens": self.new, "num_beams": 1} | ({} if padding is None else {"pad_token_id": padding})
        if self.temperature > 0:
            return words | {"do_sample": True, "temperature": self.temperature}
        return words | {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}


@dataclass(frozen=True, kw_only=True, slots=True)
class Written:
    """A text and what it took.

    Attributes:
        policy: The policy's words.
        text: What was generated.
        tokens: Its token ids.
        prompt: Tokens of the prompt.
        kept: Tokens held at the end, the mean of all layers and KV heads.
        seen: Tokens that the cache has seen; the last one generated is not among them.
        nbytes: Bytes held at the end.
        full_nbytes: Bytes of the full cache of the same tokens.
        prefill: Seconds until the first token.
        decode: Seconds from the first token to the last.
        interrupted: Whether the user stopped it.
        note: What the cache's plan remarks.
    """

    policy: str
    text: str
    tokens: tuple[int, ...]
    prompt: int
    kept: float
    seen: int
    nbytes: int
    full_nbytes: int
    prefill: float | None
    decode: float | None
    interrupted: bool = False
    note: str = ""

    @property
    def prefill_rate(self) -> float | None:
        """Tokens of the prompt per second."""
        return self.prompt / self.prefill if self.prefill else None

    @property
    def decode_rate(self) -> float | None:
        """Tokens per second after the first; None of a text of one token."""
        return (len(self.tokens) - 1) / self.decode if self.decode and len(self.tokens) > 1 else None

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers and strings, ready for JSON."""
        return {
            "policy": self.policy,
            "text": self.text,
            "tokens": list(self.tokens),
            "kept": self.kept,
            "seen": self.seen,
            "nbytes": self.nbytes,
            "full_nbytes": self.full_nbytes,
            "prefill_seconds": self.prefill,
            "decode_seconds": self.decode,
            "prefill_tokens_per_second": self.prefill_rate,
            "decode_tokens_per_second": self.decode_rate,
            "interrupted": self.interrupted,
            "note": self.note,
        }


@dataclass(slots=True)
class Clock:
    """A streamer of `generate` that notes each token and its time, and hands it on.

    Attributes:
        inner: The streamer that prints, or None.
        started: When generation began.
        times: Of each token.
        tokens: What came.
    """

    inner: Any = None
    started: float = field(default_factory=time.perf_counter)
    times: list[float] = field(default_factory=list[float])
    tokens: list[int] = field(default_factory=list[int])
    _prompt: bool = True

    def put(self, value: Any) -> None:
        """Take the prompt first, then a token each time."""
        if self._prompt:
            self._prompt = False
        else:
            self.tokens += value.flatten().tolist()
            self.times.append(time.perf_counter())
        if self.inner is not None:
            self.inner.put(value)

    def end(self) -> None:
        """Print what is still held back."""
        inner, self.inner = self.inner, None
        if inner is not None:
            inner.end()


def write(
    model: Any, tokenizer: Any, ids: Any, policy: str, options: Options, streamer: Callable[[], Any] | None = None
) -> Written:
    """Generate under a policy; Ctrl-C ends it with what came.

    Args:
        model: That no policy is attached to.
        tokenizer: Its tokenizer.
        ids: The prompt, [1, P].
        policy: The policy's words.
        options: How.
        streamer: Makes the streamer that prints.
    """
    import torch

    from kvpolicy.hf.attach import attach

    ids, interrupted = ids.to(model.device), False
    torch.manual_seed(options.seed)
    with torch.inference_mode(), attach(model, policy) as handle:
        clock = Clock(streamer() if streamer else None)
        try:
            words = options.words(tokenizer)
            model.generate(ids, attention_mask=torch.ones_like(ids), streamer=clock, **words)
        except KeyboardInterrupt:
            interrupted = True
        finally:
            clock.end()
        return _written(handle, tokenizer, ids.shape[1], clock, interrupted)


def warm_up(model: Any, tokenizer: Any, ids: Any, policy: str) -> None:
    """Generate a little, so that a policy's speed is not that of what PyTorch loads and sets up in a first step."""
    try:
        run = write(model, tokenizer, ids[:, :16], policy, Options(new=2))
    except ValueError:  # a few tokens may be too short for the policy
        return
    if run.interrupted:
        raise KeyboardInterrupt


def _written(handle: Any, tokenizer: Any, prompt: int, clock: Clock, interrupted: bool) -> Written:
    cache, times = handle.cache, clock.times
    layers: list[Any] = [layer for layer in (cache.policy_layers if cache else []) if layer.is_initialized]
    kept = [float((layer.positions[0] >= 0).sum(-1).float().mean()) for layer in layers]
    return Written(
        policy=str(handle.policy),
        text=tokenizer.decode(clock.tokens, skip_special_tokens=True),
        tokens=tuple(clock.tokens),
        prompt=prompt,
        kept=sum(kept) / len(kept) if kept else 0.0,
        seen=int(layers[0].length[0]) if layers else 0,
        nbytes=cache.nbytes if layers else 0,
        full_nbytes=cache.full_nbytes if layers else 0,
        prefill=times[0] - clock.started if times else None,
        decode=times[-1] - times[0] if times else None,
        interrupted=interrupted,
        note=cache.plan.note if layers and cache.plan else "",
    )
