"""The cache: every layer's slots, and the budget that they share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicSlidingWindowLayer

from kvpolicy.engine.host import on_host
from kvpolicy.engine.row_limits import massive_tokens, mean_cosine, rotary_shift
from kvpolicy.hf.attachment import link_of
from kvpolicy.hf.forward_guard import Running
from kvpolicy.hf.layer import PolicyLayer
from kvpolicy.hf.model_spec import ModelShape
from kvpolicy.planning.memory import planned_resident, resident_bytes
from kvpolicy.planning.notes import remarks
from kvpolicy.planning.planner import divide, plan_layers
from kvpolicy.planning.result import CachePlan
from kvpolicy.policy import Policy
from kvpolicy.protocols import LayerShape
from kvpolicy.reporting import rich_repr as notebook
from kvpolicy.reporting.report import Report, make_report
from kvpolicy.spec.errors import KVPolicyError, KVPolicyStateError
from kvpolicy.spec.validation import MAX_SIZE, at_least, expected, longest


class PolicyCache(Cache):
    """A KV cache under a policy, to be passed as `past_key_values`.

    A model that a policy is attached to makes one by itself. Make your own to keep two conversations on one model
    apart, or to say beforehand how long they will be.

    Args:
        model: A model that a policy is attached to.
        policy: The cache's policy, or its words; the attached one by default.
        prompt: Tokens of each row's whole prompt, where it comes in chunks: [B], one number, or None.
        new: Tokens that will be generated, where known: a growing cache then allocates exactly that.

    Raises:
        KVPolicyError: If no policy is attached to the model, the attachment lacks a metric that this policy needs, or a
            number of tokens is out of range.

    Examples:
        >>> import torch, kvpolicy
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(num_hidden_layers=1, hidden_size=32, num_attention_heads=2, vocab_size=9)
        >>> model = LlamaForCausalLM(config).eval()
        >>> with torch.no_grad(), kvpolicy.attach(model, "window@0.5"):
        ...     cache = kvpolicy.PolicyCache(model)
        ...     _ = model(torch.tensor([[1, 2, 3, 4]]), past_key_values=cache)
        >>> cache.layers[0].positions.tolist()
        [[[2, 3], [2, 3]]]
    """

    def __init__(
        self,
        model: nn.Module,
        policy: Policy | str | None = None,
        *,
        prompt: Tensor | Sequence[int] | int | None = None,
        new: int | None = None,
    ) -> None:
        """Make an empty cache."""
        self.link = link = link_of(model)
        self.policy = link.policy if policy is None else Policy.of(policy)
        link.check(self.policy)
        super().__init__(layers=[self._make_layer(index, link.model_shape) for index in range(link.layers)])
        self.prompt, self.new = expected(prompt, new)
        self._end: Tensor | None = None  # tokens of each row once the last is generated, [B]
        self.plan: CachePlan | None = None
        self._metrics: dict[int, Tensor] = {}
        self._waiting: list[PolicyLayer] = []
        self._valid: Tensor | None = None
        self._one_token, self.running = False, Running()
        self._first: Tensor | None = None  # rows without a token before the running forward, [B], where there are some
        self._shift: Tensor | None = None  # what the rotary embedding adds to the waiting prompt's positions, [B]

    __repr__, _repr_html_ = notebook.cache_words, notebook.cache_html  # pyright: ignore[reportAssignmentType]

    def _make_layer(self, index: int, shape: ModelShape) -> Any:
        if index in shape.left_alone:
            return DynamicSlidingWindowLayer(sliding_window=shape.left_alone[index])
        rope = self.link.ropes.get(index) if self.policy.codec.traits.key_space == "unrotated" else None
        return PolicyLayer(self.policy, index, self._on_prompt, rope, self.link.meet)

    @property
    def policy_layers(self) -> list[PolicyLayer]:
        """The layers under the policy."""
        return [layer for layer in self.layers if isinstance(layer, PolicyLayer)]

    @property
    def nbytes(self) -> int:
        """Every byte held, on this rank."""
        return sum(sum(layer.held().values()) for layer in self.policy_layers) + sum(self.alone_bytes().values())

    @property
    def full_nbytes(self) -> int:
        """Bytes that a stock cache would hold of the tokens seen, padding left out."""
        own = 0
        for layer in self.policy_layers:
            if layer.is_initialized and layer.keys is not None:
                _, heads, _, dim = layer.keys.shape
                own += int(layer.length.sum()) * 2 * heads * dim * layer.keys.element_size()
        return own + sum(self.alone_bytes().values())

    @property
    def resident_nbytes(self) -> int:
        """Bytes of calibrated tensors, which belong to the model and not to the cache."""
        return resident_bytes(
            calibration for layer in self.policy_layers if layer.is_initialized for calibration in layer.calibrations
        )

    def report(self) -> Report:
        """Per layer: budget, tokens kept and bytes by kind, against the full cache."""
        return make_report(self)

    @on_host
    def tick(self) -> None:
        """Count one decode step and do what is due between steps: code a full block, extend a growing cache.

        `generate` and an uncompiled loop do this by themselves; a loop over `torch.compile(model)` calls it after
        each step. A block that had to be coded and was not is an error in the next step, never a lost token.
        """
        for layer in self.policy_layers:
            layer.tick()

    def expect(self, prompt: Tensor | Sequence[int] | int | None, new: int) -> None:
        """Expect a prompt and `new` more tokens: a growing cache makes room for these at once."""
        prompt, self.new = expected(prompt, new)
        self.prompt, self._end = longest(self.prompt, prompt), None
        for layer in self.policy_layers:
            if layer.is_initialized and self.policy.decode == "grow":
                layer.reserve(new)

    # settling budgets

    @on_host
    def begin(self, tokens: Tensor, mask: Tensor | None, position_ids: Tensor | None = None) -> None:
        """Prepare for a forward of `tokens` [B, P(, D)], in eager mode."""
        slots, new = self.policy_layers[0], tokens.shape[1]
        one_token, shift = new == 1 and slots.is_initialized, self._shift
        fits = not one_token and mask is not None and mask.dim() == 2 and mask.shape[1] >= new  # others are refused
        valid = mask[:, -new:].bool() if mask is not None and fits else None
        seen = slots.length if slots.is_initialized else tokens.new_zeros(tokens.shape[0], dtype=torch.int64)
        if self.policy.codec.traits.key_space == "unrotated" and not (one_token or self.running.now):
            shift = rotary_shift(position_ids, valid, slots.get_seq_length(), seen, new, shift)
        self.running.begin(self.policy_layers, new)  # what was refused before has not begun
        self._one_token, self._shift = one_token, shift
        for layer in self.policy_layers if one_token else ():
            layer.make_room()
        self._first = None if one_token or not bool((seen == 0).any()) else seen == 0
        self._valid = valid if self.wants_metrics or self.wants_massive else None

    @on_host
    def observe(self, layer_idx: int, residual: Tensor, update: Tensor) -> None:
        """Measure how little attention changes the residual stream: cosine of before and after, mean over tokens.

        Args:
            layer_idx: Which layer.
            residual: Before, [B, P, D].
            update: What attention adds, [B, P, D].
        """
        new, held = mean_cosine(residual, update, self._valid), self._metrics.get(layer_idx)
        if held is not None and self._first is not None:  # a row is measured where its first tokens are
            new = torch.where(self._first.to(new.device), new, held)
        self._metrics[layer_idx] = new

    @property
    def wants_massive(self) -> bool:
        """Whether the largest hidden numbers of a prompt are still to be found."""
        return self.policy.codec.traits.pins == "massive" and self._first is not None

    @on_host
    def note_massive(self, layer_idx: int, hidden: Tensor) -> None:
        """Find the tokens that hold a layer's largest hidden numbers, [B, P, D]."""
        layer: Any = self.layers[layer_idx]
        layer.massive = massive_tokens(hidden, self._valid, self.policy.codec.traits.pinned)

    def cosines(self) -> Tensor:
        """What was measured, [B, L]."""
        return torch.stack([self._metrics[layer.layer_idx].cpu() for layer in self.policy_layers], -1)

    @property
    def wants_metrics(self) -> bool:
        """Whether layers are still to be measured."""
        return self.policy.allocator.layer_metric != "" and self._first is not None

    def _on_prompt(self, layer: PolicyLayer) -> None:
        """Compress a layer at once where budgets are known, and hold its prompt until they are."""
        if self.wants_metrics:
            assert layer.prompt is not None
            layer.prompt = layer.prompt.owned()
            self._waiting.append(layer)
            return
        if layer is self.policy_layers[0]:
            self._divide(layer)
        self._settle(layer)

    @on_host
    def finish(self) -> None:
        """Do what is due after a forward in eager mode: settle a prompt, or count a step."""
        self.running.check(self.policy_layers)
        self.settle()
        self.running.now = False
        for layer in self.policy_layers if self._one_token else ():
            layer.count_step()

    def settle(self) -> None:
        """Divide the budget and compress every layer that waits."""
        waiting, self._waiting = self._waiting, []
        if waiting:
            self._divide(waiting[0])
        for layer in waiting:
            self._settle(layer)

    def _settle(self, layer: PolicyLayer) -> None:
        number = self.policy_layers.index(layer)
        if self._shift is not None and layer.rows is not None:
            layer.rows.shift.copy_(self._shift)
        layer.settle(self._tokens.keep[:, number], self._tokens.room, self._tokens.ends[:, number])

    def _divide(self, first: PolicyLayer) -> None:
        """Divide the budget among layers, from the rows' lengths after the waiting prompt."""
        assert first.prompt is not None
        batch, heads, _, dim = first.prompt.keys.shape
        length = at_least(own := first.prompt.lengths(first.length).cpu(), self.prompt)
        many, dtype = first.ranks.most_heads(heads), first.prompt.keys.dtype
        fullest, shapes = ([LayerShape(count, dim, dtype)] * len(self.policy_layers) for count in (many, heads))
        metrics = self.cosines() if self.policy.allocator.layer_metric else None
        if self.new is not None and self._end is None:
            self._end = length + self.new
        columns, bytes_at = first.get_seq_length() + int((length - own).max()), self.link.model_shape.alone_bytes
        alone = bytes_at(batch, columns + (self.new or 0))
        most = bytes_at(batch, columns + (MAX_SIZE if self.new is None else self.new))  # full windows, some time
        self._tokens = divide(self.policy, metrics, length, self._end, fullest, sum(most.values()))
        if metrics is not None and not first.ranks.agree(self._tokens.keep.to(first.device)):
            raise KVPolicyStateError(
                "The ranks measured different layer budgets, so their hidden states differ: give all ranks the same "
                "prompts and weights."
            )
        seen = int((length if self._end is None else torch.maximum(self._end, length)).sum())
        full = seen * sum(2 * shape.heads * shape.head_dim * shape.dtype.itemsize for shape in shapes)
        indices = [layer.layer_idx for layer in self.policy_layers]
        layers = plan_layers(self.policy, self._tokens, shapes, indices, batch)
        self.plan = CachePlan(
            policy=self.policy, batch=batch, layers=layers, measured=True, left_alone=alone,
            full_nbytes=full + sum(alone.values()), note=remarks(self.policy, layers, self._tokens.keep, length),
            resident_nbytes=planned_resident(self.policy, tuple(indices), first.ranks.held),
        )  # fmt: skip

    def alone_bytes(self) -> dict[int, int]:
        """Bytes of the layers that the policy leaves as they are, by layer."""
        stock: list[tuple[int, Any]] = [(i, x) for i, x in enumerate(self.layers) if not isinstance(x, PolicyLayer)]
        return {i: sum(t.untyped_storage().nbytes() for t in (x.keys, x.values)) for i, x in stock if x.is_initialized}

    # what transformers asks

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Hand keys and values to the layer."""
        if not self.link.active:
            raise KVPolicyError("This cache's policy was detached from its model: attach one, and make a new cache.")
        self.running.check_update()
        states = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        layer: Any = self.layers[layer_idx]
        if not isinstance(layer, PolicyLayer):  # a sliding layer keeps a view of the whole prompt: let that go
            layer.keys, layer.values = layer.keys.clone(), layer.values.clone()
        return states

    def batch_select_indices(self, indices: Tensor) -> None:
        """Take rows `indices` [B']."""
        super().batch_select_indices(indices)
        self._map_rows(lambda t: t[indices.to(t.device)])

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Take rows `beam_idx` [B']."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row."""
        super().batch_repeat_interleave(repeats)
        self._map_rows(lambda t: t.repeat_interleave(repeats, 0))

    def _map_rows(self, fn: Callable[[Tensor], Tensor]) -> None:
        if self.prompt is not None and self.prompt.dim():
            self.prompt = fn(self.prompt)
        self._end = None if self._end is None else fn(self._end)
        self._shift = None if self._shift is None else fn(self._shift)
        self._metrics = {index: fn(cosine) for index, cosine in self._metrics.items()}

    def reset(self) -> None:
        """Forget everything, so that the cache can be used for another prompt."""
        super().reset()
        self.plan, self.prompt, self.running, self._end, self._shift = None, None, Running(), None, None
        self._metrics, self._waiting = {}, []

    @property
    def batch_size(self) -> int:
        """Rows, -1 before the first forward."""
        return self.policy_layers[0].length.shape[0] if self.policy_layers[0].is_initialized else -1
