"""`python -m kvpolicy_eval.board`: all methods and the best combinations at equal bytes.

Every policy answers the tasks with the question inside the compressed prompt, after it, and as a second one, at several
budgets and lengths. A result is kept in the file as soon as it is measured: a command that is interrupted continues.
With a page to fill, all rows are written to a .csv file beside the results, which the page filters and sorts.
"""

from __future__ import annotations

import argparse
import functools
from contextlib import nullcontext
from pathlib import Path

import torch

from kvpolicy.text.formats import replace_file
from kvpolicy.text.output import check_output, has_marker
from kvpolicy_eval.board import choices, places
from kvpolicy_eval.board.cells import DOCS, SHARES, Board, cells
from kvpolicy_eval.board.order import order
from kvpolicy_eval.board.page import full_cache, peer_refusals, refusals, tables, top
from kvpolicy_eval.board.peers import PEERS
from kvpolicy_eval.board.pictures import picture
from kvpolicy_eval.board.policies import Entry, entries, kind_of
from kvpolicy_eval.board.rows import COLUMNS, write_rows
from kvpolicy_eval.common.markdown import add_fill_argument, check_places, pages_with, publish
from kvpolicy_eval.common.results import add_force_argument, add_results_arguments, check_results, parse_checked
from kvpolicy_eval.data.tasks import LENGTHS
from kvpolicy_eval.peers.env import find
from kvpolicy_eval.peers.process import Process
from kvpolicy_eval.pictures.style import is_own, svg

TABLES = ("board-top", "board-order", "board-refused", "board-peers-refused")
"""Places of the page of the board."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m kvpolicy_eval.board", description=(__doc__ or "").split("\n\n")[0])
    add_results_arguments(parser)
    add_force_argument(parser)
    parser.add_argument("--model", default="tiny-4k", choices=["tiny", "tiny-4k"], help="the embedded model")
    parser.add_argument("--only", nargs="+", metavar="POLICY", help="specs without budgets, instead of all")
    parser.add_argument("--shares", nargs="+", type=float, default=SHARES, help="fractions of the full cache's bytes")
    parser.add_argument("--lengths", nargs="+", type=int, default=[*LENGTHS], help="prompt lengths in tokens")
    parser.add_argument("--n", type=int, help="prompts per task, instead of 8, and 4 of 4,096 tokens")
    parser.add_argument("--peers", action="store_true", help="measure methods of kvpress and transformers too")
    parser.add_argument("--env", help="folder of the peers' environment; in the user's cache by default")
    parser.add_argument("--no-times", action="store_true", help="do not time steps")
    parser.add_argument("--pictures", type=Path, help="folder to write the pictures to")
    parser.add_argument("--fill-full", type=Path, metavar="PAGE", help="page to write the answers of the full cache to")
    parser.add_argument(
        "--fill-places",
        type=Path,
        metavar="ROOT",
        help="source tree, in whose pages the tables by the place of the question and by situation are filled",
    )
    parser.add_argument(
        "--walks", type=Path, metavar="FILE", help="results of the long generation; walk.jsonl beside --results"
    )
    add_fill_argument(parser, *TABLES)
    return parser


def main(argv: list[str] | None = None) -> None:
    """Measure, print the tables, and fill a page with them on request."""
    args = parse_checked(_parser(), argv, _check)
    torch.set_num_threads(1)
    docs = {length: args.n or DOCS.get(length, 4) for length in args.lengths}
    board = Board(args.results, docs, args.model)
    shown = [*entries(args.model), *PEERS]
    if args.only:
        named = {entry.name: entry for entry in shown}
        shown = [named.get(spec) or Entry(spec, kind_of(spec)) for spec in args.only]
    listed = [entry for entry in shown if not entry.is_peer]
    peers = [entry for entry in shown if entry.is_peer]
    if not args.page_only:
        peer = Process("kvpolicy_eval.peers.theirs", find(args.env)) if args.peers else nullcontext()
        with peer as board.peer:
            for cell in cells(shown if args.peers else listed, args.shares, args.lengths):
                board.cell(cell)
        for share in [] if args.no_times else args.shares:
            for entry in listed:
                board.time(entry, share)
    shares = sorted(args.shares, reverse=True)
    print(tables(board, shown, shares, args.lengths), flush=True)
    publish(top(board, shown, shares), "board-top", args.fill)
    publish(order(board, listed, shares), "board-order", args.fill)
    if args.fill:
        write_rows(args.results.with_suffix(".csv"), board, shown, shares)
    publish(refusals(board, listed, shares, args.lengths), "board-refused", args.fill)
    publish(peer_refusals(board, peers, shares, args.lengths), "board-peers-refused", args.fill)
    publish(full_cache(board, args.lengths), "board-full", args.fill_full)
    if args.fill_places:
        places.fill_places(pages_with(args.fill_places, places.PLACE), board, entries(args.model), shares)
        walks = args.walks or args.results.with_name("walk.jsonl")
        choices.fill_choices(pages_with(args.fill_places, choices.PLACE), board, entries(args.model), walks)
    for length in args.lengths if args.pictures else ():
        drawn = svg(lambda n=length: picture(board, shown, shares, n))
        replace_file(args.pictures / f"board-{length}.svg", drawn)


def _check(args: argparse.Namespace) -> None:
    """Check the files and folders that are read and written at the end, before anything is measured or written.

    Raises:
        ValueError: If a page has no place for a table, there is no folder for the pictures, or no file of results to
            fill pages from.
    """
    check_results(args, *TABLES)
    check_places([args.fill_full] if args.fill_full else [], "board-full")
    for name in (places.PLACE, choices.PLACE) if args.fill_places else ():
        check_places(pages_with(args.fill_places, name), name)
    if args.fill:
        rows = args.results.with_suffix(".csv")
        own = functools.partial(has_marker, marker=",".join(COLUMNS[:4]))
        check_output(rows, "rows of the board", inputs=[args.results], is_own=own, force=args.force)
    for length in args.lengths if args.pictures else ():
        check_output(args.pictures / f"board-{length}.svg", "a picture of ours", is_own=is_own, force=args.force)
    if args.pictures and not args.pictures.is_dir():
        raise ValueError(f"--pictures must be an existing folder, got {args.pictures}.")


if __name__ == "__main__":
    main()
