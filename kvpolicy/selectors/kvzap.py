"""KVzap: keep the tokens that a small trained gate expects a replay of the context to attend to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvpolicy.protocols import ALL_HEADS, DecodeMode, ModelInfo, Needs, Scored, Scores, State, View
from kvpolicy.selectors._common import keep_always
from kvpolicy.selectors.gate_files import GATE_FILES, LayerGate
from kvpolicy.text.arguments import named_options
from kvpolicy.text.errors import KVPolicyError
from kvpolicy.text.parameters import check_min
from kvpolicy.text.validation import check_fields

LARGEST = 64.0
"""The largest score whose exponential is taken: fp32 ends at that of 88."""


@named_options
@dataclass(frozen=True, kw_only=True, slots=True)
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

    file: str = "tiny"
    window: int = 128
    decode: DecodeMode = "evict"
    compares_heads: ClassVar[bool] = True
    nested_from: ClassVar[int | None] = 1

    def __post_init__(self) -> None:
        """Check the hyperparameters."""
        check_fields(self)
        check_min(self, window=1)
        if not self.file:
            raise KVPolicyError("KVzap.file must be a file or 'tiny', got an empty string; try 'tiny'.")

    @property
    def needs(self) -> Needs:
        """The input of the layer at every token."""
        return Needs(layer_input=True)

    def check(self, model: ModelInfo) -> None:
        """Raise KVPolicyError if the gate file cannot be read, or is of another model."""
        GATE_FILES.check(GATE_FILES.load(self.file), self.file, model)

    def load_gate(self, layer_idx: int, device: torch.device | str, heads: slice = ALL_HEADS) -> LayerGate:
        """The gate of a layer, of some KV heads."""
        return GATE_FILES.load(self.file).gates[layer_idx].of_heads(heads).to(device)

    def score_inputs(self, gate: LayerGate, inputs: Tensor) -> Tensor:
        """The score that the gate gives each token: [B, H, T], or [B, 1, T] if all heads share it."""
        return gate.score(inputs)

    def with_scores(self, state: State, scores: Tensor) -> State:
        """The scores of new tokens."""
        assert isinstance(state, Scores)
        return Scores(scores.expand_as(state.score).contiguous())  # of one head if all share a gate

    def priority(self, state: Scores, view: View) -> Tensor:
        """Tokens of the window are always kept, others by their score: [B, H, N]."""
        window = (view.budget // 2).clamp(1, self.window)
        return keep_always(state.score, view.newest(window))

    def attention(self, state: Scores) -> Tensor:
        """The attention that the gate expects, the exponential of its score: [B, H, N]."""
        return state.score.clamp_max(LARGEST).exp()
