"""`kvpolicy-eval report`: one page that opens from disk, and the same as Markdown."""

from __future__ import annotations

import argparse
from pathlib import Path


def add(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("folder", metavar="DIR", type=Path, help="of a sweep")
    parser.add_argument("--out", type=Path, help="the page; DIR/report.html by default")
    parser.add_argument("--markdown", type=Path, help="a file for the same as Markdown")
    parser.add_argument("--fill", type=Path, help="a page with places NAME-SECTION for tables, such as squeeze-bytes")
    parser.add_argument("--no-page", action="store_true", help="Markdown alone, which needs no plotting library")


def run(args: argparse.Namespace) -> None:
    """Write the page, and Markdown where asked.

    Raises:
        ValueError: Where the folder holds no finished cell.
        ImportError: Where matplotlib is missing.
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

        place = args.out or args.folder / "report.html"
        write(place, page(findings))
        print(place)
