"""What a cache holds, told to a person or a program."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvpolicy.policy import Policy
from kvpolicy.reporting import rich_repr as notebook
from kvpolicy.spec.errors import KVPolicyError, KVPolicyTypeError
from kvpolicy.spec.formats import stamp

if TYPE_CHECKING:
    from kvpolicy.hf.cache import PolicyCache


FORMAT = 1
"""Version of what `Report.as_dict` gives."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerReport:
    """One layer of a report.

    Attributes:
        layer_idx: Which layer of the model.
        budget: The most tokens of each row.
        kept: Tokens held of each row, the most of any head.
        seen: Tokens each row has seen.
        nbytes: Bytes by kind.
        note: Why the layer is not under the policy, where it is not.
    """

    layer_idx: int
    budget: tuple[int, ...] = ()
    kept: tuple[int, ...] = ()
    seen: tuple[int, ...] = ()
    nbytes: dict[str, int]
    note: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """A cache's budgets, tokens and bytes.

    Attributes:
        policy: The cache's policy.
        layers: One entry per layer.
        nbytes: Every byte held.
        full_nbytes: Bytes that a stock cache would hold of the same tokens.
        note: What was decided otherwise than the policy may lead to expect, or nothing.
        resident_nbytes: Bytes of calibrated tensors that belong to the model, not to the cache.
    """

    policy: Policy
    layers: tuple[LayerReport, ...]
    nbytes: int
    full_nbytes: int
    note: str = ""
    resident_nbytes: int = 0

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers and strings, ready for JSON, with the version of kvpolicy and of the format."""
        names = ("layer_idx", "budget", "kept", "seen", "nbytes", "note")
        layers = [{name: getattr(layer, name) for name in names} for layer in self.layers]
        head = {"policy": str(self.policy), "nbytes": self.nbytes, "full_nbytes": self.full_nbytes, "note": self.note}
        head |= {"resident_nbytes": self.resident_nbytes}
        return stamp(FORMAT) | head | {"layers": layers}

    def __repr__(self) -> str:
        """One line: policy, layers and bytes."""
        return notebook.sizes_words(self)

    def _repr_html_(self) -> str:
        return notebook.report_html(self)

    def __str__(self) -> str:
        """A table, one line per layer."""
        share = f", {self.nbytes / self.full_nbytes:.3f} of it" if self.full_nbytes else ""
        lines = [f"{self.policy}: {self.nbytes:,} bytes held; the full cache: {self.full_nbytes:,}{share}"]
        for layer in self.layers:
            kinds = ", ".join(f"{kind} {size:,}" for kind, size in layer.nbytes.items() if size)
            told = layer.note or f"kept {list(layer.kept)} of {list(layer.seen)}, budget {list(layer.budget)}"
            lines.append(f"layer {layer.layer_idx}: {told}; bytes: {kinds or 0}")
        if self.resident_nbytes:
            lines.append(f"beside the cache, calibrated and the model's own: {self.resident_nbytes:,} bytes")
        if self.note:
            lines.append(self.note)
        return "\n".join(lines)


def cache_of(source: Any) -> PolicyCache:
    """The cache of a handle, or a cache itself.

    Raises:
        KVPolicyError: Where there is none yet, or it has seen no prompt.
        KVPolicyTypeError: Where it is neither.
    """
    from kvpolicy.hf.attach import Handle
    from kvpolicy.hf.cache import PolicyCache

    cache = source.cache if isinstance(source, Handle) else source
    if cache is not None and not isinstance(cache, PolicyCache):
        raise KVPolicyTypeError(f"A {type(source).__name__} holds no tokens: give a Handle or a PolicyCache.")
    if cache is None or not any(layer.is_initialized for layer in cache.policy_layers):
        raise KVPolicyError("The cache has seen no prompt yet: run the model first.")
    return cache


def make_report(cache: PolicyCache) -> Report:
    """The report of a cache."""
    from kvpolicy.hf.layer import PolicyLayer

    layers: list[LayerReport] = []
    for index, layer in enumerate(cache.layers):
        if not isinstance(layer, PolicyLayer):
            window = cache.attachment.model_shape.left_alone[index]
            size = cache.alone_bytes().get(index, 0)
            note = f"left alone: a sliding window of {window}"
            layers.append(LayerReport(layer_idx=index, nbytes={"window": size}, note=note))
        elif not layer.is_initialized:
            layers.append(LayerReport(layer_idx=index, nbytes={}, note="empty"))
        else:
            kept = (layer.positions >= 0).sum(-1).amax(-1)
            rows = (tuple(int(n) for n in t.tolist()) for t in (layer.budget, kept, layer.length))
            budget, held, seen = rows
            layers.append(LayerReport(layer_idx=index, budget=budget, kept=held, seen=seen, nbytes=layer.held()))
    note = "" if cache.plan is None else cache.plan.note
    return Report(
        policy=cache.policy, layers=tuple(layers), nbytes=cache.nbytes, full_nbytes=cache.full_nbytes, note=note,
        resident_nbytes=cache.resident_nbytes,
    )  # fmt: skip
