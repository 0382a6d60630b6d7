"""Memory and time of a cell of a sweep, estimated from configs and sizes alone.

Bytes of caches are exact for the prompts assumed: they are those of `kvpolicy.plan`. Hours are an estimate:

- A prompt takes its floating-point operations, 2 for each weight and token and 2 for each channel of a query head and
  pair of tokens (causal attention), at `COMPUTE` of the card's peak.
- A decode step takes the longest of: reading the weights and what the policy reads of its cache, at `BANDWIDTH` of the
  card's; its operations; and `LAYER_SECONDS` for each layer, the time that Python and the launches of kernels take.
- Every answer has as many tokens as its task allows.

What a policy itself adds to the time of a model, loading, and scoring are not counted.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

import kvpolicy
from kvpolicy.planning.result import CachePlan
from kvpolicy.text.errors import KVPolicyError
from kvpolicy_eval.sweep.cells import Cell
from kvpolicy_eval.sweep.config import Config
from kvpolicy_eval.sweep.sizes import TaskSize, model_config, task_size

COMPUTE = 0.4
"""Fraction of a card's peak that a prefill is assumed to reach."""
BANDWIDTH = 0.6
"""Fraction of a card's bandwidth that a decode step is assumed to reach."""
LAYER_SECONDS = 1e-3
"""The least time of a layer in a decode step that is not compiled: an assumption."""
RESERVE = 10**9
"""Bytes for the CUDA context and for memory that an allocator cannot use."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Card:
    """A class of GPUs, by its vendor's data sheet.

    Attributes:
        name: Its name.
        memory: Bytes of its memory.
        flops: Dense bfloat16 operations per second, without sparsity.
        bandwidth: Bytes per second of its memory.
    """

    name: str
    memory: int
    flops: float
    bandwidth: float


CARDS = {
    card.name: card
    for card in (
        Card(name="a100-80gb", memory=80 * 10**9, flops=312e12, bandwidth=2.0e12),
        Card(name="h100-80gb", memory=80 * 10**9, flops=989e12, bandwidth=3.35e12),
        Card(name="h200-141gb", memory=141 * 10**9, flops=989e12, bandwidth=4.8e12),
    )
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """The estimate of a cell; what is not known is None.

    Attributes:
        cell: The cell.
        size: Size of its task, prompts cut to what the model takes.
        nbytes: Bytes of the cache of a batch after its answers, on each rank.
        full_nbytes: Those of the full cache.
        hours: Hours on the card, or on as many cards as the model has ranks. If the policy cannot be planned, for
            example because its calibration is missing, those of the full cache.
        memory: Bytes of GPU memory that prompts of the model's greatest length need, on each rank.
        problem: Why something is not known; empty if everything is.
    """

    cell: Cell
    size: TaskSize | None = None
    nbytes: int | None = None
    full_nbytes: int | None = None
    hours: float | None = None
    memory: int | None = None
    problem: str = ""

    @property
    def share(self) -> float | None:
        """Bytes of the cache, of the full cache's."""
        return None if self.nbytes is None or not self.full_nbytes else self.nbytes / self.full_nbytes


def estimate(config: Config, cell: Cell, card: Card) -> Estimate:
    """Estimate a cell; nothing is downloaded and nothing is run.

    Args:
        config: Of the sweep.
        cell: One of its cells.
        card: On which it will run.
    """
    arguments = config.models[cell.model]
    size = task_size(cell.task, config.metadata)
    if size is None:
        return Estimate(cell=cell, problem=f"the size of {cell.task} is not known")
    try:
        model = _model(arguments.get("pretrained"), arguments.get("dtype"), arguments.get("tp", 1))
    except KVPolicyError as error:
        return Estimate(cell=cell, problem=f"{cell.model}: {error}")
    if model is None:
        return Estimate(cell=cell, problem=f"the config of {arguments.get('pretrained')} is not on this machine")
    new = config.gen_kwargs.get("max_gen_toks", size.new)
    examples = min(size.examples, config.limit or size.examples)
    longest = arguments.get("max_length") or model.positions
    size = TaskSize(examples=examples, tokens=max(1, min(size.tokens, longest - new)), new=new)
    rows = config.batch_size if isinstance(config.batch_size, int) else 1
    try:
        plan = model.plan(cell.policy, rows, size.tokens, size.new)
        greatest = model.plan(cell.policy, rows, longest, 0)
    except KVPolicyError as error:
        return _without_plan(cell, model, size, rows, card, error)
    full = cell.method == "full"  # lm-eval's own code with the stock cache
    read = plan.full_nbytes if full else plan.moved + sum(plan.unmanaged.values())
    held = greatest.full_nbytes if full else max(greatest.peak_nbytes, greatest.nbytes) + greatest.resident_nbytes
    return Estimate(
        cell=cell,
        size=size,
        nbytes=plan.full_nbytes if full else plan.nbytes,
        full_nbytes=plan.full_nbytes,
        hours=_seconds(model, size, rows, read, card) / 3600,
        memory=model.weight_bytes + held + model.activation_bytes(rows * longest) + RESERVE,
    )


