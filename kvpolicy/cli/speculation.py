"""Generation of a text with drafts from a cache under a policy."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from kvpolicy.cli.formatting import counted, terms
from kvpolicy.reporting.detokenizer import text_behind

if TYPE_CHECKING:
    from kvpolicy.cli.generation import GenerationOptions


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
    """Generate a text with drafts.

    Args:
        model: A model without a policy.
        tokenizer: Its tokenizer.
        ids: The prompt, [1, P].
        policy: The spec of the policy that drafts.
        gamma: Tokens to draft before each verification.
        options: Options of the generation.
    """
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
        temperature=options.temperature,
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
