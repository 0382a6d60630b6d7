"""`kvpolicy cache`: make, describe and verify files of saved caches."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from kvpolicy.cli import arguments
from kvpolicy.cli.arguments import TINY
from kvpolicy.cli.commands.generate import Chat, PromptFile, PromptText
from kvpolicy.cli.formatting import Group, as_json, paragraph, size, terms
from kvpolicy.cli.model_loading import check_length, encode, files_of, read_prompt
from kvpolicy.text.output import check_output

app = typer.Typer(
    cls=Group, help="Save the cache of a text to a file, and describe and verify such files.", rich_markup_mode=None
)

OUT = "cache.safetensors"
"""The default path of a new file."""

DEFAULT_POLICY = "uniform/adakv+kvzip@0.2"
"""The default policy of a new file: it does not depend on what the text is asked later."""

CacheFile = Annotated[Path, typer.Argument(metavar="FILE", help="A file that `kvpolicy cache make` wrote.")]


@app.command()
def make(
    prompt: PromptText = None,
    file: PromptFile = None,
    model: arguments.Model = TINY,
    policy: Annotated[
        str, typer.Option("--policy", metavar="POLICY", help="Policy spec. The default does not look at a question.")
    ] = DEFAULT_POLICY,
    out: Annotated[Path, typer.Option(metavar="FILE", help="The file to write.")] = Path(OUT),
    force: arguments.Force = False,
    compress: Annotated[bool, typer.Option("--compress", help="Compress the codes without loss.")] = False,
    chat: Chat = False,
    tile: arguments.Tile = "auto",
    hold_codes: arguments.HoldCodes = False,
    dtype: arguments.Dtype = "auto",
    device: arguments.Device = "",
    json: arguments.Json = False,
) -> None:
    """Read a text with a model, and save its cache.

    The file also has the token ids of the text, including the newline at its end. With --chat, the text is
    the first message of a chat. A policy that looks at the end of the text, such as snapkv, keeps what a question there
    needs; the default keeps what any question may need.
    """
    tile_size = arguments.tile_of(tile)  # an invalid size raises an error before anything is read
    text, _ = read_prompt(prompt, file, model, whole=True)
    from kvpolicy.cli.cache_files import make_file
    from kvpolicy.cli.model_loading import load
    from kvpolicy.hf.cache_header import read_header
    from kvpolicy.policy import Policy

    wanted = Policy.parse(policy)
    out = out.expanduser()
    inputs = [file, model, *files_of(wanted)]
    check_output(out, "a saved cache", inputs=inputs, is_own=lambda path: read_header(Path(path)), force=force)
    loaded, tokenizer = load(model, dtype, device)
    ids = encode(tokenizer, text, chat, answer=False)  # a chat goes on with a question
    check_length(loaded, ids.shape[1], 0)
    how: Any = {"tile": tile_size, "hold": arguments.hold_of(hold_codes)}
    facts = make_file(loaded, ids, wanted, out, "zlib" if compress else None, **how)
    if json:
        print(as_json("cache make", facts))
        return
    print(_render(facts))
    if facts["note"]:
        print(f"\n{paragraph(facts['note'])}")


@app.command()
def info(file: CacheFile, json: arguments.Json = False) -> None:
    """Describe a file, from its header alone."""
    from kvpolicy.cli.cache_files import describe

    facts = describe(file)
    print(as_json("cache info", facts) if json else _render(facts))


@app.command()
def verify(file: CacheFile, json: arguments.Json = False) -> None:
    """Read a file whole, and check that it is as it was written."""
    from kvpolicy.cli.cache_files import check

    facts = check(file)
    print(as_json("cache verify", facts) if json else f"{file} is as it was written: {facts['tensors']} tensors.")


def _held(fewest: int, most: int) -> str:
    return f"{most:,} tokens in every head" if fewest == most else f"{fewest:,} to {most:,} tokens in a head"


def _render(facts: dict[str, Any]) -> str:
    share = f", {facts['nbytes'] / facts['full_nbytes']:.3f} of the full cache" if facts["full_nbytes"] else ""
    ranks = facts["ranks"]
    ids = "with ids" if facts["has_tokens"] else "without ids"
    pairs = [
        ("file", f"{facts['file']}, {size(facts['file_nbytes'])}"),
        ("policy", facts["policy"]),
        ("model", f"{facts['model']} ({facts['model_type']}), {facts['dtype']}"),
        (
            "tokens",
            f"{facts['columns']:,} in {facts['rows']} row(s), {ids}",
        ),
        ("cache", f"{size(facts['nbytes'])}{share}"),
        *([("held", _held(*facts["held"]))] if facts["held"] else []),
        ("written by", f"kvpolicy {facts['kvpolicy']}, format {facts['format']}"),
    ]
    if ranks["size"] > 1:
        pairs.append(("rank", f"{ranks['rank'] + 1} of {ranks['size']}"))
    return terms(pairs)
