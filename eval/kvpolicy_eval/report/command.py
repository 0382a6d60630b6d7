"""`kvpolicy-eval report`: write the results of a sweep as a self-contained HTML page, and as Markdown."""

from __future__ import annotations

import argparse
from pathlib import Path

from kvpolicy_eval.common.markdown import add_fill_argument


def add(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("folder", metavar="DIR", type=Path, help="folder of a sweep")
    parser.add_argument("--out", type=Path, help="output file of the HTML page; DIR/report.html by default")
    parser.add_argument("--markdown", type=Path, help="output file for the same report as Markdown; none by default")
    add_fill_argument(parser, "SWEEP-SECTION, such as squeeze-bytes")
    parser.add_argument("--no-page", action="store_true", help="write no HTML page, so that matplotlib is not needed")


def run(args: argparse.Namespace) -> None:
    """Write the page, and Markdown on request.

    Raises:
        ValueError: If the folder holds no finished cell.
        ImportError: If matplotlib is missing.
    """
    from kvpolicy_eval.report.gather import gather
    from kvpolicy_eval.sweep.cells import write

    findings = gather(args.folder)
    if args.markdown or args.fill:
        from kvpolicy_eval.report.markdown import fill_sections, markdown

        if args.markdown:
            write(args.markdown, markdown(findings))
            print(args.markdown)
        if args.fill:
            fill_sections(args.fill, findings)
            print(args.fill)
    if not args.no_page:
        from kvpolicy_eval.report.page import page

        path = args.out or args.folder / "report.html"
        write(path, page(findings))
        print(path)
