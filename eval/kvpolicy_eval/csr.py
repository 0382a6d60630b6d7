"""`python -m kvpolicy_eval.csr`: CSR on the embedded model beside other codecs, and its paper's ablations.

Every token is kept; all but a short exact window is coded. Printed for each: bits per number of coded tokens and of the
whole cache, error of keys and values on held-out text, right answers, perplexity. The table `trained` trains other
dictionaries first, of other sizes and without the diversity term.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

import kvpolicy
from kvpolicy import Policy
from kvpolicy.calibration import Dictionaries, Training, calibrate_csr, read_texts, token_windows
from kvpolicy_eval.calibration_text import write
from kvpolicy_eval.codecs import short_windows, with_ranking
from kvpolicy_eval.distortion import Pages
from kvpolicy_eval.markdown import fill, table
from kvpolicy_eval.table import Examiner

PAIRS = [16, 8, 6, 4]
MAIN = [f"csr:nnz={n}:key_space={space}" for n in PAIRS for space in ("unrotated", "rotated")] + ["csr:nnz=2"]
SMALL = ["csr:coef=fp8:index=packed", "csr:nnz=4:coef=fp8:index=packed", "csr:nnz=4:solver=omp"]
OTHERS = ["kivi:bits=4", "kivi:bits=2", "tokenwise:bits=3", "turboquant:bits=2", "gear", "kvquant:bits=2"]
CHUNKS = [f"csr:nnz=8:value_chunks={chunks}" for chunks in (1, 2, 4)]
PROMPT_ATOMS = [0, 32, 64]
SIZES = [128, 256, 512, 1024]
HEAD = ["policy", "bits, coded", "bits, all", "error K", "error V", "recall", "all tasks", "perplexity"]


class Judge:
    """The embedded model in bf16, its questions and its text.

    Args:
        docs: Prompts per task.
    """

    def __init__(self, docs: int) -> None:
        """Load the model."""
        self.examiner = Examiner(docs, 512, torch.bfloat16)
        self.pages = Pages(self.examiner.model, self.examiner.tokenizer)

    def line(self, policy: str) -> list[str]:
        """What one policy that keeps every token costs, loses and answers."""
        config = self.examiner.model.config
        plan = kvpolicy.plan(config, policy, prompt=512, dtype=torch.bfloat16)
        numbers = 2 * config.num_key_value_heads * config.head_dim * len(plan.layers)
        kinds, coded = plan.by_kind(), sum(plan.layers[0].layout.coded)
        alone = f"{8 * (kinds['codes'] + kinds['scales']) / (coded * numbers):.2f}" if coded else "16"
        marks, _ = self.examiner.marks(policy)
        errors = ["" if math.isnan(error) else f"{error:.3f}" for error in self.pages.errors(policy)]
        cells = [
            f"`{policy}`", alone, f"{8 * plan.nbytes / (512 * numbers):.2f}", *errors,
            f"{marks['recall']:.2f}", f"{sum(marks.values()) / len(marks):.2f}", f"{self.pages.perplexity(policy):.2f}",
        ]  # fmt: skip
        print("  ".join(cells), file=sys.stderr, flush=True)
        return cells


def prompt_atoms(tokens: int) -> str:
    """CSR-8 with so many of the prompt's newest tokens as atoms."""
    part = Policy.parse(short_windows("csr:nnz=8")).codec
    return str(Policy(codec=dataclasses.replace(part, prompt_atoms=tokens)))  # pyright: ignore[reportArgumentType, reportCallIssue]


def train(folder: Path, atoms: int, diverse: float) -> str:
    """A dictionary of another size or with another weight of the diversity term; the folder that it is in."""
    place = folder / f"{atoms}-{diverse}"
    model, tokenizer = kvpolicy.tiny()
    with TemporaryDirectory() as texts:
        write(Path(texts), 128)
        windows = token_windows(tokenizer, read_texts([texts]), 1024, 128, 0)
        options = Dictionaries(atoms=atoms, tokens=4096, training=Training(diverse=diverse, epochs=10))
        calibrate_csr(model, windows, place, options, name="tiny")
    return str(place)


def main_lines(judge: Judge, _: Path) -> list[list[str]]:
    """CSR of every size in both frames, and other codecs."""
    codecs = [with_ranking(short_windows(codec)) for codec in [*MAIN, *SMALL, *OTHERS]]
    return [judge.line(policy) for policy in ["full", *codecs]]


def part_lines(judge: Judge, _: Path) -> list[list[str]]:
    """Chunks of a value, and prompt atoms."""
    policies = [short_windows(codec) for codec in CHUNKS] + [prompt_atoms(tokens) for tokens in PROMPT_ATOMS]
    return [judge.line(policy) for policy in policies]


def trained_lines(judge: Judge, folder: Path) -> list[list[str]]:
    """Sizes of the dictionary, and one size without the diversity term."""
    lines: list[list[str]] = []
    for atoms, diverse in [*((atoms, 0.1) for atoms in SIZES), (512, 0.0)]:
        part = Policy.parse(short_windows("csr:nnz=8")).codec
        place = train(folder, atoms, diverse)
        policy = str(Policy(codec=dataclasses.replace(part, dictionary=place)))  # pyright: ignore[reportArgumentType, reportCallIssue]
        lines.append([f"{atoms} atoms, diversity {diverse:g}", *judge.line(policy)[1:]])
    return lines


TABLES = {"csr": main_lines, "parts": part_lines, "trained": trained_lines}


def main() -> None:
    """Print the tables, and fill a page with them where asked."""
    parser = argparse.ArgumentParser(prog="python -m kvpolicy_eval.csr", description=__doc__)
    parser.add_argument("tables", nargs="*", default=list(TABLES), help="csr, parts, trained; all by default")
    parser.add_argument("--n", type=int, default=4, help="prompts per task")
    parser.add_argument("--folder", type=Path, default=Path("csr-dictionaries"), help="for other dictionaries")
    parser.add_argument("--fill", type=Path, help="a page with places for the tables")
    args = parser.parse_args()
    judge = Judge(args.n)
    for name in args.tables:
        text = table(HEAD, TABLES[name](judge, args.folder))
        text += f"\n\n{args.n} prompts of about 512 tokens a task; bits of 512 tokens, bf16; every token kept."
        print(text, flush=True)
        if args.fill:
            fill(args.fill, name, text)


if __name__ == "__main__":
    main()
