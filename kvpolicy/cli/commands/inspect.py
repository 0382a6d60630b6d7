"""`kvpolicy inspect`: run a prompt under a policy, and show the layers, their budgets and the kept tokens."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from kvpolicy.cli import arguments
from kvpolicy.cli.arguments import TINY
from kvpolicy.cli.commands.generate import Chat, PolicyName, PromptFile, PromptText
from kvpolicy.cli.formatting import as_json
from kvpolicy.cli.model_loading import check_length, encode, files_of, prompt_notes, read_prompt
from kvpolicy.text.errors import KVPolicyError
from kvpolicy.text.output import check_output, has_marker


def inspect(
    prompt: PromptText = None,
    file: PromptFile = None,
    model: arguments.Model = TINY,
    policy: PolicyName = arguments.POLICY,
    html: Annotated[str | None, typer.Option(metavar="FILE", help="Write an HTML page with plots.")] = None,
    force: arguments.Force = False,
    layer: Annotated[
        int | None,
        typer.Option(min=0, metavar="INT", help="Show the tokens that this layer keeps. By default over all layers."),
    ] = None,
    new: Annotated[
        int, typer.Option(min=1, metavar="TOKENS", help="Number of tokens to generate before the cache is inspected.")
    ] = 1,
    importance: Annotated[
        bool,
        typer.Option(
            "--importance/--no-importance",
            help="Measure how much attention changes the hidden states in each layer. Allocators such as squeeze "
            "measure it during prefill; for others, the prompt is run a second time.",
        ),
    ] = True,
    chat: Chat = False,
    tile: arguments.Tile = "auto",
    dtype: arguments.Dtype = "auto",
    device: arguments.Device = "",
    json: arguments.Json = False,
) -> None:
    """Show the layer budgets and the kept tokens of a prompt.

    The prompt is the argument, a file or standard input. Without a prompt, the embedded model gets a sample. In a
    terminal with colors the tokens are colored; otherwise marks below the text show which tokens are kept. --html
    writes a page that needs no network access.
    """
    tile_size = arguments.tile_of(tile)  # an invalid size raises an error before anything is read
    text, is_sample = read_prompt(prompt, file, model)
    from kvpolicy.policy import Policy

    parsed = Policy.parse(policy)  # an invalid spec raises an error before the model is loaded
    if html is not None:
        html = os.path.expanduser(html)
        _check_html(html, [file, model, *files_of(parsed)], force)
    from kvpolicy.cli.inspection import inspect_prompt
    from kvpolicy.cli.model_loading import load

    loaded, tokenizer = load(model, dtype, device)
    ids = encode(tokenizer, text, chat)
    check_length(loaded, ids.shape[1], new)
    inspection = inspect_prompt(
        loaded, tokenizer, ids, str(parsed), name=model, new=new, importance=importance, tile=tile_size
    )
    if layer is not None:
        inspection.position_of(layer)  # an invalid layer raises an error before anything is written
    if html is not None:
        from kvpolicy.cli.inspection_html import write_page

        write_page(inspection, html)
    if json:
        print(as_json("inspect", inspection.as_dict()))
        return
    for note in prompt_notes(model, ids.shape[1], is_sample):
        print(note, file=sys.stderr)
    if html is None:
        from kvpolicy.cli.inspection import show

        show(inspection, layer)
    else:
        print(f"Wrote {html}. Open it in a browser.")


def _check_html(html: str, inputs: list[str | None], force: bool) -> None:
    """Refuse a page in no folder, and one in the place of something else."""
    from kvpolicy.cli.inspection_html import MARKER

    if not Path(html).parent.is_dir():
        raise KVPolicyError(f"--html must be a file in a folder that exists, got {html!r}; try inspect.html.")
    own = "a page of kvpolicy inspect"
    check_output(html, own, inputs=inputs, is_own=lambda path: has_marker(path, MARKER), force=force)
