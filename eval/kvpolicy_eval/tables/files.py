"""Cache files by form: their bytes, and what a loaded cache predicts.

The prompts are held-out text. KVTC is calibrated on fresh text of the training distribution, as what ships with the
package is. The cache that is saved and the one that is loaded go on with the same tokens.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from torch import Tensor

import kvpolicy
from kvpolicy.calibration import calibrate_kvtc, read_texts, token_windows
from kvpolicy.hf.cache_names import cache_argument
from kvpolicy_eval.common.table import Grid, Option, Section, Table, only
from kvpolicy_eval.train.calibration_text import write_texts
from kvpolicy_lm_eval.data.text import held_out

SAME = "full"
"""The policy under which all layers hold the same tokens, so that they may have components together."""
POLICIES = [SAME, "snapkv@0.5", "uniform/adakv+kvzip@0.2", "uniform/adakv+kvzip+tokenwise:bits=4@0.2"]
RATIOS = (4, 16)
PROMPT = 960
"""Tokens of a prompt."""
FOLLOWING = 64
"""Tokens that are fed to the cache behind its file."""
TEXTS = 64
"""Texts of the calibration, of about 1,020 tokens each."""


class Measured(NamedTuple):
    """One form of files, over several prompts.

    Attributes:
        nbytes: Bytes of a file.
        divergence: Mean divergence of the predictions from those of the saved cache, in nats.
        same: Share of the tokens for which both predict the same one first.
    """

    nbytes: float
    divergence: float
    same: float


def calibrations(model: Any, tokenizer: Any, folder: Path) -> dict[int, Path]:
    """Calibrations of KVTC by the number of layers that have components together: 1 or all."""
    write_texts(folder / "texts", TEXTS)
    windows = token_windows(tokenizer, read_texts([folder / "texts"]), 1024, TEXTS, 0)
    found = {count: folder / f"layers{count}" for count in (1, model.config.num_hidden_layers)}
    for count, out in found.items():
        calibrate_kvtc(model, windows, out, ratios=RATIOS, layers=count)
    return found


def forms(found: dict[int, Path], policy: str) -> dict[str, str | None]:
    """What is measured under a policy, by its name in the table.

    >>> [*forms({1: Path("one"), 8: Path("all")}, "full")]
    ['none', 'zlib', 'kvtc, ratio=4', 'kvtc, ratio=16', 'kvtc of 8 layers, ratio=4', 'kvtc of 8 layers, ratio=16']
    """
    named: dict[str, str | None] = {"none": None, "zlib": "zlib"}
    for count, folder in found.items():
        if count > 1 and policy != SAME:
            continue
        for ratio in RATIOS:
            name = "kvtc" if count == 1 else f"kvtc of {count} layers"
            named[f"{name}, ratio={ratio}"] = f"kvtc:calibration={folder}:ratio={ratio}"
    return named


@torch.no_grad()
def predicted(model: Any, cache: kvpolicy.PolicyCache, ids: Tensor) -> Tensor:
    """Logarithms of the probabilities of what follows each token, [1, n, V]."""
    return model(ids, **cache_argument(model, cache)).logits.float().log_softmax(-1)


def measured(model: Any, rows: Sequence[Tensor], policy: str, wanted: dict[str, str | None]) -> dict[str, Measured]:
    """Every form under one policy, over prompts [1, PROMPT + FOLLOWING]."""
    sums = {name: [0.0, 0.0, 0.0] for name in wanted}
    with TemporaryDirectory() as folder, kvpolicy.attach(model, policy):
        path = Path(folder) / "cache.safetensors"
        for row in rows:
            cache = kvpolicy.PolicyCache(model)
            predicted(model, cache, row[:, :PROMPT])
            exact = predicted(model, cache.fork(), row[:, PROMPT:])
            for name, form in wanted.items():
                cache.save(path, compress=form)
                own = predicted(model, kvpolicy.PolicyCache.load(model, path), row[:, PROMPT:])
                sums[name][0] += path.stat().st_size
                sums[name][1] += float((exact.exp() * (exact - own)).sum(-1).mean())
                sums[name][2] += float((exact.argmax(-1) == own.argmax(-1)).float().mean())
    return {name: Measured(*(total / len(rows) for total in totals)) for name, totals in sums.items()}


def measure(args: argparse.Namespace) -> Iterator[Section]:
    """The table."""
    model, tokenizer = kvpolicy.tiny()
    ids: Tensor = tokenizer(held_out(), return_tensors="pt").input_ids[0]
    rows = [row[None] for row in ids[: args.prompts * (PROMPT + FOLLOWING)].view(args.prompts, -1)]
    full = kvpolicy.plan(model.config, "full", prompt=PROMPT, dtype=model.dtype).full_nbytes
    lines: list[list[str]] = []
    with TemporaryDirectory() as folder:
        calibrated = calibrations(model, tokenizer, Path(folder))
        for policy in args.only:
            for name, found in measured(model, rows, policy, forms(calibrated, policy)).items():
                numbers = f"{found.nbytes / full:.3f}", f"{found.divergence:.4f}", f"{found.same:.3f}"
                lines.append([f"`{policy}`", name, *numbers])
    note = (
        f"Means over {args.prompts} prompts of {PROMPT} tokens of held-out text; file: bytes relative to the full "
        f"cache in {str(model.dtype).removeprefix('torch.')}; divergence in nats, and share of the same first choices, "
        f"of {FOLLOWING} tokens that go on behind the file, beside the cache that was saved."
    )
    yield Section("files", [Grid(["policy", "form", "file", "divergence", "same choice"], lines)], note)


TABLE = Table(
    measure=measure,
    places={"files": ["docs/guide/files.md"]},
    options=[only("POLICY", POLICIES), Option("--prompts", type=int, default=4, help="prompts; 4 by default")],
    needs="the embedded model",
)
