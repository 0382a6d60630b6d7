"""`kvpolicy-eval report`: write the results of a sweep as a self-contained HTML page, and as Markdown."""

from __future__ import annotations

import argparse
from pathlib import Path

from kvpolicy.text.output import check_output, has_marker
from kvpolicy_eval.common.markdown import add_fill_argument
from kvpolicy_eval.common.results import add_force_argument

MARKER = "kvpolicy-eval report"
"""What pages and Markdown say of their origin; such files are replaced."""
COMMENT = f"<!-- {MARKER} -->"
"""The first line of Markdown."""


def add(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("folder", metavar="DIR", type=Path, help="folder of a sweep")
    parser.add_argument("--out", type=Path, help="output file of the HTML page; DIR/report.html by default")
    parser.add_argument("--markdown", type=Path, help="output file for the same report as Markdown; none by default")
    add_fill_argument(parser, "SWEEP-SECTION, such as squeeze-bytes")
    add_force_argument(parser)
    parser.add_argument("--no-page", action="store_true", help="write no HTML page, so that matplotlib is not needed")


def run(args: argparse.Namespace) -> None:
    """Write the page, and Markdown on request.

    Raises:
        ValueError: If the folder holds no finished cell, or something else would be replaced.
        ImportError: If matplotlib is missing.
    """
    from kvpolicy_eval.report.gather import gather
    from kvpolicy_eval.sweep.cells import write

    path = args.out or args.folder / "report.html"
    if not args.no_page:
        _check(path, args)
    if args.markdown:
        _check(args.markdown, args)
    if args.markdown and not args.no_page and args.markdown.resolve() == path.resolve():
        raise ValueError(f"--markdown must be another file than --out, got {args.markdown} twice; try another name.")
    findings = gather(args.folder)
    if args.markdown or args.fill:
        from kvpolicy_eval.report.markdown import fill_sections, markdown

        if args.markdown:
            write(args.markdown, f"{COMMENT}\n\n{markdown(findings)}")
            print(args.markdown)
        if args.fill:
            fill_sections(args.fill, findings)
            print(args.fill)
    if not args.no_page:
        from kvpolicy_eval.report.page import page

        write(path, page(findings))
        print(path)


def _check(path: Path, args: argparse.Namespace) -> None:
    """Refuse to write over anything but a report."""
    inputs = [args.folder, args.fill]
    own = "a report of a sweep"
    check_output(path, own, inputs=inputs, is_own=lambda given: has_marker(given, MARKER), force=args.force)
