"""`kvpolicy calibrate`: learn from a model's keys and values what a codec must know."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from kvpolicy.commands.words import count, names, numbers

TINY = "tiny"
"""The model's name that stands for the embedded one."""


def add(commands: Any) -> None:
    """Add the command to a parser's commands."""
    calibrate = commands.add_parser("calibrate", help="learn from a model's keys and values what a codec must know")
    methods = calibrate.add_subparsers(title="codecs", required=True, metavar="CODEC")
    _add_csr(methods)
    _add_kvquant(methods)


def _add_common(methods: Any, name: str, run: Callable[[argparse.Namespace], None], **words: str) -> Any:
    formatter = argparse.ArgumentDefaultsHelpFormatter
    parser = methods.add_parser(name, formatter_class=formatter, **words)
    parser.set_defaults(run=run)
    parser.add_argument("--model", required=True, help="folder or hub name, or tiny for the embedded model")
    parser.add_argument("--text", required=True, nargs="+", help="UTF-8 text files, or folders of .txt files")
    parser.add_argument("--out", required=True, help="folder that the calibration is written to")
    parser.add_argument("--length", type=count, default=1024, help="tokens of a window of text")
    parser.add_argument("--windows", type=count, default=64, help="the most windows, drawn from all of the text")
    parser.add_argument("--tokens", type=count, default=16_384, help="about how many tokens' vectors are kept")
    parser.add_argument("--seed", type=int, default=0, help="seed of all that is random")
    parser.add_argument("--device", default="", help="such as cuda; an accelerator if there is one")
    parser.add_argument("--dtype", default="auto", help="of the weights, such as bfloat16; auto as they are stored")
    parser.add_argument("--quiet", action="store_true", help="no progress bars")
    return parser


def _add_csr(methods: Any) -> None:
    words = {
        "help": "train CSR's dictionaries",
        "description": "Train CSR's dictionaries. A run that was interrupted goes on when it is given again.",
    }
    parser = _add_common(methods, "csr", _csr, **words)
    parser.add_argument("--frames", type=names, default="pre", help="of the keys: pre, post or pre,post")
    parser.add_argument("--sn", type=numbers, default="2", help="chunks of a value; several as 1,2,4")
    parser.add_argument("--atoms", type=int, default=0, help="of each dictionary; 0 for 256 per KV head, at most 8192")
    parser.add_argument("--pairs", type=count, default=8, help="atoms per key and value while training")
    for side in ("key", "value"):
        text = f"layers that share a dictionary of {side}s: auto, each, all or groups such as 0,1,2-4"
        parser.add_argument(f"--{side}-groups", default="auto", help=text)
    parser.add_argument("--pair", type=float, default=0.2, help="with auto, the most that two layers of a group differ")
    parser.add_argument(
        "--chain", type=float, default=1.0, help="with auto, the most that a group's neighbours add up to"
    )
    parser.add_argument("--epochs", type=int, default=20, help="rounds over all vectors, at most")
    parser.add_argument("--batch", type=int, default=1024, help="vectors of a step")
    parser.add_argument("--rate", type=float, default=1e-2, help="learning rate at the start")
    parser.add_argument("--patience", type=int, default=5, help="epochs without gain after which training stops")


def _add_kvquant(methods: Any) -> None:
    words = {"help": "fit KVQuant's ranges and levels", "description": "Fit KVQuant's ranges and levels."}
    parser = _add_common(methods, "kvquant", _kvquant, **words)
    parser.add_argument("--bits", type=numbers, default="2,3,4", help="widths of codes to fit levels for")
    parser.add_argument("--outliers", type=float, default=0.01, help="share of numbers that will be kept exact")
    parser.add_argument("--no-fisher", action="store_true", help="weigh all numbers alike, which needs no gradients")


def _csr(args: argparse.Namespace) -> None:
    from kvpolicy.calibration import Dictionaries, Training, calibrate_csr

    training = Training(epochs=args.epochs, batch=args.batch, rate=args.rate, patience=args.patience, seed=args.seed)
    options = Dictionaries(
        frames=args.frames,
        sn=args.sn,
        atoms=args.atoms,
        pairs=args.pairs,
        key_groups=args.key_groups,
        value_groups=args.value_groups,
        pair=args.pair,
        chain=args.chain,
        tokens=args.tokens,
        seed=args.seed,
        training=training,
    )
    model, windows, name = _prepared(args)
    meta = calibrate_csr(model, windows, args.out, options, name=name, progress=not args.quiet)
    for key, losses in meta["losses"].items():
        part, _, group = key.rpartition(".")
        layers = ",".join(map(str, meta["groups"][part][int(group)]))
        print(f"{part} of layers {layers}: error {losses[0]:.4f} before training, {min(losses):.4f} after")
    print(f"Written to {args.out}: use csr:dictionary={args.out}")


def _kvquant(args: argparse.Namespace) -> None:
    from kvpolicy.calibration import calibrate_kvquant

    model, windows, name = _prepared(args)
    calibrate_kvquant(
        model,
        windows,
        args.out,
        bits=args.bits,
        outliers=args.outliers,
        tokens=args.tokens,
        fisher=not args.no_fisher,
        seed=args.seed,
        name=name,
        progress=not args.quiet,
    )
    print(f"Written to {args.out}: use kvquant:calibration={args.out}")


def _prepared(args: argparse.Namespace) -> tuple[Any, list[Any], str | None]:
    """The model, windows of the text, and what to call the model."""
    from kvpolicy.calibration import read_texts, token_windows

    texts = read_texts(args.text)
    model, tokenizer = _load(args.model, args.dtype, args.device)
    windows = token_windows(tokenizer, texts, args.length, args.windows, args.seed)
    return model, windows, TINY if args.model == TINY else None


def _load(name: str, dtype: str, device: str) -> tuple[Any, Any]:
    import torch

    from kvpolicy.embedded import tiny

    if not device:
        device = str(torch.accelerator.current_accelerator() or "cpu") if torch.accelerator.is_available() else "cpu"
    kind = "auto" if dtype == "auto" else getattr(torch, dtype, None)
    if kind != "auto" and not isinstance(kind, torch.dtype):
        raise ValueError(f"The dtype {dtype} is not known: give auto, float32 or bfloat16.")
    if name == TINY:
        model, tokenizer = tiny(torch.float32 if dtype == "auto" else kind)  # pyright: ignore[reportArgumentType]
        return model.to(device), tokenizer
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        model: Any = AutoModelForCausalLM.from_pretrained(name, dtype=kind, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(f"The model {name} cannot be loaded: {first}") from error
    return model.to(device).eval(), tokenizer
