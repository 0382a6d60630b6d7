"""`python -m kvpolicy_eval.tables.long_prompt`: memory of a long prompt on a large model, planned from its config."""

from __future__ import annotations

import argparse

from kvpolicy.spec.tables import format_bytes
from kvpolicy_eval.common.long_prompt import CARD, PROMPT, peaks
from kvpolicy_eval.common.markdown import add_fill_argument, publish, table


def rows() -> list[list[str]]:
    """One row for each way to read the prompt: the cache, the peak, and whether the card has room for it."""
    return [
        [
            peak.name,
            format_bytes(peak.cache),
            f"**{format_bytes(peak.nbytes)}**",
            "yes" if peak.nbytes <= CARD * 2**30 else "no",
        ]
        for peak in peaks()
    ]


def main(argv: list[str] | None = None) -> None:
    """Print the table, and fill pages with it on request."""
    parser = argparse.ArgumentParser(prog="python -m kvpolicy_eval.tables.long_prompt", description=__doc__)
    add_fill_argument(parser, "long-prompt", several=True)
    args = parser.parse_args(argv)
    names = [f"Llama-3.1-8B, {PROMPT:,} tokens", "cache", "peak while reading", f"fits in {CARD} GiB"]
    publish(table(names, rows()), "long-prompt", args.fill)


if __name__ == "__main__":
    main()
