"""Speculative decoding of a model with itself: a cache under a policy drafts, the full cache verifies."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable
from numbers import Integral, Real
from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor, nn

from kvpolicy.hf.attach import attach
from kvpolicy.hf.attachment import Attachment, attachments
from kvpolicy.hf.cache import PolicyCache
from kvpolicy.hf.cache_names import cache_argument
from kvpolicy.hf.discovery import device_of, vocabulary_of
from kvpolicy.hf.rotary_lookup import changing_kind
from kvpolicy.policy import Policy
from kvpolicy.reporting.logging import warn_of_processors, without_warning_of_few_tokens
from kvpolicy.text.arguments import named_arguments
from kvpolicy.text.errors import KVPolicyError, KVPolicyTypeError
from kvpolicy.text.limits import MAX_SIZE
from kvpolicy.text.tables import shorten
from kvpolicy.text.validation import check_size


class SpeculationStats(NamedTuple):
    """Statistics of the drafts of `speculate`.

    Attributes:
        drafted: Tokens that the policy's cache drafted.
        accepted: How many of these the full cache accepted.
        rounds: Forwards of the full cache behind the prompt's; each adds at least one token.
    """

    drafted: int = 0
    accepted: int = 0
    rounds: int = 0

    @property
    def acceptance(self) -> float:
        """Accepted drafts of all drafts; 0 without any."""
        return self.accepted / self.drafted if self.drafted else 0.0

    def after(self, drafted: int, accepted: int) -> SpeculationStats:
        """The same after one more round."""
        return SpeculationStats(self.drafted + drafted, self.accepted + accepted, self.rounds + 1)


@overload
def speculate(
    model: nn.Module,
    policy: Policy | str,
    input_ids: Tensor,
    *,
    max_new_tokens: int,
    gamma: int = 4,
    eos_token_id: int | Iterable[int] | None = None,
    temperature: float = 0.0,
    seed: int = 0,
    return_stats: Literal[False] = False,
) -> Tensor: ...


@overload
def speculate(
    model: nn.Module,
    policy: Policy | str,
    input_ids: Tensor,
    *,
    max_new_tokens: int,
    gamma: int = 4,
    eos_token_id: int | Iterable[int] | None = None,
    temperature: float = 0.0,
    seed: int = 0,
    return_stats: Literal[True],
) -> tuple[Tensor, SpeculationStats]: ...


@named_arguments
def speculate(
    model: nn.Module,
    policy: Policy | str,
    input_ids: Tensor,
    *,
    max_new_tokens: int,
    gamma: int = 4,
    eos_token_id: int | Iterable[int] | None = None,
    temperature: float = 0.0,
    seed: int = 0,
    return_stats: bool = False,
) -> Tensor | tuple[Tensor, SpeculationStats]:
    """Generate what the full cache generates, with drafts from a cache under a policy.

    The model drafts `gamma` tokens one by one, on a cache that is small and therefore fast to read; then it verifies
    them all in one forward on the full cache. Rejected tokens are rolled back. Nothing is lost but memory: both caches
    are held. Tokens are taken from the logits as they are: what a generation config adds to them, such as a repetition
    penalty or `top_p`, is not applied, and warned of.

    Args:
        model: A model of transformers, with or without a policy attached.
        policy: The policy of the cache that drafts, or its spec.
        input_ids: The prompt, [1, P] int64 or int32.
        max_new_tokens: Tokens to generate, unless `eos_token_id` ends the text before.
        gamma: Tokens to draft before each verification.
        eos_token_id: The token or tokens that end the text; None for none.
        temperature: 0 for greedy decoding; else both caches sample at this temperature, and drafts are accepted by the
            rejection rule, so that the text has the distribution of the full cache.
        seed: Seed of the random numbers, if the temperature is above 0; from -2^63 to 2^64 - 1.
        return_stats: Whether to return the counts of drafted and accepted tokens too.

    Returns:
        The prompt and the new tokens, [1, P + new], on the prompt's device; with `return_stats`, also a
        `SpeculationStats`.

    Raises:
        KVPolicyError: If there is more than one row, a number is out of range, a token is not in the vocabulary, or the
            policy does not suit the model.
        KVPolicyTypeError: If an argument is of another type.

    Examples:
        >>> import kvpolicy
        >>> model, tokenizer = kvpolicy.tiny()
        >>> ids = torch.arange(5, 37)[None]
        >>> out, stats = kvpolicy.speculate(model, "snapkv@0.5", ids, max_new_tokens=6, return_stats=True)
        >>> torch.equal(out, model.generate(ids, max_new_tokens=6, do_sample=False, eos_token_id=None))
        True
        >>> stats.drafted >= stats.accepted
        True

    Source:
        Leviathan et al. (arXiv:2211.17192), Algorithm 1, with the drafts of TriForce's retrieval level
        (arXiv:2404.11912): the same weights on a smaller cache. Differences: any policy takes the place of TriForce's
        chunks, there is no second, smaller model below it, and the policy chooses anew with each token instead of once
        per round. The verification of several tokens and single steps differ by rounding, so greedy tokens can differ
        from those of `generate` where two logits are equal but for the last bits.
    """
    policy = Policy.of(policy)
    size = vocabulary_of(model)
    _check_ids(input_ids, size)
    max_new_tokens = check_size("max_new_tokens", max_new_tokens, 1)
    gamma = check_size("gamma", gamma, 1)
    _check_angles(model, input_ids.shape[1], max_new_tokens)
    _check_sampling(temperature, seed)
    ends = _ends(eos_token_id, size)
    warn_of_processors(model, samples=temperature > 0)
    with contextlib.ExitStack() as stack:
        # The drafts' policy is attached, and not `full`: the attached policy must have all hooks that any cache needs.
        if model not in attachments:
            stack.enter_context(attach(model, policy))
        _check_states(attachments[model])
        stack.enter_context(torch.no_grad())
        stack.enter_context(without_warning_of_few_tokens())  # the full cache verifies what they draft
        run = _Run(model, policy, input_ids, max_new_tokens, float(temperature), int(seed))
        tokens, stats = run.tokens(max_new_tokens, gamma, ends)
    new = torch.tensor([tokens], dtype=input_ids.dtype, device=input_ids.device)
    out = torch.cat([input_ids, new], 1)
    return (out, stats) if return_stats else out


class _Run:
    """One text: a cache that drafts, and one that verifies."""

    def __init__(
        self, model: nn.Module, policy: Policy, input_ids: Tensor, new: int, temperature: float, seed: int
    ) -> None:
        """Run the prompt through both caches."""
        self._model = model
        self._temperature = temperature
        embeddings: Any = model.get_input_embeddings()  # pyright: ignore[reportCallIssue]
        self._device = device_of(embeddings)
        self._dice = torch.Generator().manual_seed(seed)
        prompt = input_ids.to(self._device)
        self._full = PolicyCache(model, "full", prompt=prompt.shape[1], new=new)
        self._draft = PolicyCache(model, policy, prompt=prompt.shape[1], new=new)
        self._full.activate_past_recording()  # of sliding layers, for crops
        self._newest = self._pick(self._forward(self._full, prompt, last_only=True)[-1])
        self._forward(self._draft, prompt, last_only=True)
        self._unseen: int | None = None  # an accepted token that the cache that drafts has not seen

    def tokens(self, new: int, gamma: int, ends: frozenset[int]) -> tuple[list[int], SpeculationStats]:
        """At most `new` tokens, until one of `ends`."""
        tokens = [self._newest]
        stats = SpeculationStats()
        while len(tokens) < new and tokens[-1] not in ends:
            # A round adds one token more than it accepts. The last one may be a plain step, without drafts.
            drafts, weights = self._draft_tokens(min(gamma, new - len(tokens) - 1))
            accepted, following = self._verify(tokens[-1], drafts, weights)
            stats = stats.after(len(drafts), accepted)
            for token in (*drafts[:accepted], following):
                tokens.append(token)
                if token in ends:
                    break
            self._newest = following
        return tokens, stats

    def _draft_tokens(self, count: int) -> tuple[list[int], list[Tensor]]:
        """Draft `count` tokens behind the newest one, and the weights that each was drawn with."""
        drafts: list[int] = []
        weights: list[Tensor] = []
        token = self._newest
        if not count:
            return drafts, weights
        # Before the mark: this token was accepted, so no rollback may remove it.
        if self._unseen is not None:
            self._forward(self._draft, self._as_ids([self._unseen]))
            self._unseen = None
        self._draft.mark(most=count)
        for _ in range(count):
            logits = self._forward(self._draft, self._as_ids([token]))[-1]
            weights.append(self._weights(logits))
            token = self._pick(logits)
            drafts.append(token)
        return drafts, weights

    def _verify(self, newest: int, drafts: list[int], weights: list[Tensor]) -> tuple[int, int]:
        """How many drafts are accepted, and the token that follows them; both caches then hold all but that one."""
        logits = self._forward(self._full, self._as_ids([newest, *drafts]))
        accepted = 0
        following = None
        for draft, drawn, row in zip(drafts, weights, logits[:-1], strict=True):
            following = self._replacement(draft, drawn, row)
            if following is not None:
                break
            accepted += 1
        if following is None:
            following = self._pick(logits[accepted])
        rejected = len(drafts) - accepted
        if drafts:
            # The newest token was fed before the drafts, and the last draft was not.
            self._draft.rollback(min(accepted + 1, len(drafts)))
        self._unseen = drafts[-1] if drafts and not rejected else None
        # Also if no draft was rejected, so that sliding windows drop the past that they recorded.
        self._full.crop(-rejected)
        return accepted, following

    def _replacement(self, draft: int, drawn: Tensor, logits: Tensor) -> int | None:
        """The token that takes the place of a draft; None if the draft is accepted."""
        if not self._temperature:
            best = self._pick(logits)
            return None if best == draft else best
        wanted = self._weights(logits)
        # With weights of 0 on both sides the draft would not have been drawn.
        if float(torch.rand((), generator=self._dice, dtype=torch.float32, device="cpu")) * float(drawn[draft]) < float(
            wanted[draft]
        ):
            return None
        return self._draw((wanted - drawn).clamp_min(0))

    def _pick(self, logits: Tensor) -> int:
        """The next token by logits [V]."""
        return self._draw(self._weights(logits)) if self._temperature else int(logits.argmax())

    def _weights(self, logits: Tensor) -> Tensor:
        """The distribution of the next token, [V] fp64 on the host; empty in greedy decoding."""
        if not self._temperature:
            return logits.new_empty(0)
        # Below the largest logit, since a tiny temperature would make infinite ones of those above 0.
        behind = logits.double() - logits.max()
        return (behind / self._temperature).softmax(-1).cpu()

    def _draw(self, weights: Tensor) -> int:
        # A draft is rejected only where the full cache wants it less, so that it wants another one more.
        return int(torch.multinomial(weights, 1, generator=self._dice))

    def _forward(self, cache: PolicyCache, ids: Tensor, *, last_only: bool = False) -> Tensor:
        """Feed tokens [1, P] to a cache; the logits behind each, [P, V], or at least those behind the last."""
        model: Any = self._model
        keeps = getattr(model, "_supports_logits_to_keep", None)
        given = {"logits_to_keep": 1} if last_only and keeps is not None and keeps() else {}
        return model(ids, **cache_argument(model, cache), use_cache=True, **given).logits[0]

    def _as_ids(self, tokens: list[int]) -> Tensor:
        return torch.tensor([tokens], device=self._device)


def _check_ids(input_ids: Any, size: int) -> None:
    got = input_ids.dtype if isinstance(input_ids, Tensor) else type(input_ids).__name__
    # Smaller integers could not hold the tokens that follow.
    if got not in (torch.int64, torch.int32):
        raise KVPolicyTypeError(
            f"input_ids must be a tensor of token ids [1, P] in int64 or int32, got {got}; try "
            "tokenizer(text, return_tensors='pt').input_ids."
        )
    if input_ids.dim() != 2 or input_ids.shape[0] != 1 or not input_ids.shape[1]:
        raise KVPolicyError(
            "input_ids must be one row of at least one token, since rows accept different numbers of drafts, got the "
            f"shape {list(input_ids.shape)}; try one call for each row, without padding."
        )
    outside = input_ids[(input_ids < 0) | (input_ids >= size)]
    if len(outside):
        raise KVPolicyError(
            f"input_ids must be between 0 and {size - 1}, the last token of the model, got {int(outside[0])}; try the "
            "model's own tokenizer."
        )


def _check_angles(model: Any, prompt: int, new: int) -> None:
    """Refuse a text in which the angles of a rotary embedding change: tokens that are verified together have one."""
    config = getattr(model, "config", None)
    # The last token is generated, and never fed.
    kind = "" if config is None else changing_kind(config, prompt, prompt + new - 1)
    if kind:
        raise KVPolicyError(
            "The angles of the rotary embedding must not change while drafts are verified, got one of type "
            f"{kind} with {prompt} tokens and {new} new ones; try fewer new tokens, or generate without drafts."
        )


def _check_states(attachment: Attachment) -> None:
    """Refuse a model with states: the full cache takes back tokens that were rejected, which a state cannot."""
    states = attachment.model_shape.states
    if states:
        raise KVPolicyError(
            f"Every layer must have attention alone for drafts to be verified, got a state in layer {min(states)}, "
            "which cannot take back a rejected token; try generate without drafts."
        )


def _check_sampling(temperature: Any, seed: Any) -> None:
    number: Any = None if isinstance(temperature, bool) or not isinstance(temperature, Real) else temperature
    if number is not None and not isinstance(number, int):
        number = float(number)  # NumPy compares in the precision of its number, in which the largest may be infinite
    if number is None or not 0 <= number <= sys.float_info.max:
        raise KVPolicyError(
            f"temperature must be a number from 0, and finite, got {shorten(repr(temperature))}; try temperature=0.7."
        )
    if isinstance(seed, bool) or not isinstance(seed, Integral):
        raise KVPolicyTypeError(f"seed must be an integer, got {shorten(repr(seed))}; try seed=0.")
    if not -(2**63) <= int(seed) < 2**64:
        raise KVPolicyError(f"seed must be between -2^63 and 2^64 - 1, got {shorten(hex(int(seed)))}; try seed=0.")


def _ends(eos_token_id: Any, size: int) -> frozenset[int]:
    """The tokens that end a text, of `size` tokens of the model."""
    if eos_token_id is None:
        return frozenset()
    if isinstance(eos_token_id, Tensor):
        eos_token_id = eos_token_id.tolist()
    several = isinstance(eos_token_id, Iterable) and not isinstance(eos_token_id, str | bytes)
    tokens: list[Any] = [*eos_token_id] if several else [eos_token_id]  # pyright: ignore[reportUnknownVariableType]
    if not tokens:
        raise KVPolicyError("eos_token_id must be at least one token, or None for none, got an empty list; try None.")
    for token in tokens:
        if isinstance(token, bool) or not isinstance(token, Integral):
            raise KVPolicyTypeError(
                f"eos_token_id must be a token id or a list of them, got {shorten(repr(token))}; try "
                "tokenizer.eos_token_id."
            )
        if not 0 <= int(token) < size:
            raise KVPolicyError(
                f"eos_token_id must be between 0 and {size - 1}, the last token of the model, got "
                f"{shorten(hex(int(token)) if abs(int(token)) > MAX_SIZE else str(token))}; try tokenizer.eos_token_id."
            )
    return frozenset(map(int, tokens))
