"""Write calibration texts for the embedded model: fresh samples of its training distribution, nothing held out.

python -m kvpolicy_eval.train.calibration_text TEXTS
kvpolicy calibrate csr --model tiny-4k --text TEXTS --out kvpolicy/assets/tiny-4k/csr --atoms 512 \
    --key-spaces unrotated,rotated --value-chunks 1,2,4
kvpolicy calibrate kvquant --model tiny --text TEXTS --out kvpolicy/assets/kvquant --windows 128
kvpolicy calibrate lowrank --model tiny --text TEXTS --out kvpolicy/assets/lowrank --windows 128 --fisher
kvpolicy calibrate oscar --model tiny --text TEXTS --out kvpolicy/assets/oscar --windows 16 --length 1024
kvpolicy calibrate heads --model tiny --text TEXTS --out kvpolicy/assets/heads/tiny.json --windows 128 \
    --sinks 4 --recent 28
kvpolicy calibrate qfilters --model tiny --text TEXTS --out kvpolicy/assets/qfilters/tiny.safetensors --length 1024 \
    --windows 128
kvpolicy calibrate triattention --model tiny --text TEXTS --out kvpolicy/assets/triattention/tiny.safetensors \
    --length 1024 --windows 128
kvpolicy calibrate gate --model tiny --text TEXTS --out kvpolicy/assets/kvzap/tiny.safetensors --windows 128

Those of CSR for `tiny` are older: they were trained with Adam for 20 epochs, by an earlier version of the command.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

import kvpolicy
from kvpolicy_eval.train.phases import PHASES
from kvpolicy_eval.train.tokens import Sampler, Vocabulary, encode_text
from kvpolicy_lm_eval.data.text import training_texts

SEED = 7_000_007
"""Different from the seeds of the training (0) and of the evaluation's prompts."""

LENGTH = 1020
"""Tokens of a text, so that one text fits into a window of 1,024."""


def write_texts(folder: Path, count: int) -> None:
    """Write `count` texts of one task each, in the proportions of the last training phase."""
    tokenizer = kvpolicy.tiny()[1]
    vocabulary = Vocabulary(tokenizer)
    rng = np.random.default_rng(SEED)
    sampler = Sampler(vocabulary, encode_text(tokenizer, training_texts(), vocabulary.eos), rng)
    tasks = PHASES[-1].tasks
    digits = PHASES[-1].digits
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        task = str(rng.choice(list(tasks), p=list(tasks.values())))
        row = sampler.row(task, LENGTH, int(rng.choice(list(digits), p=list(digits.values()))))
        text = tokenizer.decode([token for token in row.ids if token not in (vocabulary.bos, vocabulary.eos)])
        (folder / f"{number:03}-{task}.txt").write_text(text, encoding="utf-8", newline="\n")


def main() -> None:
    """Read the command line and write the texts."""
    parser = argparse.ArgumentParser(prog="python -m kvpolicy_eval.train.calibration_text")
    parser.add_argument("folder", type=Path, help="output folder")
    parser.add_argument("--count", type=int, default=128, help="number of texts")
    args = parser.parse_args()
    if args.folder.exists() and (not args.folder.is_dir() or any(args.folder.iterdir())):
        parser.error(f"folder must be absent or empty, got {args.folder}; try another one.")
    write_texts(args.folder, args.count)


if __name__ == "__main__":
    main()
