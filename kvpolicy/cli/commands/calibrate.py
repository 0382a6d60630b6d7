"""`kvpolicy calibrate`: compute what a codec, a reader, a selector or a head allocator takes, from a model and text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer

from kvpolicy.cli.arguments import Device, Dtype, Model, parse_integers, parse_names
from kvpolicy.cli.formatting import Group, duration
from kvpolicy.cli.model_loading import load
from kvpolicy.text.embedded_names import EMBEDDED
from kvpolicy.text.errors import KVPolicyError
from kvpolicy.text.output import check_output
from kvpolicy.text.tables import shorten

app = typer.Typer(cls=Group, help="Calibrate a codec, a reader, a selector or a head allocator.", rich_markup_mode=None)

Text = Annotated[list[str], typer.Option("--text", metavar="FILE", help="UTF-8 text file, or folder with .txt files.")]
More = Annotated[list[str] | None, typer.Argument(metavar="FILE", help="More text files or folders.")]
Out = Annotated[str, typer.Option("--out", metavar="DIR", help="Folder to write the calibration to.")]
Length = Annotated[int, typer.Option("--length", min=1, metavar="TOKENS", help="Length of a window of text.")]
Windows = Annotated[
    int, typer.Option("--windows", min=1, metavar="INT", help="Maximum number of windows, drawn from the whole text.")
]
Tokens = Annotated[
    int,
    typer.Option("--tokens", min=1, metavar="INT", help="Approximate number of tokens whose keys and values are used."),
]
Seed = Annotated[int, typer.Option("--seed", metavar="INT", help="Random seed.")]
Force = Annotated[
    bool, typer.Option("--force", help="Replace a finished calibration for another model, text or options.")
]
Quiet = Annotated[bool, typer.Option("--quiet", help="Disable progress bars.")]

_GROUPS = "Layers that share a dictionary of {}s: auto, each, all, or groups such as 0,1,2-4."


@app.command()
def csr(
    model: Model,
    text: Text,
    out: Out,
    more: More = None,
    length: Length = 1024,
    windows: Windows = 64,
    tokens: Tokens = 20_480,
    seed: Seed = 0,
    device: Device = "",
    dtype: Dtype = "auto",
    quiet: Quiet = False,
    force: Force = False,
    key_spaces: Annotated[
        str,
        typer.Option("--key-spaces", "--frames", metavar="NAMES", help="Keys: unrotated, rotated or both, by a comma."),
    ] = "unrotated",
    value_chunks: Annotated[
        str, typer.Option("--value-chunks", "--sn", metavar="INTS", help="Chunks per value; several as 1,2,4.")
    ] = "2",
    atoms: Annotated[
        int, typer.Option(metavar="INT", help="Atoms per dictionary; 0 for 256 per KV head, at most 8192.")
    ] = 0,
    pairs: Annotated[int, typer.Option(min=1, metavar="INT", help="Atoms per key and value during training.")] = 8,
    key_groups: Annotated[str, typer.Option(metavar="GROUPS", help=_GROUPS.format("key"))] = "auto",
    value_groups: Annotated[str, typer.Option(metavar="GROUPS", help=_GROUPS.format("value"))] = "auto",
    pair: Annotated[
        float, typer.Option(metavar="FLOAT", help="With auto, the maximum difference of two layers in a group, 0 to 1.")
    ] = 0.2,
    chain: Annotated[
        float,
        typer.Option(metavar="FLOAT", help="With auto, the maximum sum of the differences of neighbors in a group."),
    ] = 1.0,
    epochs: Annotated[int, typer.Option(metavar="INT", help="Maximum number of epochs.")] = 5,
    batch: Annotated[int, typer.Option(metavar="INT", help="Keys or values per step.")] = 1024,
    rate: Annotated[float, typer.Option(metavar="FLOAT", help="Initial length of a step, of a Newton step's.")] = 1.0,
    patience: Annotated[
        int, typer.Option(metavar="INT", help="Number of epochs without improvement after which training stops.")
    ] = 5,
) -> None:
    """Train the dictionaries of CSR.

    To resume an interrupted run, run the same command again.
    """
    chunks = parse_integers("--value-chunks", value_chunks)  # an invalid value raises an error before anything slow
    from kvpolicy.calibration import Dictionaries, Training, calibrate_csr
    from kvpolicy.codecs.csr import CSR

    former = CSR.VALUE_ALIASES["key_space"]

    options = Dictionaries(
        key_spaces=tuple(former.get(space, space) for space in parse_names(key_spaces)),
        value_chunks=chunks,
        atoms=atoms,
        pairs=pairs,
        key_groups=key_groups,
        value_groups=value_groups,
        pair=pair,
        chain=chain,
        tokens=tokens,
        seed=seed,
        training=Training(epochs=epochs, batch=batch, rate=rate, patience=patience, seed=seed),
    )
    paths = [*text, *(more or ())]
    _check_folder(out, model, paths, force)
    loaded, sampled = _prepare(model, paths, dtype, device, length, windows, seed)
    meta = calibrate_csr(
        loaded,
        sampled,
        out,
        options,
        name=_name(model),
        progress=not quiet,
        announce=lambda seconds: print(f"This takes up to {duration(seconds)}.", flush=True),
        force=force,
    )
    for key, losses in meta["losses"].items():
        part, _, group = key.rpartition(".")
        layers = ",".join(map(str, meta["groups"][part][int(group)]))
        print(f"{part} of layers {layers}: error {losses[0]:.4f} before training, {min(losses):.4f} after")
    print(f"Wrote {out}. Use it with csr:dictionary={out}")


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
    bits: Annotated[str, typer.Option(metavar="INTS", help="Bits per number to fit levels for.")] = "2,3,4",
    outliers: Annotated[
        float, typer.Option(metavar="FLOAT", help="Fraction of numbers that will stay in full precision.")
    ] = 0.01,
    no_fisher: Annotated[
        bool, typer.Option("--no-fisher", help="Use uniform weights instead of the Fisher information.")
    ] = False,
) -> None:
    """Fit the ranges and quantization levels of KVQuant.

    By default, numbers are weighted by their Fisher information, which needs gradients of the model.
    """
    widths = parse_integers("--bits", bits)
    from kvpolicy.calibration import calibrate_kvquant

    paths = [*text, *(more or ())]
    _check_folder(out, model, paths, force)
    loaded, sampled = _prepare(model, paths, dtype, device, length, windows, seed)
    calibrate_kvquant(
        loaded,
        sampled,
        out,
        bits=widths,
        outliers=outliers,
        tokens=tokens,
        fisher=not no_fisher,
        seed=seed,
        name=_name(model),
        progress=not quiet,
        force=force,
    )
    print(f"Wrote {out}. Use it with kvquant:calibration={out}")


@app.command()
def lowrank(
    model: Model,
    text: Text,
    out: Out,
    more: More = None,
    length: Length = 1024,
    windows: Windows = 64,
    seed: Seed = 0,
    device: Device = "",
    dtype: Dtype = "auto",
    quiet: Quiet = False,
    force: Force = False,
    key_spaces: Annotated[
        str, typer.Option(metavar="NAMES", help="Keys: rotated, unrotated or both.")
    ] = "rotated,unrotated",
    head_groups: Annotated[
        str,
        typer.Option(
            metavar="INTS", help="Numbers of KV heads that share directions, in addition to single ones, such as 2,4."
        ),
    ] = "",
    fisher: Annotated[
        bool, typer.Option("--fisher", help="Collect the Fisher information too, by which ranks=fisher divides ranks.")
    ] = False,
) -> None:
    """Find the directions in which keys and values vary most, for the codec lowrank.

    It takes one forward pass of each window, without gradients; with --fisher, a backward pass too.
    """
    spaces = parse_names(key_spaces)
    groups = parse_integers("--head-groups", head_groups) if head_groups else ()
    from kvpolicy.calibration import calibrate_lowrank

    paths = [*text, *(more or ())]
    _check_folder(out, model, paths, force)
    loaded, sampled = _prepare(model, paths, dtype, device, length, windows, seed)
    meta = calibrate_lowrank(
        loaded,
        sampled,
        out,
        key_spaces=spaces,
        head_groups=groups,
        fisher=fisher,
        name=_name(model),
        progress=not quiet,
        force=force,
    )
    for part, share in meta["energy"].items():
        print(f"{part}: {share:.3f} of the variance in a quarter of the directions")
    print(f"Wrote {out}. Use it with lowrank:calibration={out}")


@app.command()
def channels(
    model: Model,
    text: Text,
    out: Out,
    more: More = None,
    length: Length = 1024,
    windows: Windows = 64,
    seed: Seed = 0,
    device: Device = "",
    dtype: Dtype = "auto",
    quiet: Quiet = False,
    force: Force = False,
) -> None:
    """Measure how salient each key channel is, for the reader labels."""
    from kvpolicy.calibration import calibrate_channels

    paths = [*text, *(more or ())]
    _check_folder(out, model, paths, force)
    loaded, sampled = _prepare(model, paths, dtype, device, length, windows, seed)
    calibrate_channels(loaded, sampled, out, name=_name(model), progress=not quiet, force=force)
    print(f"Wrote {out}. Use it with labels:calibration={out}")


@app.command()
def heads(
    model: Model,
    out: Annotated[str, typer.Option("--out", metavar="FILE", help="File to write the scores to.")],
    text: Annotated[
        list[str] | None,
        typer.Option("--text", metavar="FILE", help="With reach, UTF-8 text file, or folder with .txt files."),
    ] = None,
    more: More = None,
    length: Length = 1024,
    windows: Windows = 50,
    seed: Seed = 0,
    device: Device = "",
    dtype: Dtype = "auto",
    quiet: Quiet = False,
    force: Force = False,
    probe: Annotated[
        str,
        typer.Option(
            "--probe",
            metavar="PROBE",
            help="reach: how far back attention reaches in a text. razor: attention to copies of random tokens.",
        ),
    ] = "reach",
    sinks: Annotated[
        int, typer.Option("--sinks", min=0, metavar="INT", help="First tokens that a streaming head keeps.")
    ] = 64,
    recent: Annotated[
        int, typer.Option("--recent", min=1, metavar="INT", help="Newest tokens that a streaming head keeps.")
    ] = 256,
    positions: Annotated[
        int, typer.Option("--positions", min=2, metavar="INT", help="With reach, positions of the estimate.")
    ] = 500,
    random: Annotated[
        int | None,
        typer.Option(
            "--random",
            min=2,
            metavar="INT",
            help="With razor, random tokens; 2500 if the model has positions for them.",
        ),
    ] = None,
    repeats: Annotated[
        int, typer.Option("--repeats", min=2, metavar="INT", help="With razor, number of copies of the random tokens.")
    ] = 4,
    echo: Annotated[
        float,
        typer.Option("--echo", metavar="FLOAT", help="With razor, share of the heads with the highest echo score."),
    ] = 0.01,
    induction: Annotated[
        float,
        typer.Option(
            "--induction", metavar="FLOAT", help="With razor, share of the heads with the highest induction score."
        ),
    ] = 0.14,
) -> None:
    """Score every KV head by what it retrieves, for the head allocator duo.

    It takes one forward pass of each window of the text, or one of a random text, without gradients.
    """
    from kvpolicy.allocators.head_files import load_heads
    from kvpolicy.calibration import calibrate_echoes, calibrate_heads

    paths = [*(text or ()), *(more or ())]
    if probe not in ("reach", "razor"):
        raise KVPolicyError(f"--probe must be reach or razor, got {shorten(repr(probe))}; try reach.")
    if probe == "razor" and paths:
        raise KVPolicyError(f"--probe razor must have no text, got {shorten(paths[0])}; remove it, or try reach.")
    if probe == "reach" and not paths:
        raise KVPolicyError("--probe reach must have a text, got none; try --text FILE, or --probe razor.")
    _check_file(out, model, paths, load_heads, force)
    if probe == "reach":
        loaded, sampled = _prepare(model, paths, dtype, device, length, windows, seed)
        written = calibrate_heads(
            loaded,
            sampled,
            out,
            positions=positions,
            sinks=sinks,
            recent=recent,
            name=_name(model),
            progress=not quiet,
            force=force,
        )
    else:
        written = calibrate_echoes(
            load(model, dtype, device)[0],
            out,
            random=random,
            repeats=repeats,
            echo=echo,
            induction=induction,
            seed=seed,
            sinks=sinks,
            recent=recent,
            name=_name(model),
            progress=not quiet,
            force=force,
        )
    for layer, row in enumerate(written.heads):
        print(f"layer {layer}: {' '.join(f'{score:.3f}' for score in row) or 'not managed by policies'}")
    sparsity = f":sparsity={1 - echo - induction:.4g}" if probe == "razor" else ""
    print(f"Wrote {out}. Use it with uniform/duo:file={out}{sparsity}+streaming:sinks={sinks}@0.5")


@app.command()
def qfilters(
    model: Model,
    text: Text,
    out: Annotated[str, typer.Option("--out", metavar="FILE", help="File to write the filters to.")],
    more: More = None,
    length: Length = 2048,
    windows: Windows = 20,
    tokens: Annotated[
        int, typer.Option("--tokens", min=1, metavar="INT", help="Approximate number of tokens whose queries are used.")
    ] = 3000,
    seed: Seed = 0,
    device: Device = "",
    dtype: Dtype = "auto",
    quiet: Quiet = False,
    force: Force = False,
) -> None:
    """Find the main direction of the queries of every KV head, for the selector qfilters.

    It takes one forward pass of each window, without gradients.
    """
    from kvpolicy.calibration import calibrate_qfilters
    from kvpolicy.selectors.filter_files import load_filters

    paths = [*text, *(more or ())]
    _check_file(out, model, paths, load_filters, force)
    loaded, sampled = _prepare(model, paths, dtype, device, length, windows, seed)
    calibrate_qfilters(
        loaded, sampled, out, tokens=tokens, seed=seed, name=_name(model), progress=not quiet, force=force
    )
    print(f"Wrote {out}. Use it with qfilters:file={out}@0.2")


@app.command()
def triattention(
    model: Model,
    text: Text,
    out: Annotated[str, typer.Option("--out", metavar="FILE", help="File to write the mean queries to.")],
    more: More = None,
    length: Length = 2048,
    windows: Windows = 20,
    seed: Seed = 0,
    device: Device = "",
    dtype: Dtype = "auto",
    quiet: Quiet = False,
    force: Force = False,
) -> None:
    """Find the mean query of every query head, for the selector triattention.

    It takes one forward pass of each window, without gradients.
    """
    from kvpolicy.calibration import calibrate_triattention
    from kvpolicy.selectors.center_files import load_centers

    paths = [*text, *(more or ())]
    _check_file(out, model, paths, load_centers, force)
    loaded, sampled = _prepare(model, paths, dtype, device, length, windows, seed)
    calibrate_triattention(loaded, sampled, out, name=_name(model), progress=not quiet, force=force)
    print(f"Wrote {out}. Use it with triattention:file={out}@0.2")


@app.command()
def gate(
    model: Model,
    text: Text,
    out: Annotated[str, typer.Option("--out", metavar="FILE", help="File to write the gates to.")],
    more: More = None,
    length: Length = 1024,
    windows: Windows = 64,
    tokens: Annotated[
        int, typer.Option("--tokens", min=1, metavar="INT", help="Approximate number of tokens to fit the gates to.")
    ] = 131_072,
    seed: Seed = 0,
    device: Device = "",
    dtype: Dtype = "auto",
    quiet: Quiet = False,
    force: Force = False,
    kind: Annotated[
        str, typer.Option("--kind", metavar="KIND", help="linear: ridge regression. mlp: one hidden layer, trained.")
    ] = "linear",
    ridge: Annotated[
        float,
        typer.Option("--ridge", metavar="FLOAT", help="With linear, penalty over the mean variance of the inputs."),
    ] = 1e-3,
    units: Annotated[int, typer.Option("--units", metavar="INT", help="With mlp, units of the hidden layer.")] = 512,
    epochs: Annotated[int, typer.Option("--epochs", metavar="INT", help="With mlp, epochs of the training.")] = 15,
) -> None:
    """Fit gates that predict the scores of kvzip:plus=true, for the selector kvzap.

    It takes two forward passes of each window, without gradients.
    """
    from kvpolicy.calibration.gate import calibrate_gate, check_options
    from kvpolicy.selectors.gate_files import load_gates

    chosen = check_options(kind, ridge, units, epochs)  # an invalid value raises an error before anything slow
    paths = [*text, *(more or ())]
    _check_file(out, model, paths, load_gates, force)
    loaded, sampled = _prepare(model, paths, dtype, device, length, windows, seed)
    written = calibrate_gate(
        loaded,
        sampled,
        out,
        kind=chosen,
        tokens=tokens,
        ridge=ridge,
        units=units,
        epochs=epochs,
        seed=seed,
        name=_name(model),
        progress=not quiet,
        force=force,
    )
    for layer, share in zip(written.gates, (written.made or {})["r2"], strict=True):
        print(f"layer {layer}: {share:.3f} of the variance explained")
    print(f"Wrote {out}. Use it with kvzap:file={out}@0.2")


def _check_folder(out: str, model: str, paths: list[str], force: bool) -> None:
    """Refuse a folder in which something else would be lost, before the model is loaded."""
    from kvpolicy.calibration.finished import check_free_folder

    check_free_folder(out, inputs=[model, *paths], force=force)


def _check_file(out: str, model: str, paths: list[str], load: Callable[[str], Any], force: bool) -> None:
    """Refuse a file in whose place something else would be lost, before the model is loaded."""
    from kvpolicy.calibration.finished import SAME

    check_output(out, SAME.format("calibration"), inputs=[model, *paths], is_own=load, force=force)


def _prepare(
    model: str, text: list[str], dtype: str, device: str, length: int, windows: int, seed: int
) -> tuple[Any, list[Any]]:
    """Load the model, and return it with windows of tokens sampled from the text."""
    from kvpolicy.calibration import read_texts, token_windows

    texts = read_texts(text)
    loaded, tokenizer = load(model, dtype, device)
    return loaded, token_windows(tokenizer, texts, length, windows, seed)


def _name(model: str) -> str | None:
    """Return the name of the model to record in the calibration, or None for the name that the model has itself."""
    return model if model in EMBEDDED else None
