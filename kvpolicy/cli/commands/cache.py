"""`kvpolicy cache`: make, describe and verify files of saved caches."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvpolicy.cli import arguments
from kvpolicy.cli.arguments import TINY
from kvpolicy.cli.commands.generate import Chat, PromptFile, PromptText
from kvpolicy.cli.formatting import Group, as_json, paragraph, size, terms
from kvpolicy.cli.model_loading import check_length, encode, files_of, read_prompt
from kvpolicy.text.errors import KVPolicyError
from kvpolicy.text.formats import expanded
from kvpolicy.text.output import check_output

if TYPE_CHECKING:
    from kvpolicy.hf.attachment import Hold
    from kvpolicy.hf.tile_size import TileSize
    from kvpolicy.policy import Policy

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
    form: Annotated[
        str,
        typer.Option("--form", metavar="FORM", help="Encode keys and values with loss: kvtc:calibration=DIR:ratio=16."),
    ] = "",
    chat: Chat = False,
    tile: arguments.Tile = "auto",
    chunk: arguments.Chunk = None,
    hold_codes: arguments.HoldCodes = False,
    dtype: arguments.Dtype = "auto",
    device: arguments.Device = "",
    json: arguments.Json = False,
) -> None:
    """Read a text with a model, and save its cache.

    The file also has the token ids of the text, including the newline at its end. With --chat, the text is
    the first message of a chat. A policy that looks at the end of the text, such as snapkv, keeps what a question there
    needs; the default keeps what any question may need. With --chunk, each chunk is compressed when it is read, so that
    no more than one is ever whole in memory.
    """
    tile_size = arguments.tile_of(tile)  # an invalid size raises an error before anything is read
    if compress and form:
        raise KVPolicyError(f"--compress must not be given with --form, which compresses codes too, got {form!r}.")
    text, _ = read_prompt(prompt, file, model, whole=True)
    from kvpolicy.cli.model_loading import load
    from kvpolicy.hf.cache_file import check_path
    from kvpolicy.hf.cache_header import read_header
    from kvpolicy.hf.file_forms import ZLIB, form_of
    from kvpolicy.policy import Policy
    from kvpolicy.text.model_file import paths_in

    how = form or (ZLIB if compress else None)
    written = form_of(how)  # before the model is loaded
    wanted = Policy.parse(policy)
    out = expanded(out)
    inputs = [file, model, *files_of(wanted), *paths_in(written)]
    check_path(out)
    check_output(out, "a saved cache", inputs=inputs, is_own=lambda path: read_header(Path(path)), force=force)
    loaded, tokenizer = load(model, dtype, device)
    ids = encode(tokenizer, text, chat, answer=False)  # a chat goes on with a question
    check_length(loaded, ids.shape[1], 0)
    hold = arguments.hold_of(hold_codes)
    facts = make_file(loaded, ids, wanted, out, how, tile=tile_size, hold=hold, chunk=chunk)
    if json:
        print(as_json("cache make", facts))
        return
    print(_render(facts))
    if facts["note"]:
        print(f"\n{paragraph(facts['note'])}")


@app.command()
def info(file: CacheFile, json: arguments.Json = False) -> None:
    """Describe a file, from its header alone."""
    facts = describe(file)
    print(as_json("cache info", facts) if json else _render(facts))


@app.command()
def verify(file: CacheFile, json: arguments.Json = False) -> None:
    """Read a file whole, and check that it is as it was written."""
    facts = check(file)
    print(as_json("cache verify", facts) if json else f"{file} is as it was written: {facts['tensors']} tensors.")


def _render(facts: dict[str, Any]) -> str:
    share = f", {facts['nbytes'] / facts['full_nbytes']:.3f} of the full cache" if facts["full_nbytes"] else ""
    ranks = facts["ranks"]
    ids = "with ids" if facts["has_tokens"] else "without ids"
    fewest, most = facts["held"] or (0, 0)
    held = f"{most:,} tokens in every head" if fewest == most else f"{fewest:,} to {most:,} tokens in a head"
    pairs = [
        ("file", f"{facts['file']}, {size(facts['file_nbytes'])}"),
        ("policy", facts["policy"]),
        ("model", f"{facts['model']} ({facts['model_type']}), {facts['dtype']}"),
        ("tokens", f"{facts['columns']:,} in {facts['rows']} row(s), {ids}"),
        ("cache", f"{size(facts['nbytes'])}{share}"),
        *([("stored as", f"{facts['form']}, with loss")] if facts["form"] else []),
        *([("held", held)] if facts["held"] else []),
        ("written by", f"kvpolicy {facts['kvpolicy']}, format {facts['format']}"),
    ]
    if ranks["size"] > 1:
        pairs.append(("rank", f"{ranks['rank'] + 1} of {ranks['size']}"))
    return terms(pairs)


def make_file(
    model: Any,
    ids: Any,
    policy: Policy,
    out: Path,
    compress: str | None,
    *,
    tile: TileSize,
    hold: Hold,
    chunk: int | None = None,
) -> dict[str, Any]:
    """Prefill a text [1, P] under a policy, and save its cache: the result of `describe`, and a note for the user."""
    import torch

    from kvpolicy.hf.attach import attach
    from kvpolicy.hf.attachment import attachment_of
    from kvpolicy.hf.cache import PolicyCache
    from kvpolicy.hf.cache_names import cache_argument
    from kvpolicy.hf.file_forms import form_of

    ids = ids.to(model.device)
    form = form_of(compress)
    with torch.inference_mode(), attach(model, policy, tile=tile, hold=hold) as handle:
        if form is not None:
            form.check(attachment_of(model))  # before the text is read, which may take long
        cache = PolicyCache(model, prompt=ids.shape[1])
        for part in ids.split(chunk or ids.shape[1], dim=1):
            model(part, **cache_argument(model, cache), use_cache=True, logits_to_keep=1)
        cache.save(out, tokens=ids.cpu(), compress=compress)
    return describe(out) | {"note": note_for(handle.policy)}


def describe(path: Path) -> dict[str, Any]:
    """Facts from the header of a file; `held` has the fewest and the most tokens of a head, None if unknown."""
    from kvpolicy.hf.cache_header import read_header

    header = read_header(path)
    held = [count for pair in header.get("held", {}).values() for count in pair]
    return {
        "file": str(path),
        "file_nbytes": path.stat().st_size,
        "kvpolicy": header["kvpolicy"],
        "format": header["format"],
        "policy": header["spec"],
        "model": header["model"]["name"],
        "model_type": header["model"]["type"],
        "dtype": header["dtype"],
        "rows": header["rows"],
        "columns": header["columns"],
        "has_tokens": header["has_tokens"],
        "held": [min(held), max(held)] if held else None,
        "nbytes": header["nbytes"],
        "full_nbytes": header["full_nbytes"],
        "compressed": bool(header["packed"]),
        "form": header.get("form", {}).get("spec"),
        "ranks": {name: header["ranks"][name] for name in ("rank", "size")},
    }


def check(path: Path) -> dict[str, Any]:
    """Read a file whole; raises KVPolicyError if it is not as it was written."""
    from kvpolicy.hf.cache_file import read

    content = read(path)
    return {"file": str(path), "tensors": len(content.tensors), "verified": True}


def note_for(policy: Policy) -> str:
    """Note for a user who saves a cache under this policy; empty if there is none."""
    every = [each for one in policy.distinct for each in one.selector.statistics]
    if not any(each.of_newest for each in every):
        return ""
    return (
        f"The selector of {policy} keeps what the last tokens of the text attend to. If these are a question, the "
        "cache may not answer another one; try uniform/adakv+kvzip, which does not depend on a question."
    )
