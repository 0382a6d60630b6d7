"""KVzap: keep the tokens that a small trained gate expects a replay of the context to attend to."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from kvpolicy.protocols import ALL_HEADS, DecodeMode, ModelInfo, Scored, Scores, State, View
from kvpolicy.selectors.common import half_budget, keep_always
from kvpolicy.selectors.gate_files import GATE_FILES, LayerGate
from kvpolicy.statistics import InputScores, Results, Statistic
from kvpolicy.text.strategy import least, strategy, tiny_or

LARGEST = 64.0
"""The largest score whose exponential is taken: fp32 ends at that of 88."""


@strategy
class KVzap(Scored):
    """Keep the tokens that a trained gate expects a replay of the context to attend to.

    `kvzip:plus=true` runs the context through the model twice. A gate, one small map per layer, was fitted to the
    logarithm of its scores, and computes them from the input of the layer alone. Each token is scored once, when its
    layer runs, in a prompt as in decode. Neither queries nor attention are needed.

    Args:
        file: The gate file, which `kvpolicy calibrate gate` writes, or `tiny` for that of the embedded model.
        window: Newest tokens, which are always kept; at most half the budget is kept so, and always the newest token.
        decode: Whether generated tokens compete for the budget (`evict`) or are kept in addition to it (`grow`).

    Raises:
        KVPolicyError: If `file` is empty, or `window` is below 1.

    Examples:
        >>> from kvpolicy import Policy
        >>> str(Policy.parse("kvzap:file=gate.safetensors:window=64@0.2"))
        'kvzap:file=gate.safetensors:window=64@0.2'

    Source:
        KVzap (arXiv:2601.07891), and kvpress (KVzapPress). See `calibrate_gate` for the gates. Differences:

        - A budget takes the place of the threshold: the tokens of highest score are kept, as many as fit, and no score
          evicts by itself. Heads keep equally many tokens unless an allocator says otherwise. A threshold leaves each
          head as many as exceed it.
        - Evicted tokens are gone. kvpress hides them after a dense prefill.
        - The window is at most half the budget.
        - Gates and scores are fp32 (kvpress: the dtype of the model), with the last product in fp64, so that equal
          inputs have equal scores.
        - The files that the authors publish are not read, because they do not name their weights. Theirs have a hidden
          layer of 512 units.
    """

    file: str = tiny_or("a file")
    window: int = least(1, 128)
    decode: DecodeMode = "evict"
    compares_heads: ClassVar[bool] = True
    nested_from: ClassVar[int | None] = 1

    @property
    def statistics(self) -> tuple[Statistic[Any], ...]:
        """The input of the layer at every token."""
        return (InputScores(self),)

    def check(self, model: ModelInfo) -> None:
        """Raise KVPolicyError if the gate file cannot be read, or is of another model."""
        GATE_FILES.check(GATE_FILES.load(self.file), self.file, model)

    def load_gate(self, layer_idx: int, device: torch.device | str, heads: slice = ALL_HEADS) -> LayerGate:
        """The gate of a layer, of some KV heads."""
        return GATE_FILES.load(self.file).gates[layer_idx].of_heads(heads).to(device)

    def score_inputs(self, gate: LayerGate, inputs: Tensor) -> Tensor:
        """The score that the gate gives each token: [B, H, T], or [B, 1, T] if all heads share it."""
        return gate.score(inputs)

    def observe(self, state: Scores, seen: Results, view: View) -> State:
        """Take the scores of new tokens."""
        new = seen[InputScores]
        return Scores(torch.where(new.is_new, new.scores, state.score))

    def step(self, state: Scores, row: Tensor, view: View) -> None:
        """Take the score of a generated token."""
        assert view.token is not None and view.token.scores is not None
        state.score.copy_(torch.where(view.newest(1), view.token.scores, state.score))

    def priority(self, state: Scores, view: View) -> Tensor:
        """Tokens of the window are always kept, others by their score: [B, H, N]."""
        window = half_budget(view, self.window)
        return keep_always(state.score, view.newest(window))

    def attention(self, state: Scores) -> Tensor:
        """The attention that the gate expects, the exponential of its score: [B, H, N]."""
        return state.score.clamp_max(LARGEST).exp()
