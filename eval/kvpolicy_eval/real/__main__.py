"""`python -m kvpolicy_eval.real`: policies on a model with real weights.

The model is what `from_pretrained` takes: a name on the hub, a folder, or a folder with a GGUF file. The embedded
models have learned their tasks from scratch and say little about outlier channels, many languages or many heads; this
command says whether an order that they show holds elsewhere.
"""

from __future__ import annotations

import argparse

import torch

from kvpolicy_eval.common.markdown import add_fill_argument, publish
from kvpolicy_eval.common.results import add_results_arguments, check_results, parse_checked
from kvpolicy_eval.real.measure import RealModel
from kvpolicy_eval.real.page import rows
from kvpolicy_eval.real.policies import POLICIES
from kvpolicy_eval.real.prompts import ALL, TOKENS


def main(argv: list[str] | None = None) -> None:
    """Measure what is not known, print the table, and fill a page with it on request."""
    parser = argparse.ArgumentParser(
        prog="python -m kvpolicy_eval.real", description=(__doc__ or "").split("\n\n", maxsplit=1)[0]
    )
    parser.add_argument("--model", required=True, help="name on the hub, or folder")
    parser.add_argument("--gguf", metavar="NAME", help="GGUF file in the folder; needs the package gguf")
    add_results_arguments(parser)
    parser.add_argument("--only", nargs="+", metavar="POLICY", default=POLICIES, help="policies, instead of all")
    parser.add_argument("--tasks", nargs="+", choices=ALL, default=ALL, help="what to measure and show, instead of all")
    parser.add_argument("--n", type=int, default=100, help="prompts per task")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="rough length of documents, where a task has no own")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--table", metavar="NAME", default="real", help="name of the table in the page of --fill")
    add_fill_argument(parser, "real")
    args = parse_checked(parser, argv, lambda args: check_results(args, args.table))
    torch.set_num_threads(args.threads)
    model = RealModel(args.model, args.gguf, args.results, args.n, getattr(torch, args.dtype), args.tokens)
    if not args.page_only:
        model.measure(args.only, args.tasks)
    publish(rows(model, args.only, args.tasks), args.table, args.fill)


if __name__ == "__main__":
    main()