def _without_plan(cell: Cell, model: _Model, size: TaskSize, rows: int, card: Card, error: KVPolicyError) -> Estimate:
    """Estimate of a cell with a policy that cannot be planned: its time is about that of the full cache."""
    problem = f"{cell.policy}: {error}"
    try:
        full_nbytes = model.plan("full", rows, size.tokens, size.new).full_nbytes
    except KVPolicyError:  # no policy can manage this model
        return Estimate(cell=cell, size=size, problem=f"{cell.model}: {error}")
    # It hardly depends on the policy: the weights are most of what a step reads.
    hours = _seconds(model, size, rows, full_nbytes, card) / 3600
    return Estimate(cell=cell, size=size, full_nbytes=full_nbytes, hours=hours, problem=problem)


def total_hours(estimates: Sequence[Estimate]) -> float:
    """Hours of all cells whose hours are known."""
    return sum(found.hours or 0 for found in estimates)


def most_memory(estimates: Sequence[Estimate]) -> int:
    """The most bytes that a cell needs; 0 if none is known."""
    return max((found.memory or 0 for found in estimates), default=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Model:
    """Properties of a model that an estimate needs, on each of its ranks.

    Attributes:
        config: Its config.
        dtype: Of weights and cache.
        tp: Number of ranks.
        weight_bytes: Bytes of weights.
        matmul_weights: Weights that every token is multiplied with: all but those of a separate input embedding. Of a
            mixture of experts these are all experts, although a token uses a few.
        plans: Plans made so far.
    """

    config: Any
    dtype: torch.dtype
    tp: int
    weight_bytes: int
    matmul_weights: int
    plans: dict[tuple[str, int, int, int], CachePlan]

    @property
    def positions(self) -> int:
        """The most tokens that the model takes, if the sweep does not say."""
        return int(self.config.max_position_embeddings)

    def plan(self, policy: str, rows: int, prompt: int, new: int) -> CachePlan:
        """The plan of a policy's cache; tasks of the same size share it."""
        key = (policy, rows, prompt, new)
        if key not in self.plans:
            self.plans[key] = kvpolicy.plan(
                self.config, policy, batch=rows, prompt=prompt, new=new, dtype=self.dtype, tp=self.tp
            )
        return self.plans[key]

    def prompt_flops(self, tokens: int) -> float:
        """Floating-point operations of a prompt, on each rank."""
        config = self.config
        heads = config.num_attention_heads
        dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        pairs = 2 * config.num_hidden_layers * heads * dim * tokens**2 / self.tp
        return 2 * self.matmul_weights * tokens + pairs

    def activation_bytes(self, tokens: int) -> int:
        """Bytes of the widest moment of a layer: two intermediate states of the MLP, and four hidden states."""
        hidden = self.config.hidden_size
        width = 2 * getattr(self.config, "intermediate_size", 4 * hidden) // self.tp + 4 * hidden
        return tokens * width * self.dtype.itemsize


@functools.cache
def _model(pretrained: str | None, dtype: str | None, tp: int) -> _Model | None:
    config = model_config(pretrained)
    if config is None:
        return None
    if dtype is None or dtype == "auto":  # the embedded model is loaded in float32, others as they are stored
        number = torch.float32 if pretrained is None else getattr(config, "dtype", None) or torch.bfloat16
    else:
        number = getattr(torch, str(dtype), None)
    if not isinstance(number, torch.dtype):
        raise KVPolicyError(f"dtype must be a type of torch, got {dtype!r}; try bfloat16.")
    weights = kvpolicy.weights_per_rank(config, tp=tp, dtype=number).nbytes
    text = config.get_text_config()
    embedding = 0 if text.tie_word_embeddings else text.vocab_size * text.hidden_size
    return _Model(
        config=text,
        dtype=number,
        tp=tp,
        weight_bytes=weights,
        matmul_weights=weights // number.itemsize - embedding,
        plans={},
    )


def _seconds(model: _Model, size: TaskSize, rows: int, read: int, card: Card) -> float:
    """Seconds of all examples.

    Args:
        model: The model.
        size: Of the task.
        rows: Of a batch.
        read: Bytes that a decode step reads of the cache of a batch.
        card: On which it runs.
    """
    operations = COMPUTE * card.flops
    prompt = model.prompt_flops(size.tokens) / operations
    step = max(
        (model.weight_bytes + read) / (BANDWIDTH * card.bandwidth),
        2 * model.matmul_weights * rows / operations,
        LAYER_SECONDS * model.config.num_hidden_layers,
    )
    return size.examples * prompt + -(-size.examples // rows) * (size.new - 1) * step
