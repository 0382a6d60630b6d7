"""`kvpolicy serve`: answer requests of OpenAI clients, with a policy attached to the model."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Annotated, Any

import typer

from kvpolicy.cli import arguments
from kvpolicy.cli.arguments import TINY, check_order
from kvpolicy.text.formats import expanded
from kvpolicy.text.limits import LEAST_TOKENS

Least = Annotated[int | None, arguments.least_option("with --prefix, where the policy is that of the file")]
Port = Annotated[int, typer.Option(min=0, max=65535, metavar="PORT", help="Port; 0 for one that is free.")]
Host = Annotated[
    str, typer.Option(metavar="HOST", help="Address to listen on. By default only this machine can connect.")
]
AllowedHosts = Annotated[
    str,
    typer.Option(
        metavar="NAMES",
        help="Further names or addresses by which clients may call the server, separated by commas; * for all.",
    ),
]
PrefixFileName = Annotated[
    str | None,
    typer.Option(metavar="FILE", help="Saved cache that every request starts from, with its token ids."),
]
SharePrefix = Annotated[
    bool,
    typer.Option(
        "--share-prefix",
        help="Share the slots of --prefix between requests, which store only their own tokens and evict none of "
        "the prefix.",
    ),
]
PrefixCaching = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="Compute what prompts have in common at their beginning once, such as a system message, and hold at "
        "most so many bytes of it, uncompressed, such as 2GiB.",
    ),
]
Rows = Annotated[
    int | None,
    typer.Option(min=1, metavar="INT", help="Requests that are answered at a time, in one batch; 1 by default."),
]
Length = Annotated[
    int | None,
    typer.Option(
        min=2,
        metavar="TOKENS",
        help="The most tokens of a prompt and its answer. Several rows have room for so many each. By default the "
        "positions of the model.",
    ),
]
Memory = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="The most bytes of the cache of all rows, such as 4GiB. Without --rows, as many rows as fit.",
    ),
]
Ranks = Annotated[
    int,
    typer.Option(
        min=1,
        metavar="INT",
        help="Processes that share the model, each with a device of its own: those that torchrun started.",
    ),
]
PrefillShare = Annotated[
    float,
    typer.Option(metavar="SHARE", help="The part of the time that prompts may take while answers are generated."),
]
Queue = Annotated[int, typer.Option(min=0, metavar="INT", help="Answers that may wait for a row; more get status 429.")]
ApiKey = Annotated[
    str | None,
    typer.Option(
        envvar="KVPOLICY_API_KEY",
        show_envvar=False,
        metavar="KEY",
        help="Key that clients must send. KVPOLICY_API_KEY in the environment does the same.",
    ),
]
Quiet = Annotated[
    bool, typer.Option("--quiet", help="Do not show rows and tokens per second in the last line of a terminal.")
]


def serve(
    model: arguments.ModelName = TINY,
    policy: arguments.Policy = arguments.POLICY,
    policy_option: arguments.PolicyOption = "",
    least: Least = None,
    port: Port = 8000,
    host: Host = "127.0.0.1",
    allowed_hosts: AllowedHosts = "",
    tile: arguments.Tile = "auto",
    hold_codes: arguments.HoldCodes = False,
    compile: arguments.Compile = False,
    prefix: PrefixFileName = None,
    share_prefix: SharePrefix = False,
    prefix_caching: PrefixCaching = None,
    rows: Rows = None,
    length: Length = None,
    memory: Memory = None,
    tp: Ranks = 1,
    prefill_share: PrefillShare = 0.5,
    queue: Queue = 1024,
    api_key: ApiKey = None,
    quiet: Quiet = False,
    dtype: arguments.Dtype = "auto",
    device: arguments.Device = "",
) -> None:
    """Serve a model under a policy to OpenAI clients.

    The endpoints are /v1/chat/completions, /v1/completions, /v1/models, /health and /metrics. The usage of an answer
    has the kept tokens and the bytes of its cache. With --prefix, every prompt must begin with the tokens of the file,
    which are not computed again. A policy whose budget is a fraction, such as 0.2, keeps at least 1,024 tokens of a
    prompt, see --least. One request is answered at a time; with --rows, requests join and leave a batch, and every
    answer is the one that its request has alone. With --tp, several processes share the model by the plan of
    transformers, and the cache of --prefix. SIGTERM ends the server with exit code 0.
    """
    from kvpolicy.policy import Policy
    from kvpolicy.policy.model_policy import keep_at_least
    from kvpolicy.serving.access import check_names
    from kvpolicy.serving.capacity import Capacity, memory_of
    from kvpolicy.serving.prefix import PrefixFile, check_together
    from kvpolicy.serving.server import bind, following, log_to_terminal, run, serving
    from kvpolicy.serving.several_ranks import Channel, join_ranks, leave_ranks
    from kvpolicy.serving.status import show_status

    tile_size = arguments.tile_of(tile)
    check_order("serve", model)
    # An invalid spec or file raises an error before the model is loaded.
    default = LEAST_TOKENS if prefix is None else 0
    parsed = keep_at_least(
        Policy.parse(arguments.policy_of(policy, policy_option)), default if least is None else least
    )
    check_together(
        prefix=prefix is not None,
        shared=share_prefix,
        caching=prefix_caching is not None,
        rows=rows or 1,
        codes=hold_codes,
    )
    if tp > 1:
        _check_ranks(tp, {"--compile": compile, "--prefix-caching": prefix_caching, "--device": device})
    _check_key(api_key)
    prefix_memory = 0 if prefix_caching is None else memory_of("--prefix-caching", prefix_caching)
    file = None if prefix is None else PrefixFile(expanded(prefix), parsed, share_prefix, tp)
    capacity = Capacity(rows=rows, length=length, memory=memory, share=prefill_share, queue=queue)
    names = check_names(arguments.parse_names(allowed_hosts)) if allowed_hosts else ()
    from kvpolicy.cli.model_loading import load

    how: Any = {"tile": tile_size, "hold": arguments.hold_of(hold_codes), "capacity": capacity}
    how |= {"load": file and file.load}
    rank = 0 if tp == 1 else join_ranks(tp)
    if rank > 0:
        part, _ = load(model, dtype, device, text=False, tp=tp)
        following(part, str(parsed), Channel(), **how)
        leave_ranks()
        return
    with bind(host, port) as listener:
        loaded, tokenizer = load(model, dtype, device, tp=tp)
        how |= {"compile": arguments.compile_of(compile) if tp == 1 else False, "key": api_key}
        how |= {"prefix_memory": prefix_memory, "channel": None if tp == 1 else Channel(), "warm": True}
        with (
            serving(loaded, tokenizer, model, str(parsed), listener, allowed_hosts=(host, *names), **how) as server,
            nullcontext() if quiet else show_status(server.metrics),
            log_to_terminal(),  # above the status
        ):
            run(server, listener)
    if tp > 1:
        leave_ranks()


def _check_key(api_key: str | None) -> None:
    """Refuse a key that no client can send.

    Raises:
        KVPolicyError: If it is empty, or has a line break or spaces around it, which HTTP drops.
    """
    from kvpolicy.text.errors import KVPolicyError

    if api_key == "":
        raise KVPolicyError("--api-key must not be empty, got ''; try it without, or set the variable that it is from.")
    if api_key is not None and (api_key != api_key.strip() or not api_key.isprintable()):
        raise KVPolicyError(
            "--api-key must be printable characters without spaces around them, got others; try it without the line "
            "break at the end of a file."
        )


def _check_ranks(tp: int, others: dict[str, object]) -> None:
    """Refuse what several ranks do not do.

    Raises:
        KVPolicyError: If it is asked for.
    """
    from kvpolicy.text.errors import KVPolicyError

    given = [option for option, value in others.items() if value]
    if given:
        raise KVPolicyError(f"{given[0]} must be without --tp, got it with {tp} ranks; try without it.")
