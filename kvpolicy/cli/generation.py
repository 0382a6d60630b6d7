"""Generation of a text under one policy, with drafts, or under several next to each other, with time and memory."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from kvpolicy.cli.formatting import counted, size, terms, width
from kvpolicy.reporting.detokenizer import Detokenizer, text_behind
from kvpolicy.text.limits import LEAST_TEMPERATURE

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationOptions:
    """Options of the generation.

    Attributes:
        new: The maximum number of new tokens.
        temperature: The sampling temperature; below `LEAST_TEMPERATURE` for greedy decoding.
        seed: The random seed.
        tile: The most tokens of the prompt that a layer takes at a time, `auto`, or None.
        hold: How a prompt is held that waits, as `hold` of `attach`.
        compile: Whether steps are compiled, as `compile` of `attach`.
    """

    new: int
    temperature: float = 0.0
    seed: int = 0
    tile: int | Literal["auto"] | None = None
    hold: Literal["plain", "codes"] = "plain"
    compile: bool | None = None

    @property
    def is_greedy(self) -> bool:
        """Whether every token is the most probable one."""
        return self.temperature < LEAST_TEMPERATURE

    def arguments(self, tokenizer: Any) -> dict[str, Any]:
        """Return the keyword arguments of `model.generate`."""
        # The tokenizer is for the stop strings of a checkpoint's generation config.
        arguments: dict[str, Any] = {"max_new_tokens": self.new, "num_beams": 1, "num_return_sequences": 1}
        arguments["tokenizer"] = tokenizer
        pad_token = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        if pad_token is not None:
            arguments["pad_token_id"] = pad_token
        if not self.is_greedy:
            return arguments | {"do_sample": True, "temperature": self.temperature}
        # None overrides the sampling parameters of the checkpoint's generation config, which would cause a warning.
        return arguments | {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}


@dataclass(frozen=True, kw_only=True, slots=True)
class GeneratedText:
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
        decode: Seconds from the first token to the last, without those of `first_step`.
        first_step: Seconds of the first step where steps were to be compiled, for which the answer waits; else None.
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
    first_step: float | None = None
    interrupted: bool = False
    note: str = ""

    @property
    def prefill_rate(self) -> float | None:
        """Prompt tokens per second."""
        return self.prompt / self.prefill if self.prefill else None

    @property
    def decode_rate(self) -> float | None:
        """Tokens per second after the first token, and a step that was compiled; None if there are no more."""
        steps = len(self.tokens) - (1 if self.first_step is None else 2)
        return steps / self.decode if self.decode and steps > 0 else None

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
            "first_step_seconds": self.first_step,
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
) -> GeneratedText:
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
    with (
        torch.inference_mode(),
        attach(model, policy, tile=options.tile, hold=options.hold, compile=options.compile) as handle,
    ):
        timed = TimedStreamer(streamer() if streamer else None)
        try:
            arguments = options.arguments(tokenizer)
            model.generate(ids, attention_mask=torch.ones_like(ids), streamer=timed, **arguments)
        except KeyboardInterrupt:
            interrupted = True
        finally:
            timed.end()
        return _result(handle, tokenizer, ids[0].tolist(), timed, interrupted, compiled=bool(options.compile))


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


def _result(
    handle: Any, tokenizer: Any, prompt: list[int], timed: TimedStreamer, interrupted: bool, *, compiled: bool = False
) -> GeneratedText:
    from kvpolicy.reporting.report import mean_kept

    cache = handle.cache
    times = timed.times
    first_step = times[1] - times[0] if compiled and len(times) > 1 else None
    layers: list[Any] = [layer for layer in (cache.policy_layers if cache else []) if layer.is_initialized]
    return GeneratedText(
        policy=str(handle.policy),
        text=text_behind(tokenizer, prompt, timed.tokens),
        tokens=tuple(timed.tokens),
        prompt=len(prompt),
        kept=mean_kept(cache) if cache else 0.0,
        seen=int(layers[0].length[0]) if layers else 0,
        nbytes=cache.nbytes if layers else 0,
        full_nbytes=cache.full_nbytes if layers else 0,
        prefill=times[0] - timed.started if times else None,
        decode=times[-1] - times[0] - (first_step or 0.0) if times else None,
        first_step=first_step,
        interrupted=interrupted,
        note=cache.plan.note if layers and cache.plan else "",
    )


MIN_COLUMN = 48
"""The width below which texts are shown one below the other instead of side by side."""

EXCERPT = 24
"""The number of characters that are shown where two texts differ."""


def first_difference(first: GeneratedText, other: GeneratedText) -> int | None:
    """Return the number of tokens in the common prefix of two texts; None if the texts are identical."""
    if first.tokens == other.tokens:
        return None
    return _common_prefix(first.tokens, other.tokens)


def facts(run: GeneratedText, first: GeneratedText | None = None) -> list[tuple[str, str]]:
    """Return the time and memory of a run as terms and values, and where its text differs from the first one."""
    pairs: list[tuple[str, str]] = []
    if run.interrupted:
        pairs.append(("stopped", f"by Ctrl-C after {counted(len(run.tokens), 'token')}"))
    pairs += [
        ("kept", f"{run.kept:,.0f} of {run.seen:,} tokens (mean over layers and KV heads)"),
        ("bytes", held(run.nbytes, run.full_nbytes)),
        ("prefill", _speed(run.prompt, run.prefill_rate)),
        ("decode", _speed(len(run.tokens), run.decode_rate)),
    ]
    if run.first_step is not None:
        pairs.append(("first step", f"{run.first_step:.2f} s, with the compilation"))
    if run.note:
        pairs.append(("note", run.note))
    if first is not None:
        pairs.append(("text", _describe_difference(first, run)))
    return pairs


def summary(run: GeneratedText) -> str:
    """Format the facts of one run."""
    return terms([("policy", run.policy), *facts(run)])


def held(nbytes: int, full_nbytes: int) -> str:
    """Format the bytes of a cache in relation to the full cache.

    >>> held(2**19, 5 * 2**19), held(0, 0)
    ('512 KiB, 0.20 of the full cache (2.5 MiB)', '0 B')
    """
    if not full_nbytes:
        return size(nbytes)
    return f"{size(nbytes)}, {nbytes / full_nbytes:.2f} of the full cache ({size(full_nbytes)})"


def _speed(tokens: int, rate: float | None) -> str:
    return counted(tokens, "token") + ("" if rate is None else f", {rate:,.0f} tokens/s")


def _common_prefix(first: Sequence[object], other: Sequence[object]) -> int:
    """Return the length of the common prefix of two texts, by characters or by tokens.

    >>> _common_prefix("tiger", "tin"), _common_prefix("a", "a")
    (2, 1)
    """
    pairs = enumerate(zip(first, other, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(first), len(other)))


def _describe_difference(first: GeneratedText, run: GeneratedText) -> str:
    prefix = first_difference(first, run)
    if prefix is None:
        return "identical to the first"
    start = _common_prefix(first.text, run.text)
    ours = run.text[start : start + EXCERPT]
    theirs = first.text[start : start + EXCERPT]
    longest = max(len(first.tokens), len(run.tokens))
    return f"differs from the first after {prefix:,} of {longest:,} tokens: {ours!r} instead of {theirs!r}"


def show(runs: list[GeneratedText]) -> None:
    """Print all texts and their facts. The part that differs from the first text is bold if the terminal allows it."""
    from rich.console import Console

    console = Console(file=sys.stdout, width=width(), highlight=False, markup=False, emoji=False)
    with console.capture() as captured:
        if width() < MIN_COLUMN * len(runs):
            for number, run in enumerate(runs):
                console.print(*([""] if number else []), *_blocks(run, runs[0]), sep="\n")
        else:
            console.print(_side_by_side(runs))
    print("\n".join(line.rstrip() for line in captured.get().rstrip().splitlines()))


def _side_by_side(runs: list[GeneratedText]) -> Table:
    from rich.table import Table

    table = Table.grid(padding=(0, 2, 0, 0), expand=True)
    for _ in runs:
        table.add_column(ratio=1, overflow="fold")
    for row in zip(*(_blocks(run, runs[0]) for run in runs), strict=True):
        table.add_row(*row)
    return table


def _blocks(run: GeneratedText, first: GeneratedText) -> list[RenderableType]:
    """Return the policy, its text and its facts."""
    from rich.table import Table
    from rich.text import Text

    start = _common_prefix(first.text, run.text)
    text = Text(run.text.rstrip("\n") or "(empty)")
    if run is not first and start < len(run.text):
        text.stylize("bold", start)
    details = Table.grid(padding=(0, 2, 0, 0))
    details.add_column(no_wrap=True)
    details.add_column(overflow="fold")
    for term, value in facts(run, None if run is first else first):
        details.add_row(Text(term), Text(value))
    return [Text(run.policy, style="bold underline"), text, Text(""), details]


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeculatedText:
    """A text that was drafted under a policy and verified by the full cache.

    Attributes:
        policy: The spec of the policy that drafted.
        text: The generated text.
        tokens: Its token ids.
        gamma: Tokens that were drafted before each verification.
        drafted: Tokens that were drafted.
        accepted: How many of these the full cache accepted.
        rounds: Forwards of the full cache behind the prompt's.
        seconds: From the beginning to the last token.
    """

    policy: str
    text: str
    tokens: tuple[int, ...]
    gamma: int
    drafted: int
    accepted: int
    rounds: int
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        """Return numbers and strings that can be serialized as JSON."""
        return asdict(self) | {"tokens": list(self.tokens)}


def speculate_text(
    model: Any, tokenizer: Any, ids: Any, policy: str, gamma: int, options: GenerationOptions
) -> SpeculatedText:
    """Generate a text behind the prompt [1, P], with `gamma` drafts under a policy before each verification."""
    from kvpolicy.hf.speculation import speculate

    end = model.generation_config.eos_token_id
    started = time.perf_counter()
    out, stats = speculate(
        model,
        policy,
        ids,
        max_new_tokens=options.new,
        gamma=gamma,
        eos_token_id=_known(tokenizer.eos_token_id if end is None else end, model),
        temperature=0.0 if options.is_greedy else options.temperature,
        seed=options.seed,
        return_stats=True,
    )
    tokens = tuple(out[0, ids.shape[1] :].tolist())
    return SpeculatedText(
        policy=policy,
        text=text_behind(tokenizer, ids[0].tolist(), tokens),
        tokens=tokens,
        gamma=gamma,
        drafted=stats.drafted,
        accepted=stats.accepted,
        rounds=stats.rounds,
        seconds=time.perf_counter() - started,
    )


def _known(ends: int | list[int] | None, model: Any) -> list[int] | None:
    """The tokens of a generation config that a model knows; some have -1 for none."""
    tokens = [ends] if isinstance(ends, int) else ends or []
    size = model.get_input_embeddings().num_embeddings
    return [token for token in tokens if 0 <= token < size] or None


def speculation_summary(run: SpeculatedText) -> str:
    """Format the counts of a run."""
    return terms(
        [
            ("drafts", f"{run.accepted} of {counted(run.drafted, 'token')} accepted, by {run.policy}"),
            ("rounds", f"{run.rounds}, each with one forward of the full cache"),
            ("tokens", f"{len(run.tokens)} in {run.seconds:.2f} s, prompt included"),
        ]
    )
