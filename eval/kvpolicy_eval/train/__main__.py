"""Train the embedded model, or continue it to 4,096 tokens.

python -m kvpolicy_eval.train --out DIR [--resume]
python -m kvpolicy_eval.train --long --out DIR [--resume]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast

import kvpolicy
from kvpolicy_eval.train.export import LONG_POSITIONS, MAX_POSITIONS, export
from kvpolicy_eval.train.loop import LONG_RATE, PEAK_RATE, Trainer, show
from kvpolicy_eval.train.phases import LONG_PHASES, PHASES, scaled
from kvpolicy_eval.train.tokenizer import build_tokenizer, token_id
from kvpolicy_eval.train.tokens import encode_text
from kvpolicy_lm_eval.data.text import training_texts

EMBEDDED = Path(kvpolicy.__file__).parent / "assets" / "tiny"


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m kvpolicy_eval.train", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument(
        "--out", type=Path, required=True, help="folder of the model; checkpoints are in OUT/checkpoint"
    )
    parser.add_argument("--long", action="store_true", help="continue the embedded model to 4,096 tokens")
    parser.add_argument("--fp32", action="store_true", help="no bfloat16: faster on a CPU without instructions for it")
    parser.add_argument("--resume", action="store_true", help="continue from OUT/checkpoint")
    parser.add_argument("--seed", type=int, default=0, help="seed of the initialization and of the data")
    parser.add_argument("--share", type=float, default=1.0, help="fraction of every phase to train, for a trial run")
    parser.add_argument(
        "--save-every", type=int, default=200, help="steps between checkpoints, each of which is exported too"
    )
    parser.add_argument("--max-steps", type=int, default=None, help="stop after this many steps; resume later")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Train, log to OUT/log.jsonl and export to OUT."""
    args = _arguments(argv)
    if not args.resume and args.out.exists() and (not args.out.is_dir() or any(args.out.iterdir())):
        raise SystemExit(f"--out must be absent or an empty folder, got {args.out}; try another, or --resume.")
    torch.set_num_threads(1)
    texts = training_texts()
    checkpoint = args.out / "checkpoint"
    if args.resume or args.long:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(args.out if args.resume else EMBEDDED)
    else:
        tokenizer = build_tokenizer(texts)
    positions = LONG_POSITIONS if args.long else MAX_POSITIONS
    tokenizer.model_max_length = positions
    trainer = Trainer(
        tokenizer,
        encode_text(tokenizer, texts, token_id(tokenizer, "</s>")),
        scaled(LONG_PHASES if args.long else PHASES, args.share),
        seed=args.seed,
        start=EMBEDDED if args.long else None,
        peak_rate=LONG_RATE if args.long else PEAK_RATE,
        autocast=not args.fp32,
    )
    if args.resume:
        trainer.load(checkpoint)
    args.out.mkdir(parents=True, exist_ok=True)

    def log(report: dict[str, object]) -> None:
        show(report, trainer.total)
        with (args.out / "log.jsonl").open("a") as lines:
            lines.write(json.dumps(report) + "\n")
        if trainer.progress.step % args.save_every == 0:
            trainer.save(checkpoint)
            export(trainer.net, tokenizer, args.out, positions=positions)

    trainer.run(log, max_steps=args.max_steps)
    trainer.save(checkpoint)
    export(trainer.net, tokenizer, args.out, positions=positions)


if __name__ == "__main__":
    main()
