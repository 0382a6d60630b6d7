"""`kvpolicy calibrate`: learn from a model's keys and values what a codec must know."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from kvpolicy.cli.models import load
from kvpolicy.cli.words import TINY, Device, Dtype, complete_model, names, numbers

app = typer.Typer(help="Learn from a model's keys and values what a codec must know.", rich_markup_mode=None)

Model = Annotated[
    str,
    typer.Option("--model", metavar="MODEL", help="tiny, a folder or a hub name.", autocompletion=complete_model),
]
Text = Annotated[list[str], typer.Option("--text", metavar="FILE", help="UTF-8 text file, or folder of .txt files.")]
More = Annotated[list[str] | None, typer.Argument(metavar="FILE", help="More of them.")]
Out = Annotated[str, typer.Option("--out", metavar="DIR", help="Folder that the calibration is written to.")]
Length = Annotated[int, typer.Option("--length", min=1, help="Tokens of a window of text.")]
Windows = Annotated[int, typer.Option("--windows", min=1, help="The most windows, drawn from all of the text.")]
Tokens = Annotated[int, typer.Option("--tokens", min=1, help="About how many tokens' vectors are kept.")]
Seed = Annotated[int, typer.Option("--seed", help="Seed of all that is random.")]
Force = Annotated[
    bool, typer.Option("--force", help="Replace a finished calibration of another model, text or options.")
]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress bars.")]

_GROUPS = "Layers that share a dictionary of {}s: auto, each, all or groups such as 0,1,2-4."


@app.command()
def csr(
    model: Model,
    text: Text,
    out: Out,
    more: More = None,
    length: Length = 1024,
    windows: Windows = 64,
    tokens: Tokens = 16_384,
    seed: Seed = 0,
    device: Device = "",
    dtype: Dtype = "auto",
    quiet: Quiet = False,
    force: Force = False,
    frames: Annotated[str, typer.Option(help="Of the keys: pre, post or pre,post.")] = "pre",
    sn: Annotated[str, typer.Option(help="Chunks of a value; several as 1,2,4.")] = "2",
    atoms: Annotated[int, typer.Option(help="Of each dictionary; 0 for 256 per KV head, at most 8192.")] = 0,
    pairs: Annotated[int, typer.Option(min=1, help="Atoms per key and value while training.")] = 8,
    key_groups: Annotated[str, typer.Option(help=_GROUPS.format("key"))] = "auto",
    value_groups: Annotated[str, typer.Option(help=_GROUPS.format("value"))] = "auto",
    pair: Annotated[float, typer.Option(help="With auto, the most that two layers of a group differ.")] = 0.2,
    chain: Annotated[float, typer.Option(help="With auto, the most that a group's neighbours add up to.")] = 1.0,
    epochs: Annotated[int, typer.Option(help="Rounds over all vectors, at most.")] = 20,
    batch: Annotated[int, typer.Option(help="Vectors of a step.")] = 1024,
    rate: Annotated[float, typer.Option(help="Learning rate at the start.")] = 1e-2,
    patience: Annotated[int, typer.Option(help="Epochs without gain after which training stops.")] = 5,
) -> None:
    """Train CSR's dictionaries. A run that was interrupted goes on when it is given again."""
    chunks = numbers("--sn", sn)  # before anything slow
    from kvpolicy.calibration import Dictionaries, Training, calibrate_csr

    training = Training(epochs=epochs, batch=batch, rate=rate, patience=patience, seed=seed)
    options = Dictionaries(
        frames=names(frames), sn=chunks, atoms=atoms, pairs=pairs, key_groups=key_groups, value_groups=value_groups,
        pair=pair, chain=chain, tokens=tokens, seed=seed, training=training,
    )  # fmt: skip
    loaded, drawn = _prepared(model, [*text, *(more or ())], dtype, device, length, windows, seed)
    meta = calibrate_csr(loaded, drawn, out, options, name=_called(model), progress=not quiet, force=force)
    for key, losses in meta["losses"].items():
        part, _, group = key.rpartition(".")
        layers = ",".join(map(str, meta["groups"][part][int(group)]))
        print(f"{part} of layers {layers}: error {losses[0]:.4f} before training, {min(losses):.4f} after")
    print(f"Written to {out}: use csr:dictionary={out}")


@app.command()
def kvquant(
    model: Model,
    text: Text,
    out: Out,
    more: More = None,
    length: Length = 1024,
    windows: Windows = 64,
    tokens: Tokens = 16_384,
    seed: Seed = 0,
    device: Device = "",
    dtype: Dtype = "auto",
    quiet: Quiet = False,
    force: Force = False,
    bits: Annotated[str, typer.Option(help="Widths of codes to fit levels for.")] = "2,3,4",
    outliers: Annotated[float, typer.Option(help="Share of numbers that will be kept exact.")] = 0.01,
    no_fisher: Annotated[
        bool, typer.Option("--no-fisher", help="Weigh all numbers alike, which needs no gradients.")
    ] = False,
) -> None:
    """Fit KVQuant's ranges and levels."""
    widths = numbers("--bits", bits)
    from kvpolicy.calibration import calibrate_kvquant

    loaded, drawn = _prepared(model, [*text, *(more or ())], dtype, device, length, windows, seed)
    calibrate_kvquant(
        loaded, drawn, out, bits=widths, outliers=outliers, tokens=tokens, fisher=not no_fisher, seed=seed,
        name=_called(model), progress=not quiet, force=force,
    )  # fmt: skip
    print(f"Written to {out}: use kvquant:calibration={out}")


def _prepared(
    model: str, text: list[str], dtype: str, device: str, length: int, windows: int, seed: int
) -> tuple[Any, list[Any]]:
    """The model, and windows of the text."""
    from kvpolicy.calibration import read_texts, token_windows

    texts = read_texts(text)
    loaded, tokenizer = load(model, dtype, device)
    return loaded, token_windows(tokenizer, texts, length, windows, seed)


def _called(model: str) -> str | None:
    """What a calibration calls its model, where that is not the model's own name."""
    return TINY if model == TINY else None
