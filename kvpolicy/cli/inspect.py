"""`kvpolicy inspect`: run a prompt under a policy and show the layers' importance, budgets and the tokens kept."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from kvpolicy.cli import words
from kvpolicy.cli.generate import Chat, PolicyName, PromptFile, PromptText, lenient
from kvpolicy.cli.printing import as_json
from kvpolicy.cli.prompts import check_length, encode, read_prompt, remarks


def inspect(
    prompt: PromptText = None,
    file: PromptFile = None,
    model: words.Model = words.TINY,
    policy: PolicyName = words.POLICY,
    html: Annotated[str | None, typer.Option(metavar="FILE", help="Write a page with pictures to this file.")] = None,
    layer: Annotated[int | None, typer.Option(min=0, help="Show what this layer keeps, not all together.")] = None,
    new: Annotated[int, typer.Option(min=1, metavar="TOKENS", help="To generate before looking.")] = 1,
    importance: Annotated[
        bool,
        typer.Option(
            "--importance/--no-importance",
            help="Measure how much attention changes in each layer. An allocator such as squeeze does so while the "
            "prompt runs; for others the prompt runs a second time.",
        ),
    ] = True,
    chat: Chat = False,
    dtype: words.Dtype = "auto",
    device: words.Device = "",
    json: words.Json = False,
) -> None:
    """Run a prompt under a policy, and show the layers and the tokens kept over the text itself.

    The prompt comes from the argument, a file or standard input. With no prompt, the embedded model gets a sample.
    In a terminal with colours the tokens are coloured; elsewhere marks stand under the text. --html writes one page
    that needs no network.
    """
    lenient()
    text, is_sample = read_prompt(prompt, file, model)
    from kvpolicy.cli.inspection import look
    from kvpolicy.cli.models import load
    from kvpolicy.policy import Policy

    name = str(Policy.parse(policy))  # a wrong one is told before the model is loaded
    loaded, tokenizer = load(model, dtype, device)
    ids = encode(tokenizer, text, chat)
    check_length(loaded, ids.shape[1], new)
    seen = look(loaded, tokenizer, ids, name, name=model, new=new, importance=importance)
    if layer is not None:
        seen.place(layer)
    if html is not None:
        from kvpolicy.cli.inspection_page import write_page

        write_page(seen, html)
    if json:
        print(as_json("inspect", seen.as_dict()))
        return
    for line in remarks(model, ids.shape[1], is_sample):
        print(line, file=sys.stderr)
    if html is None:
        from kvpolicy.cli.inspection_text import show

        show(seen, layer)
    else:
        print(f"Written to {html}: open it in a browser.")
