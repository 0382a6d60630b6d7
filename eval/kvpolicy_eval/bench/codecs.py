"""`python -m kvpolicy_eval.bench.codecs`: encode, score and mix of every codec beside dense keys and values.

One layer, random keys and values; a score is one query of every head against every token, a mix one weighted sum of
every value. Ratios are to dense fp32 and to dense bf16 in the same process, in turn.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from kvpolicy import Policy
from kvpolicy.distortion import coded_layer
from kvpolicy.engine.codec_view import Coded
from kvpolicy.engine.rotary import Rope
from kvpolicy.hf.layer import PolicyLayer
from kvpolicy.protocols import Codec
from kvpolicy_eval.bench.common import compare
from kvpolicy_eval.codecs import CODECS, with_ranking
from kvpolicy_eval.markdown import fill, table
from kvpolicy_eval.standins import stand_in

HEADS, GROUP, DIM = 2, 4, 128
LENGTHS = (4096, 32768)
HEAD = [
    "codec", "tokens", "encode, ms", "score, ms", "over fp32", "over bf16", "mix, ms", "over fp32", "over bf16",
]  # fmt: skip


class Case:
    """One codec over one layer of random tokens.

    Args:
        codec: Words of a codec.
        tokens: How many tokens there are.
        folder: Where calibrations of random numbers may be written.
        device: Where.
    """

    def __init__(self, codec: str, tokens: int, folder: Path, device: str = "cpu") -> None:
        """Code the tokens."""
        generator = torch.Generator().manual_seed(0)
        self.codec: Codec = stand_in(Policy.parse(with_ranking(codec)).codec, folder, HEADS, DIM)
        self.keys, self.values = (torch.randn(1, HEADS, tokens, DIM, generator=generator).to(device) for _ in range(2))
        self.query = torch.randn(1, HEADS, GROUP, DIM, generator=generator).to(device)
        self.rope = _rope()
        self.layer = self.encode()
        coded = self.layer.coded()
        assert coded is not None, f"{codec} codes nothing of {tokens} tokens"
        self.coded: Coded = coded
        self.shares = [share.contiguous() for share in self._share().split(coded.sizes, -1)]

    def _share(self) -> Tensor:
        size = sum(self.coded.sizes)
        return torch.softmax(torch.randn(1, HEADS, GROUP, size, generator=torch.Generator().manual_seed(1)), -1).to(
            self.keys
        )

    def encode(self) -> PolicyLayer:
        """Code every token."""
        return coded_layer(self.codec, self.keys, self.values, queries=self.query[:, :, :1], rope=self.rope)

    def score(self) -> list[Tensor]:
        """Score every coded token."""
        return self.coded.score(self.query)

    def mix(self) -> list[Tensor]:
        """Mix every coded token."""
        return self.coded.mix(self.shares)


def _rope() -> Rope:
    config = LlamaConfig(
        hidden_size=GROUP * HEADS * DIM, num_attention_heads=GROUP * HEADS, max_position_embeddings=65536
    )
    return Rope(LlamaRotaryEmbedding(config), apply_rotary_pos_emb, None)


def measure(codec: str, tokens: int, rounds: int, compiled: bool) -> list[str]:
    """A line of one codec: encode (of all tokens), then score and mix."""
    with TemporaryDirectory() as folder, torch.inference_mode():
        case = Case(codec, tokens, Path(folder))
        coding = compare(lambda: None, case.encode, rounds).ours
        line = [f"`{codec}`", f"{tokens:,}", f"{1000 * coding:.0f}"]
        for what in ("score", "mix"):
            run: Any = torch.compile(getattr(case, what)) if compiled else getattr(case, what)
            cells: list[str] = []
            for dtype in (torch.float32, torch.bfloat16):
                ratio = compare(lambda what=what, dtype=dtype: _dense(case, what, dtype), run, rounds)
                cells += [f"{ratio.median:.1f}"]
            line += [f"{1000 * ratio.ours:.1f}", *cells]
    return line


_copies: dict[tuple[int, torch.dtype], tuple[Tensor, Tensor]] = {}


def _dense(case: Case, what: str, dtype: torch.dtype) -> Tensor:
    """The same products with dense keys or values."""
    keys, values = _copies.setdefault((id(case), dtype), (case.keys.to(dtype), case.values.to(dtype)))
    if what == "score":
        return case.query.to(dtype) @ keys.transpose(-1, -2)
    share = torch.cat(case.shares, -1).to(dtype)
    return share @ values[:, :, : share.shape[-1]]


def main() -> None:
    """Measure, print, and fill a page's table where asked."""
    parser = argparse.ArgumentParser(prog="python -m kvpolicy_eval.bench.codecs", description=__doc__)
    parser.add_argument("--codecs", nargs="*", default=[name for name in CODECS if name != "plain"])
    parser.add_argument("--lengths", nargs="*", type=int, default=LENGTHS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--compile", action="store_true", help="torch.compile score and mix")
    parser.add_argument("--threads", type=int, default=0, help="threads of torch; its own choice by default")
    parser.add_argument("--fill", type=Path, help="a page with a place for the table 'speed'")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    lines: list[list[str]] = []
    for tokens in args.lengths:
        for codec in args.codecs:
            lines.append(measure(codec, tokens, args.rounds, args.compile))
            print(" | ".join(lines[-1]), flush=True)
            _copies.clear()
    how = "compiled" if args.compile else "eager"
    text = table(HEAD, lines)
    text += f"\n\n{HEADS} KV heads x {GROUP} query heads of {DIM}, {how}, torch {torch.__version__}, CPU, "
    text += f"{torch.get_num_threads()} thread(s)."
    print("\n" + text)
    if args.fill:
        fill(args.fill, "speed", text)


if __name__ == "__main__":
    main()
