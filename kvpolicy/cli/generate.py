"""`kvpolicy generate`: let a model write under a policy, and say what that took; or compare policies on one prompt."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvpolicy.cli import words
from kvpolicy.cli.printing import as_json
from kvpolicy.cli.prompts import check_length, encode, read_prompt, remarks

if TYPE_CHECKING:
    from kvpolicy.cli.writing import Options, Written

NEW, SAMPLE_NEW = 64, 5
"""Tokens to generate where none are asked: as many as the sample's answer has, or more."""

PromptText = Annotated[
    str | None, typer.Argument(metavar="PROMPT", help="The text, or - for standard input.", show_default=False)
]
PromptFile = Annotated[str | None, typer.Option("--file", metavar="FILE", help="Read the prompt from a UTF-8 file.")]
PolicyName = Annotated[
    str, typer.Option("--policy", metavar="POLICY", help="Or full.", autocompletion=words.complete_policy)
]
Chat = Annotated[bool, typer.Option("--chat", help="Put the prompt into the tokenizer's chat template.")]


def generate(
    prompt: PromptText = None,
    file: PromptFile = None,
    model: words.Model = words.TINY,
    policy: PolicyName = words.POLICY,
    compare: Annotated[
        list[str] | None,
        typer.Option(
            metavar="POLICY",
            help="Run this policy too, such as full, and show both; may be repeated.",
            autocompletion=words.complete_policy,
        ),
    ] = None,
    new: Annotated[
        int | None,
        typer.Option(min=1, metavar="TOKENS", help=f"Tokens at most: {NEW}, or {SAMPLE_NEW} for the sample."),
    ] = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="Of the draws; 0 takes the likeliest token.")] = 0.0,
    seed: Annotated[int, typer.Option(min=-(2**63), max=2**64 - 1, help="Of the draws.")] = 0,
    chat: Chat = False,
    dtype: words.Dtype = "auto",
    device: words.Device = "",
    json: words.Json = False,
) -> None:
    """Let a model write under a policy; at the end, say what it kept, its bytes and its speed.

    The prompt comes from the argument, a file or standard input, where one newline at the end is left out. With no
    prompt, the embedded model gets a sample. The text goes to standard output as it comes, all else to standard error.
    Ctrl-C ends the text, and the exit code is then 130.
    """
    lenient()
    text, is_sample = read_prompt(prompt, file, model)
    names = [_shown(name) for name in (policy, *(compare or ()))]
    from kvpolicy.cli.models import load
    from kvpolicy.cli.writing import Options

    options = Options(new=new or (SAMPLE_NEW if is_sample else NEW), temperature=temperature, seed=seed)
    loaded, tokenizer = load(model, dtype, device)
    ids = encode(tokenizer, text, chat)
    check_length(loaded, ids.shape[1], options.new)
    if not json:
        _say(*remarks(model, ids.shape[1], is_sample))
    runs = _run(loaded, tokenizer, ids, names, options, quiet=json)
    if json:
        print(as_json("generate", _facts(model, ids.shape[1], runs)))
    if runs[-1].interrupted:
        raise typer.Exit(130)


def _shown(policy: str) -> str:
    """A policy's words as it says them itself, so that a wrong one is told before a model is loaded."""
    from kvpolicy.policy import Policy

    return str(Policy.parse(policy))


def lenient() -> None:
    """Print a question mark for a letter that standard output cannot carry, rather than stop."""
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="replace")


def _say(*lines: str) -> None:
    for line in lines:
        print(line, file=sys.stderr, flush=True)


def _run(
    model: Any, tokenizer: Any, ids: Any, policies: list[str], options: Options, *, quiet: bool = False
) -> list[Written]:
    """Run the policies one after the other, and show them unless all is to be JSON."""
    from kvpolicy.cli.writing import warm_up, write

    if len(policies) == 1 and not quiet:
        return [_stream(model, tokenizer, ids, policies[0], options)]
    runs: list[Written] = []
    for policy in policies:
        if not quiet and sys.stderr.isatty():
            _say(f"{policy} ...")
        warm_up(model, tokenizer, ids, policy)
        runs.append(write(model, tokenizer, ids, policy, options))
        if runs[-1].interrupted:
            break
    if not quiet:
        from kvpolicy.cli.beside import show

        show(runs)
    return runs


def _stream(model: Any, tokenizer: Any, ids: Any, policy: str, options: Options) -> Written:
    from transformers import TextStreamer

    from kvpolicy.cli.beside import summary
    from kvpolicy.cli.writing import warm_up, write

    def streamer() -> Any:
        return TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)

    warm_up(model, tokenizer, ids, policy)
    run = write(model, tokenizer, ids, policy, options, streamer)
    _say("", summary(run))
    return run


def _facts(model: str, prompt: int, runs: list[Written]) -> dict[str, Any]:
    from kvpolicy.cli.beside import parts_at

    first = runs[0]
    others = [{"policy": run.policy, "parts_after_tokens": parts_at(first, run)} for run in runs[1:]]
    return {
        "model": model,
        "prompt_tokens": prompt,
        "runs": [run.as_dict() for run in runs],
        "compared_with_the_first": others,
    }
