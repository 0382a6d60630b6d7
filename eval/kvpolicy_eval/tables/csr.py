"""CSR on the embedded model, other codecs, and the ablations of its paper.

Every token is kept, and all but a short full-precision buffer is encoded. Columns: bits per element of encoded tokens
and of the whole cache, error of keys and values on held-out text, accuracy, perplexity. The table `trained` first
trains other dictionaries: of other sizes, and without the diversity term.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

import kvpolicy
from kvpolicy import Policy
from kvpolicy.calibration import Dictionaries, Training, calibrate_csr, read_texts, token_windows
from kvpolicy_eval.common.accuracy import TaskEvaluator, mean
from kvpolicy_eval.common.codecs import short_windows, with_ranking
from kvpolicy_eval.common.heldout import HeldOutText
from kvpolicy_eval.common.table import Grid, Option, Section, Table, collect, parts, prompts
from kvpolicy_eval.train.calibration_text import write_texts

PROMPT = 512
"""Tokens of the prompt that bits are computed for."""

NONZEROS = [16, 8, 6, 4]
"""Nonzero coefficients per vector, the `nnz` of CSR, that the first table compares."""
CSR_SPECS = [f"csr:nnz={nnz}:key_space={space}" for nnz in NONZEROS for space in ("unrotated", "rotated")] + [
    "csr:nnz=2"
]
PACKED_SPECS = ["csr:coef=fp8:index=packed", "csr:nnz=4:coef=fp8:index=packed", "csr:nnz=4:solver=omp"]
OTHER_SPECS = ["kivi:bits=4", "kivi:bits=2", "tokenwise:bits=3", "turboquant:bits=2", "gear", "kvquant:bits=2"]
CHUNK_SPECS = [f"csr:nnz=8:value_chunks={value_chunks}" for value_chunks in (1, 2, 4)]
PROMPT_ATOMS = [0, 32, 64]
"""Tokens of the prompt that are used as atoms, the `prompt_atoms` of CSR."""
DICTIONARY_SIZES = [128, 256, 512, 1024]
WINDOWS = 128
"""Windows of 1,024 tokens that dictionaries are trained on: those of the shipped one."""
COLUMNS = ["policy", "bits, coded", "bits, all", "error K", "error V", "recall", "all tasks", "perplexity"]


class Measurements:
    """The embedded model in bf16, with its tasks and its held-out text.

    Args:
        docs: Prompts per task.
    """

    def __init__(self, docs: int) -> None:
        """Load the model."""
        self.evaluator = TaskEvaluator(docs, PROMPT, torch.bfloat16)
        self.text = HeldOutText(self.evaluator.model, self.evaluator.tokenizer)

    def line(self, policy: str) -> list[str]:
        """The row of a policy that keeps every token."""
        config = self.evaluator.model.config
        plan = kvpolicy.plan(config, policy, prompt=PROMPT, dtype=torch.bfloat16)
        elements = 2 * config.num_key_value_heads * config.head_dim * len(plan.layers)  # of one token
        by_kind = plan.by_kind()
        encoded = sum(plan.layers[0].layout.coded) * elements
        accuracy, _ = self.evaluator.accuracy(policy)
        return [
            f"`{policy}`",
            f"{8 * (by_kind['codes'] + by_kind['scales']) / encoded:.2f}" if encoded else "16",
            f"{8 * plan.nbytes / (PROMPT * elements):.2f}",
            *("" if math.isnan(error) else f"{error:.3f}" for error in self.text.errors(policy)),
            f"{accuracy['recall']:.2f}",
            f"{mean(accuracy):.2f}",
            f"{self.text.perplexity(policy):.2f}",
        ]


def _csr_8(**options: Any) -> str:
    """The spec of CSR with 8 coefficients, short full-precision buffers and other options."""
    part: Any = Policy.parse(short_windows("csr:nnz=8")).codec
    return str(Policy(codec=dataclasses.replace(part, **options)))


def train(folder: Path, atoms: int, diversity: float) -> str:
    """Train a dictionary on texts of the embedded model's tasks.

    Args:
        folder: Its subfolder for this dictionary is written.
        atoms: Size of the dictionary.
        diversity: Weight of the diversity term.

    Returns:
        The folder of the dictionary.
    """
    out = folder / f"{atoms}-{diversity}"
    model, tokenizer = kvpolicy.tiny()
    with TemporaryDirectory() as texts:
        write_texts(Path(texts), 128)
        windows = token_windows(tokenizer, read_texts([texts]), 1024, WINDOWS, 0)
        options = Dictionaries(atoms=atoms, training=Training(diverse=diversity))
        calibrate_csr(model, windows, out, options, name="tiny")
    return str(out)


def compare_codecs(measurements: Measurements, _: Path) -> Iterator[list[str]]:
    """CSR of every size on rotated and unrotated keys, and other codecs."""
    codecs = [with_ranking(short_windows(codec)) for codec in [*CSR_SPECS, *PACKED_SPECS, *OTHER_SPECS]]
    yield from map(measurements.line, ["full", *codecs])


def compare_parts(measurements: Measurements, _: Path) -> Iterator[list[str]]:
    """Chunks of a value, and atoms from the prompt."""
    yield from map(measurements.line, map(short_windows, CHUNK_SPECS))
    yield from (measurements.line(_csr_8(prompt_atoms=tokens)) for tokens in PROMPT_ATOMS)


def compare_dictionaries(measurements: Measurements, folder: Path) -> Iterator[list[str]]:
    """Sizes of the dictionary, and one size without the diversity term."""
    for atoms, diversity in [*((atoms, 0.1) for atoms in DICTIONARY_SIZES), (512, 0.0)]:
        policy = _csr_8(dictionary=train(folder, atoms, diversity))
        yield [f"{atoms} atoms, diversity {diversity:g}", *measurements.line(policy)[1:]]


PARTS = {"csr": compare_codecs, "parts": compare_parts, "trained": compare_dictionaries}


def measure(args: argparse.Namespace) -> Iterator[Section]:
    """A table for each part."""
    measurements = Measurements(args.n)
    note = f"{args.n} prompts of about 512 tokens a task; bits of 512 tokens, bf16; every token kept."
    for name in args.parts or PARTS:
        yield Section(name, [Grid(COLUMNS, collect(PARTS[name](measurements, args.folder)))], note)


TABLE = Table(
    measure=measure,
    places={name: ["docs/methods/csr.md"] for name in PARTS},
    options=[
        parts(list(PARTS)),
        prompts(4),
        Option("--folder", type=Path, default=Path("csr-dictionaries"), help="output folder of trained dictionaries"),
    ],
    needs="the embedded model",
)
