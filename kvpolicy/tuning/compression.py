"""One layer's prompt, compressed under each of several policies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvpolicy.engine.layer_store import LayerStore
from kvpolicy.engine.prefill import PendingPrompt
from kvpolicy.engine.prompt_statistics import see_prompt
from kvpolicy.engine.row_limits import RowBudget
from kvpolicy.hf.layer import make_store
from kvpolicy.hf.projection import output_projection
from kvpolicy.planning.planner import tokens_of_share
from kvpolicy.planning.tokens import Tokens
from kvpolicy.policy import Policy
from kvpolicy.statistics import AttentionSum, Forward, Replay
from kvpolicy.statistics.statistic import first_of
from kvpolicy.statistics.windows import Past, ScoreTransform
from kvpolicy.tuning.candidates import pins_of, replays_of, statistics_of
from kvpolicy.tuning.tap import LayerCall, Tap
from kvpolicy.tuning.windows import Window


class LayerPrompt(NamedTuple):
    """The inputs of one layer's attention, for a prompt of N tokens.

    Attributes:
        layer_idx: Index of the layer in the model.
        queries: As attention takes them, [1, Hq, N, D].
        keys: As attention takes them, [1, H, N, D].
        values: [1, H, N, D].
        transform: From products to attention weights.
        forward: The arguments of the attention module.
        massive: Which tokens hold the `count` largest activations, [1, N] bool, by `count`.
        device: Device of the layer.
    """

    layer_idx: int
    queries: Tensor
    keys: Tensor
    values: Tensor
    transform: ScoreTransform
    forward: Forward
    massive: Mapping[int, Tensor]
    device: torch.device

    def to(self, device: torch.device | None) -> LayerPrompt:
        """Move queries, keys, values and the input of attention to a device; unchanged if it is None."""
        if device is None:
            return self
        queries, keys, values = (t.to(device) for t in (self.queries, self.keys, self.values))
        forward = self.forward._replace(hidden_states=self.forward.hidden_states.to(device), queries=queries)
        return self._replace(queries=queries, keys=keys, values=values, forward=forward)


class WindowFacts(NamedTuple):
    """Facts of a window that the compression of its prompt needs besides the tensors of the layers.

    Attributes:
        tokens: The tokens that each policy keeps; None for a policy with too small a budget.
        scores: Scores of the replayed prompt, [1, H, N] fp32, by the way in which it is replayed and by layer.
    """

    tokens: list[Tokens | None]
    scores: dict[Replay, dict[int, Tensor]]


class Compressor:
    """Compresses layers under each of several policies, as a cache under that policy would after a prompt.

    Attributes:
        policies: The policies.
        pins: Numbers of largest activations for which the tokens must be known.
    """

    def __init__(self, tap: Tap, policies: Sequence[Policy]) -> None:
        """Prepare for the policies.

        Raises:
            KVPolicyError: If a policy undoes a rotary embedding that cannot be undone.
        """
        self.policies = policies
        self.pins = pins_of(policies)
        self._tap = tap
        self._ropes = tap.ropes(policies)

    def facts(self, window: Window) -> WindowFacts:
        """Find what compressing the prompt of a window depends on."""
        shapes = [self._tap.attachment.model_shape.shape] * len(self._tap.layers)
        tokens = [tokens_of_share(policy, len(window.prompt), len(window.answer), shapes) for policy in self.policies]
        wanted = [policy for policy, found in zip(self.policies, tokens, strict=True) if found is not None]
        return WindowFacts(tokens, {plan: self._tap.replay(window.prompt, plan) for plan in replays_of(wanted)})

    def compress(self, prompt: LayerPrompt, facts: WindowFacts) -> Iterator[tuple[int, Past]]:
        """Compress a layer's prompt under each policy, one after the other.

        Args:
            prompt: The layer's prompt.
            facts: Facts of the window.

        Yields:
            The number of a policy, and the decoded content of the layer; policies with too small a budget are skipped.
        """
        groups: dict[Any, list[int]] = {}
        for number, policy in enumerate(self.policies):
            if facts.tokens[number] is not None:
                groups.setdefault(_seen_by(policy), []).append(number)
        for members in groups.values():
            seen: dict[Any, PendingPrompt] = {}
            for number in members:
                yield number, self.past(prompt, facts, number, seen)

    def past(self, prompt: LayerPrompt, facts: WindowFacts, number: int, seen: dict[Any, PendingPrompt]) -> Past:
        """Compress a layer's prompt under one policy; its budget must not be too small.

        Args:
            prompt: The layer's prompt.
            facts: Facts of the window.
            number: The number of the policy.
            seen: Pending prompts by statistics, to which that of this policy is added; policies with equal ones share
                one.

        Returns:
            The content of the layer after the prompt, on the device of the layer.
        """
        policy = self.policies[number]
        tokens = facts.tokens[number]
        assert tokens is not None
        prompt = prompt.to(prompt.device)
        key = _seen_by(policy)
        if key not in seen:
            seen[key] = self._pending(prompt, facts, policy)
        past = self._compress(prompt, seen[key], policy, tokens).past()
        assert past is not None, "a budget is at least one token"
        return past

    def _pending(self, prompt: LayerPrompt, facts: WindowFacts, policy: Policy) -> PendingPrompt:
        """The prompt with the statistics that a policy needs."""
        store = self._empty(prompt, policy)
        spec = store.spec
        forward = prompt.forward if spec.needs_call or spec.input_scorer is not None else None
        given = (prompt.queries, prompt.keys, prompt.values, None, prompt.transform, forward)
        # Without sums of attention, there is no need to attend.
        attends = first_of(AttentionSum, spec.prompt_statistics) is not None
        pending = store.attend_prompt(*given)[1] if attends else see_prompt(store.contents, *given)
        replay = first_of(Replay, spec.prompt_statistics)
        scores = None if replay is None else facts.scores[replay][prompt.layer_idx]
        return pending._replace(replay=scores)

    def _compress(self, prompt: LayerPrompt, pending: PendingPrompt, policy: Policy, tokens: Tokens) -> LayerStore:
        """The layer after the prompt."""
        number = self._tap.layers.index(prompt.layer_idx)
        budget = RowBudget(tokens.keep[:, number], tokens.extra, tokens.expected_len[:, number], tokens.last)
        traits = policy.codec.traits
        store = self._empty(prompt, policy)
        store.compress(pending, budget, massive=prompt.massive[traits.pinned] if traits.pins == "massive" else None)
        return store

    def _empty(self, prompt: LayerPrompt, policy: Policy) -> LayerStore:
        """The layer before the prompt."""
        rope = self._ropes[prompt.layer_idx] if policy.undoes_rotation else None
        module = prompt.forward.module
        store = make_store(policy, prompt.layer_idx, rope, lambda: output_projection(module))
        store.initialize(prompt.keys, group=prompt.queries.shape[1] // prompt.keys.shape[1])
        return store


def prompt_of(call: LayerCall, length: int) -> LayerPrompt:
    """The prompt in the call of a layer: its first `length` tokens."""
    others: dict[str, Any] = dict(call.forward.kwargs)
    if isinstance(others.get("position_embeddings"), tuple):
        others["position_embeddings"] = tuple(t[:, :length] for t in others["position_embeddings"])
    if isinstance(others.get("position_ids"), Tensor):
        others["position_ids"] = others["position_ids"][:, :length]
    forward = call.forward._replace(hidden_states=call.forward.hidden_states[:, :length], kwargs=others)
    queries, keys, values = (t[:, :, :length] for t in (call.queries, call.keys, call.values))
    return LayerPrompt(call.layer_idx, queries, keys, values, call.transform, forward, call.massive, keys.device)


def whole(keys: Tensor, values: Tensor) -> Past:
    """All keys and values [B, H, N, D] of a prompt as slots."""
    return Past(keys, values, torch.ones(keys.shape[:3], dtype=torch.bool, device=keys.device))


def _seen_by(policy: Policy) -> Any:
    """Key of a policy's pending prompt; policies with equal keys share one."""
    return statistics_of(policy), policy.codec.statistics
