"""The budgets of the layers of a cache: what is measured while a prompt runs, and how the budget is divided by it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvpolicy.hf.announced import Announced
from kvpolicy.hf.attachment import Attachment
from kvpolicy.hf.budgets import (
    Division,
    Measured,
    curves_of,
    divide_budget,
    measured_metrics,
    shares_of,
    trim_waiting,
    whole_budgets,
)
from kvpolicy.hf.layer import PolicyLayer
from kvpolicy.hf.running_forward import RunningForward
from kvpolicy.policy import Policy
from kvpolicy.text.errors import KVPolicyStateError


class LayerBudgets:
    """Measures the layers of a cache, and divides its budget among them.

    Attributes:
        attachment: The attachment of the cache.
        measured: The metric of the layers.
    """

    def __init__(self, policy: Policy, attachment: Attachment, layers: Sequence[PolicyLayer]) -> None:
        """Budgets of the layers under a policy, none of which is measured."""
        self._policy = policy
        self.attachment = attachment
        self._layers = [*layers]
        self._indices = [layer.layer_idx for layer in layers]
        self.measured = Measured()

    def cosines(self, unbegun: Tensor | None) -> Tensor:
        """The measured metric of each layer, [B, L]; shares of the budget if it has many numbers of each.

        Args:
            unbegun: Rows whose first prompt runs, [B] bool; None if all are measured anew.
        """
        if self.measured.known is None and not self.measured.sums:
            raise KVPolicyStateError(
                "Cosines must be measured during a prompt, got none; try the allocator squeeze, and run a prompt."
            )
        return self.measured.of_rows(self._indices, unbegun)

    @property
    def metrics(self) -> Tensor | None:
        """The metric of the layers in the first prompt of each row, [B, L, ...]; None if they are not measured."""
        return None if self.measured.known is None else self.measured.of_rows(self._indices, None)

    def end_prompt(self, unbegun: Tensor | None) -> None:
        """Keep the metric of the prompt that ran."""
        self.measured.end_prompt(self._indices, unbegun)

    def trim(self, forward: RunningForward, announced: Announced) -> None:
        """Drop what no division to come can keep of the prompts that wait, whose metric is known."""
        trim_waiting(self._policy, forward, self.measured, len(self._layers), announced)

    def compare(self, waiting: list[PolicyLayer], forward: RunningForward, announced: Announced) -> None:
        """Compare layers by what their tokens are worth, or by their attention, and note the metric of each layer.

        A row keeps that of its first prompt: slots that were made for a layer are not given to another.

        Args:
            waiting: The layers, whose prompts wait for their budgets.
            forward: The forward of these prompts.
            announced: The announced lengths.
        """
        pending = waiting[0].pending
        unbegun = forward.unbegun
        assert pending is not None and unbegun is not None
        metrics = measured_metrics(self._policy.allocator, waiting, forward.attention)
        if metrics is None or metrics.dim() > 2:
            # The budgets are not known yet: selectors reckon with equal ones.
            lengths = pending.lengths(waiting[0].store.tensors.length)
            equal = torch.ones(len(unbegun), len(waiting), device="cpu", dtype=torch.float32)
            even = self.divide(waiting[0], lengths, forward, announced, equal).tokens
            drawn = curves_of(self._policy, waiting, even) if metrics is None else metrics
            metrics = shares_of(self._policy, drawn, even)
        self.measured.note(metrics, unbegun)

    def divide(
        self,
        first: PolicyLayer,
        lengths: Tensor,
        forward: RunningForward,
        announced: Announced,
        metrics: Tensor | None = None,
    ) -> Division:
        """Divide the budget among layers, from the lengths of rows after a prompt.

        Args:
            first: The first layer.
            lengths: Tokens of each row, those of its pending prompt included, [B] int64.
            forward: The forward of the prompt.
            announced: The announced lengths.
            metrics: The metric of each layer, [B, L], in place of what was measured.
        """
        keep = None
        if forward.added is not None:
            keep = whole_budgets(self._layers, forward.added)
        elif metrics is None and self._policy.layer_metric:
            metrics = self.cosines(forward.unbegun)
        columns = first.get_seq_length()
        before = first.prefix_columns
        return divide_budget(
            self._policy, self.attachment, first.store, lengths, announced, metrics, columns, keep, before
        )
