"""Generation of a text under a policy, with its time and memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from kvpolicy.reporting.detokenizer import Detokenizer, text_behind


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationOptions:
    """Options of the generation.

    Attributes:
        new: The maximum number of new tokens.
        temperature: The sampling temperature; 0 for greedy decoding.
        seed: The random seed.
        tile: The most tokens of the prompt that a layer takes at a time, `auto`, or None.
        hold: How a prompt is held that waits, as `hold` of `attach`.
    """

    new: int
    temperature: float = 0.0
    seed: int = 0
    tile: int | Literal["auto"] | None = None
    hold: Literal["plain", "codes"] = "plain"

    def arguments(self, tokenizer: Any) -> dict[str, Any]:
        """Return the keyword arguments of `model.generate`."""
        arguments: dict[str, Any] = {"max_new_tokens": self.new, "num_beams": 1}
        pad_token = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        if pad_token is not None:
            arguments["pad_token_id"] = pad_token
        if self.temperature > 0:
            return arguments | {"do_sample": True, "temperature": self.temperature}
        # None overrides the sampling parameters of the checkpoint's generation config, which would cause a warning.
        return arguments | {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """A generated text, with its time and memory.

    Attributes:
        policy: The spec of the policy.
        text: The generated text.
        tokens: Its token ids.
        prompt: Tokens of the prompt.
        kept: Tokens held at the end, as a mean over layers and KV heads.
        seen: Tokens that the cache has seen. The last generated token is not among them.
        nbytes: Bytes held at the end.
        full_nbytes: Bytes of the full cache for the same tokens.
        prefill: Seconds until the first token.
        decode: Seconds from the first token to the last.
        interrupted: Whether Ctrl-C ended the generation.
        note: Notes of the cache's plan.
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
        """Prompt tokens per second."""
        return self.prompt / self.prefill if self.prefill else None

    @property
    def decode_rate(self) -> float | None:
        """Tokens per second after the first token; None if there is only one."""
        return (len(self.tokens) - 1) / self.decode if self.decode and len(self.tokens) > 1 else None

    def as_dict(self) -> dict[str, Any]:
        """Return numbers and strings that can be serialized as JSON."""
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
class TimedStreamer:
    """A streamer for `model.generate` that records each token and its time, and passes it on to another streamer.

    Attributes:
        inner: The streamer that prints the text, or None.
        started: The time at which the generation began.
        times: The time of each token.
        tokens: The tokens.
    """

    inner: Any = None
    started: float = field(default_factory=time.perf_counter)
    times: list[float] = field(default_factory=list[float])
    tokens: list[int] = field(default_factory=list[int])
    _is_prompt: bool = True

    def put(self, value: Any) -> None:
        """Take the prompt in the first call, and one token in each later call."""
        if self._is_prompt:
            self._is_prompt = False
        else:
            self.tokens += value.flatten().tolist()
            self.times.append(time.perf_counter())
        if self.inner is not None:
            self.inner.put(value)

    def end(self) -> None:
        """Flush the inner streamer, once."""
        if self.inner is not None:
            inner = self.inner
            self.inner = None  # `generate` calls it too, unless it was interrupted
            inner.end()


@dataclass(slots=True)
class TextPrinter:
    """A streamer for `model.generate` that prints the text of the generated tokens.

    Attributes:
        tokenizer: The tokenizer.
    """

    tokenizer: Any
    _text: Detokenizer | None = None

    def put(self, value: Any) -> None:
        """Take the prompt in the first call, and print the token of each later call."""
        tokens: list[int] = value.flatten().tolist()
        if self._text is None:
            self._text = Detokenizer(self.tokenizer, tokens)
            return
        for token in tokens:
            print(self._text.add(token), end="", flush=True)

    def end(self) -> None:
        """Print the rest of the text, and a newline."""
        print("" if self._text is None else self._text.flush(), flush=True)


def generate_text(
    model: Any,
    tokenizer: Any,
    ids: Any,
    policy: str,
    options: GenerationOptions,
    streamer: Callable[[], Any] | None = None,
) -> Generation:
    """Generate a text under a policy. Ctrl-C ends the generation with the tokens so far.

    Args:
        model: A model without a policy.
        tokenizer: Its tokenizer.
        ids: The prompt, [1, P].
        policy: The spec of the policy.
        options: Options of the generation.
        streamer: Creates the streamer that prints the text.
    """
    import torch

    from kvpolicy.hf.attach import attach

    ids = ids.to(model.device)
    interrupted = False
    torch.manual_seed(options.seed)
    with torch.inference_mode(), attach(model, policy, tile=options.tile, hold=options.hold) as handle:
        timed = TimedStreamer(streamer() if streamer else None)
        try:
            arguments = options.arguments(tokenizer)
            model.generate(ids, attention_mask=torch.ones_like(ids), streamer=timed, **arguments)
        except KeyboardInterrupt:
            interrupted = True
        finally:
            timed.end()
        return _result(handle, tokenizer, ids[0].tolist(), timed, interrupted)


def warm_up(model: Any, tokenizer: Any, ids: Any, policy: str) -> None:
    """Generate a few tokens, so that the time of PyTorch's initialization is not measured."""
    from kvpolicy.reporting.logging import without_warning_of_few_tokens

    try:
        with without_warning_of_few_tokens():
            result = generate_text(model, tokenizer, ids[:, :16], policy, GenerationOptions(new=2))
    except ValueError:  # a short prompt may leave too small a budget, which says nothing about the whole prompt
        return
    if result.interrupted:
        raise KeyboardInterrupt


def _result(handle: Any, tokenizer: Any, prompt: list[int], timed: TimedStreamer, interrupted: bool) -> Generation:
    from kvpolicy.reporting.report import mean_kept

    cache = handle.cache
    times = timed.times
    layers: list[Any] = [layer for layer in (cache.policy_layers if cache else []) if layer.is_initialized]
    return Generation(
        policy=str(handle.policy),
        text=text_behind(tokenizer, prompt, timed.tokens),
        tokens=tuple(timed.tokens),
        prompt=len(prompt),
        kept=mean_kept(cache) if cache else 0.0,
        seen=int(layers[0].length[0]) if layers else 0,
        nbytes=cache.nbytes if layers else 0,
        full_nbytes=cache.full_nbytes if layers else 0,
        prefill=times[0] - timed.started if times else None,
        decode=times[-1] - times[0] if times else None,
        interrupted=interrupted,
        note=cache.plan.note if layers and cache.plan else "",
    )
