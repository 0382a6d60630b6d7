"""`kvpolicy generate`: generate text under a policy, and report time and memory; or compare several policies."""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvpolicy.cli import arguments
from kvpolicy.cli.arguments import TINY, complete_policy
from kvpolicy.cli.formatting import as_json
from kvpolicy.cli.model_loading import check_length, encode, prompt_notes, read_prompt
from kvpolicy.text.errors import KVPolicyError
from kvpolicy.text.limits import LEAST_TOKENS

if TYPE_CHECKING:
    from kvpolicy.cli.generation import GeneratedText, GenerationOptions

NEW_TOKENS = 64
"""The default number of new tokens."""

SAMPLE_NEW_TOKENS = 5
"""The default number of new tokens for the built-in sample, which is the length of its answer."""

GAMMA = 4
"""The default number of tokens to draft before each verification."""

PromptText = Annotated[
    str | None, typer.Argument(metavar="PROMPT", help="The prompt, or - for standard input.", show_default=False)
]
PromptFile = Annotated[str | None, typer.Option("--file", metavar="FILE", help="Read the prompt from a UTF-8 file.")]
PolicyName = Annotated[
    str,
    typer.Option(
        "--policy", metavar="POLICY", help="Policy spec; full keeps everything.", autocompletion=complete_policy
    ),
]
Chat = Annotated[bool, typer.Option("--chat", help="Apply the chat template of the tokenizer to the prompt.")]


def generate(
    prompt: PromptText = None,
    file: PromptFile = None,
    model: arguments.Model = TINY,
    policy: PolicyName = arguments.POLICY,
    compare: Annotated[
        list[str] | None,
        typer.Option(
            metavar="POLICY",
            help="Another policy to run on the same prompt and compare, such as full. May be repeated.",
            autocompletion=complete_policy,
        ),
    ] = None,
    speculate: Annotated[
        str | None,
        typer.Option(
            metavar="POLICY",
            help="Generate the text of the full cache, with verified drafts from a cache under this policy.",
            autocompletion=complete_policy,
            show_default=False,
        ),
    ] = None,
    gamma: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="TOKENS",
            help=f"Tokens to draft before each verification, with --speculate; {GAMMA} by default.",
            show_default=False,
        ),
    ] = None,
    least: Annotated[int | None, arguments.least_option("for the sample")] = None,
    new: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="TOKENS",
            help=f"Maximum number of new tokens. By default {NEW_TOKENS}, or {SAMPLE_NEW_TOKENS} for the sample.",
        ),
    ] = None,
    temperature: Annotated[
        float, typer.Option(min=0.0, metavar="FLOAT", help="Sampling temperature; 0 for greedy decoding.")
    ] = 0.0,
    seed: arguments.Seed = 0,
    chat: Chat = False,
    tile: arguments.Tile = "auto",
    hold_codes: arguments.HoldCodes = False,
    compile: arguments.Compile = False,
    dtype: arguments.Dtype = "auto",
    device: arguments.Device = "",
    json: arguments.Json = False,
) -> None:
    """Generate text under a policy, or compare policies.

    The prompt is the argument, a file or standard input; one newline at the end of a file or of standard input is
    removed. Without a prompt, the embedded model gets a sample. The text is streamed to standard output, or with
    --speculate printed at the end. With --compile, the first step of the answer waits for the compilation. Kept tokens,
    bytes and speed follow on standard error. Ctrl-C stops the generation, with exit code 130.
    """
    tile_size = arguments.tile_of(tile)  # an invalid size raises an error before anything is read
    text, is_sample = read_prompt(prompt, file, model)
    is_given = least is not None
    least = (0 if is_sample else LEAST_TOKENS) if least is None else least
    policies = [_canonical(name, least) for name in (policy, *(compare or ()))]
    drafter = None if speculate is None else _canonical(speculate)
    if drafter is not None and (
        compare or is_given or policies[0] not in ("full", _canonical(arguments.POLICY, least))
    ):
        raise KVPolicyError(
            "--speculate must be given without --policy, --least and --compare, since its text is that of the full "
            "cache; try another command for the other policies."
        )
    if gamma is not None and drafter is None:
        raise KVPolicyError(
            f"--gamma must be given with --speculate, got {gamma} alone; try --speculate {policies[0]}."
        )
    if drafter is not None and compile:
        raise KVPolicyError(
            "--compile must be given without --speculate, whose drafts and verification are not compiled; try one of "
            "them."
        )
    if drafter is not None and (hold_codes or tile_size not in ("auto", None)):
        raise KVPolicyError(
            f"{'--hold-codes' if hold_codes else '--tile'} must be given without --speculate, which reads a prompt as "
            "a whole; try it without."
        )
    if not math.isfinite(temperature):
        raise KVPolicyError(f"--temperature must be finite, got {temperature}; try 1.0.")
    from kvpolicy.cli.generation import GenerationOptions
    from kvpolicy.cli.model_loading import load

    new_tokens = new or (SAMPLE_NEW_TOKENS if is_sample else NEW_TOKENS)
    hold = arguments.hold_of(hold_codes)
    options = GenerationOptions(
        new=new_tokens,
        temperature=temperature,
        seed=seed,
        tile=tile_size,
        hold=hold,
        compile=arguments.compile_of(compile),
    )
    loaded, tokenizer = load(model, dtype, device)
    ids = encode(tokenizer, text, chat)
    check_length(loaded, ids.shape[1], options.new)
    if not json:
        _print_to_stderr(*prompt_notes(model, ids.shape[1], is_sample))
    if drafter is not None:
        _speculate(loaded, tokenizer, ids, drafter, gamma or GAMMA, options, model if json else None)
        return
    runs = _run(loaded, tokenizer, ids, policies, options, quiet=json)
    if json:
        print(as_json("generate", _facts(model, ids.shape[1], runs)))
    if runs[-1].interrupted:
        raise typer.Exit(130)


