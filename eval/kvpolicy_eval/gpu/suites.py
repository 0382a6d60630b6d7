"""Series of measurements on a GPU: methods on model shapes, at growing batch sizes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

PAPER_BATCHES = (1, 32, 64, 128, 224)
"""Batch sizes of SqueezeAttention's Table 3; larger ones follow until memory runs out."""
LONG_BATCHES = (1, 4, 8, 16)
MAX_BATCH = 1 << 14
SMALL_CARD = 24 << 30
"""Bytes of the card that a long prompt is to fit."""
KVPRESS_RATIO = 0.8
"""Share of the prompt that kvpress removes, so that it keeps a fifth like the policies do."""


@dataclass(frozen=True)
class Series:
    """One method on one shape, at growing batch sizes.

    Attributes:
        suite: Name of the suite.
        shape: Name of the model shape.
        prompt: Tokens of each row's prompt.
        new: Tokens to be generated.
        method: `dynamic`, `static`, `policy` or `kvpress`.
        mode: `eager`, or `graphs` for a compiled step.
        policy: Spec of the policy, or class name of the press.
        batches: Batch sizes that are measured first.
        until_full: Whether the batch grows until memory runs out.
        tile: Tokens of the prompt that a layer takes at a time; 0 for all.
        limit: Bytes of memory that may be used, instead of those of the command.
    """

    suite: str
    shape: str
    prompt: int
    new: int
    method: str
    mode: str
    policy: str = ""
    batches: tuple[int, ...] = (1,)
    until_full: bool = False
    tile: int = 0
    limit: int = 0

    def case(self, batch: int, device: str, limit: int) -> dict[str, Any]:
        """The arguments of one measurement.

        Args:
            batch: Rows.
            device: Such as `cuda`.
            limit: Bytes of memory that may be used, 0 for all.
        """
        fields = asdict(self)
        del fields["batches"], fields["until_full"]
        if not self.tile:
            del fields["tile"]  # so that earlier results keep their keys
        removed = {"removed": KVPRESS_RATIO} if self.method == "kvpress" else {}
        return {**fields, "batch": batch, "device": device, "limit": self.limit or limit, **removed}

    @property
    def side(self) -> str:
        """Method, policy and mode, separated by spaces."""
        return " ".join(part for part in (self.method, self.policy, self.mode) if part)

    def at(self, batches: Sequence[int]) -> Series:
        """The series at these batch sizes alone."""
        return replace(self, batches=tuple(batches), until_full=False) if batches else self

    def batch_sizes(self) -> Iterator[int]:
        """The given batch sizes, then growing ones if the series runs until memory is full."""
        yield from self.batches
        batch = self.batches[-1]
        while self.until_full and batch < MAX_BATCH:
            batch = max(batch + 1, batch * 3 // 2)
            yield batch


def table3(shape: str, prompt: int, new: int, batches: tuple[int, ...]) -> Iterator[Series]:
    """SqueezeAttention's Table 3: the full cache against squeeze over a window, at a fifth of all tokens."""
    fifth = (prompt + new) // 5
    methods = [
        ("dynamic", "eager", ""),
        ("static", "eager", ""),
        ("static", "graphs", ""),
        *(("policy", mode, f"squeeze+window@{fifth}") for mode in ("eager", "graphs")),
        *(("policy", mode, f"squeeze:profile=PROFILE+window@{fifth}") for mode in ("eager", "graphs")),
        ("kvpress", "eager", "StreamingLLMPress"),
    ]
    for method, mode, policy in methods:
        yield Series("table3", shape, prompt, new, method, mode, policy, batches, True)


def long(shape: str, prompts: tuple[int, ...], new: int) -> Iterator[Series]:
    """Long prompts: the stock caches, the selectors, KVCrush over its base, and codecs."""
    policies = [
        "snapkv@0.2",
        "kvcrush/snapkv@0.2",
        "squeeze:profile=PROFILE+window@0.2",
        "tokenwise:bits=4",
        "snapkv+tokenwise:bits=4@0.2",
        "kivi:bits=4",
        "snapkv+kivi:bits=4@0.2",
        "csr",
        "snapkv+csr@0.2",
    ]
    for prompt in prompts:
        methods = [("dynamic", "eager", ""), ("static", "graphs", ""), ("kvpress", "eager", "SnapKVPress")]
        methods += [("policy", mode, policy) for policy in policies for mode in ("eager", "graphs")]
        for method, mode, policy in methods:
            until_full = not any(codec in policy for codec in ("kivi", "csr", "tokenwise"))
            yield Series(f"long {prompt}", shape, prompt, new, method, mode, policy, LONG_BATCHES, until_full)


def small_card(shape: str, prompt: int, new: int, tile: int, limit: int) -> Iterator[Series]:
    """The recipe for one small card: what fits, and the measured peak over the planned one."""
    yield Series("small card", shape, prompt, new, "dynamic", "eager", limit=limit)
    for policy in ("snapkv+tokenwise@0.2", "tokenwise"):
        yield Series("small card", shape, prompt, new, "policy", "eager", policy, tile=tile, limit=limit)


def plan_suites(shape: str) -> list[Series]:
    """All series of the real shapes, of one of them, or of the tiny shape."""
    if shape == "tiny":
        return [
            *table3("tiny", 32, 16, (1, 4)),
            *long("tiny", (64,), 24),
            *small_card("tiny", 512, 16, 128, 1 << 30),
        ]
    series = [
        *small_card("llama-3-8b", 127_000, 32, 4096, SMALL_CARD),
        *table3("mistral-7b", 512, 1024, PAPER_BATCHES),
        *long("llama-3-8b", (8192, 32768, 131072), 128),
    ]
    return [one for one in series if shape in ("all", one.shape)]
