"""Time of encode, score and mix for every codec, and over dense tensors.

One layer with random keys and values. A score is one query of every head against every token, a mix one weighted sum
of all values. Ratios are to dense fp32 and to dense bf16, measured alternately in the same process.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from kvpolicy import Policy
from kvpolicy.distortion import coded_store
from kvpolicy.engine.columns import CodedColumns
from kvpolicy.engine.layer_store import LayerStore
from kvpolicy.kernels.rotary import Rope
from kvpolicy.protocols import Codec
from kvpolicy_eval.bench.timing import compare
from kvpolicy_eval.common.codecs import CODECS, with_ranking
from kvpolicy_eval.common.synthetic import with_random_calibration
from kvpolicy_eval.common.table import Grid, Option, Section, Table, collect, rounds, threads, torch_note

HEADS = 2
"""KV heads."""
GROUP = 4
"""Query heads per KV head."""
DIM = 128
LENGTHS = (4096, 32768)
COLUMNS = [
    "codec",
    "tokens",
    "encode, ms",
    "score, ms",
    "over fp32",
    "over bf16",
    "mix, ms",
    "over fp32",
    "over bf16",
]


class Case:
    """One codec on one layer of random tokens.

    Args:
        codec: Spec of the codec.
        tokens: Number of tokens.
        folder: Folder for random calibrated tensors.
        device: Device of the tensors.
        group: Query heads of each KV head.
        batch: Rows.
        heads: KV heads.
    """

    def __init__(
        self,
        codec: str,
        tokens: int,
        folder: Path,
        device: str = "cpu",
        group: int = GROUP,
        batch: int = 1,
        heads: int = HEADS,
    ) -> None:
        """Encode the tokens."""
        generator = torch.Generator(device).manual_seed(0)

        def draw(count: int) -> Tensor:
            return torch.randn(batch, heads, count, DIM, generator=generator, device=device)

        self.codec: Codec = with_random_calibration(Policy.parse(with_ranking(codec)).codec, folder, heads, DIM)
        self.keys = draw(tokens)
        self.values = draw(tokens)
        self.query = draw(group)
        self.rope = _rope(device)
        self.layer = self.encode()
        coded = None if self.layer.slots is None else self.layer.slots.codes.view()
        assert coded is not None, f"{codec} encodes none of {tokens} tokens"
        self.coded: CodedColumns = coded
        self.weights = [part.contiguous() for part in self._weights().split([columns.size for columns in coded], -1)]

    def _weights(self) -> Tensor:
        """Random attention weights over the encoded tokens."""
        generator = torch.Generator(self.query.device).manual_seed(1)
        shape = (*self.query.shape[:3], sum(columns.size for columns in self.coded))
        return torch.softmax(torch.randn(shape, generator=generator, device=self.query.device), -1)

    def encode(self) -> LayerStore:
        """Encode all tokens."""
        return coded_store(self.codec, self.keys, self.values, queries=self.query[:, :, :1], rope=self.rope)

    def score(self) -> list[Tensor]:
        """Scores of all encoded tokens."""
        return [columns.score(self.query) for columns in self.coded]

    def mix(self) -> list[Tensor]:
        """Weighted sum of all encoded tokens."""
        return [columns.mix(own) for columns, own in zip(self.coded, self.weights, strict=True)]


def _rope(device: str) -> Rope:
    config = LlamaConfig(
        hidden_size=GROUP * HEADS * DIM, num_attention_heads=GROUP * HEADS, max_position_embeddings=131072
    )
    return Rope(LlamaRotaryEmbedding(config).to(device), apply_rotary_pos_emb, None)


class Dense:
    """The same products with dense keys and values.

    Args:
        case: The case with the same tokens.
        dtype: Of the dense tensors.
    """

    def __init__(self, case: Case, dtype: torch.dtype) -> None:
        """Convert keys and values, which is not timed."""
        self.query = case.query
        self.keys = case.keys.to(dtype)
        self.values = case.values.to(dtype)
        self.weights = case.weights
        self.dtype = dtype

    def score(self) -> Tensor:
        """Scores of all tokens."""
        return self.query.to(self.dtype) @ self.keys.transpose(-1, -2)

    def mix(self) -> Tensor:
        """Weighted sum of the tokens that the codec encodes."""
        weights = torch.cat(self.weights, -1).to(self.dtype)
        return weights @ self.values[:, :, : weights.shape[-1]]


def line(codec: str, tokens: int, rounds: int, compiled: bool, group: int) -> list[str]:
    """The row of one codec: time to encode all tokens, then score and mix."""
    with TemporaryDirectory() as folder, torch.inference_mode():
        case = Case(codec, tokens, Path(folder), group=group)
        dense = [Dense(case, dtype) for dtype in (torch.float32, torch.bfloat16)]
        encode_s = compare(lambda: None, case.encode, rounds).ours
        row = [f"`{codec}`", f"{tokens:,}", f"{1000 * encode_s:.0f}"]
        for name in ("score", "mix"):
            run: Any = torch.compile(getattr(case, name)) if compiled else getattr(case, name)
            ratios = [compare(getattr(base, name), run, rounds) for base in dense]
            row += [f"{1000 * ratios[-1].ours:.1f}", *(f"{ratio.median:.1f}" for ratio in ratios)]
    return row


def measure(args: argparse.Namespace) -> Iterator[Section]:
    """The table."""
    rows = collect(
        line(codec, tokens, args.rounds, args.compile, args.group) for tokens in args.lengths for codec in args.codecs
    )
    mode = "compiled" if args.compile else "eager"
    note = f"{HEADS} KV heads x {args.group} query heads of {DIM}, {mode}, {torch_note()}."
    yield Section("speed", [Grid(COLUMNS, rows)], note)


TABLE = Table(
    measure=measure,
    places={"speed": ["docs/guide/codecs.md"]},
    options=[
        Option("--codecs", nargs="+", default=[name for name in CODECS if name != "plain"], help="specs of codecs"),
        Option("--lengths", nargs="+", type=int, default=LENGTHS, help="numbers of tokens in the cache"),
        rounds(5),
        Option("--group", type=int, default=GROUP, help="query heads of each KV head"),
        Option("--compile", action="store_true", help="apply torch.compile to score and mix"),
        threads(),
    ],
)