def _canonical(policy: str, least: int = 0) -> str:
    """Return a spec in its canonical form; an invalid one raises an error before a model is loaded.

    Args:
        policy: The spec.
        least: The least number of tokens of a budget that is a fraction; 0 for none.
    """
    from kvpolicy.policy import Policy
    from kvpolicy.policy.model_policy import keep_at_least

    return str(keep_at_least(Policy.parse(policy), least))


def _print_to_stderr(*lines: str) -> None:
    for line in lines:
        print(line, file=sys.stderr, flush=True)


def _run(
    model: Any, tokenizer: Any, ids: Any, policies: list[str], options: GenerationOptions, *, quiet: bool = False
) -> list[GeneratedText]:
    """Run the policies one after the other, and print the texts unless `quiet`."""
    from kvpolicy.cli.generation import generate_text, warm_up

    if len(policies) == 1 and not quiet:
        return [_stream(model, tokenizer, ids, policies[0], options)]
    runs: list[GeneratedText] = []
    for policy in policies:
        if not quiet and sys.stderr.isatty():
            _print_to_stderr(f"{policy} ...")
        warm_up(model, tokenizer, ids, policy)
        runs.append(generate_text(model, tokenizer, ids, policy, options))
        if runs[-1].interrupted:
            break
    if not quiet:
        from kvpolicy.cli.generation import show

        show(runs)
    return runs


def _stream(model: Any, tokenizer: Any, ids: Any, policy: str, options: GenerationOptions) -> GeneratedText:
    """Run one policy, and print the text while it is generated."""
    from kvpolicy.cli.generation import TextPrinter, generate_text, summary, warm_up

    warm_up(model, tokenizer, ids, policy)
    run = generate_text(model, tokenizer, ids, policy, options, lambda: TextPrinter(tokenizer))
    _print_to_stderr("", summary(run))
    return run


def _speculate(
    model: Any, tokenizer: Any, ids: Any, policy: str, gamma: int, options: GenerationOptions, name: str | None
) -> None:
    """Generate with drafts, and print the text and the counts; as JSON with a `name` of the model."""
    from kvpolicy.cli.generation import speculate_text, speculation_summary

    run = speculate_text(model, tokenizer, ids, policy, gamma, options)
    if name is not None:
        print(as_json("generate", {"model": name, "prompt_tokens": ids.shape[1], "speculation": run.as_dict()}))
        return
    print(run.text)
    _print_to_stderr("", speculation_summary(run))


def _facts(model: str, prompt: int, runs: list[GeneratedText]) -> dict[str, Any]:
    from kvpolicy.cli.generation import first_difference

    first = runs[0]
    others = [{"policy": run.policy, "parts_after_tokens": first_difference(first, run)} for run in runs[1:]]
    return {
        "model": model,
        "prompt_tokens": prompt,
        "runs": [run.as_dict() for run in runs],
        "compared_with_the_first": others,
    }
