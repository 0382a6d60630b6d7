"""`python -m kvpolicy_eval.notebooks`: run the notebooks of the documentation, and write their outputs."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from kvpolicy_eval.notebooks.execution import code_cells, read, run, text_of, write

FOLDER = Path("docs/notebooks")


def main() -> None:
    """Run all notebooks in `docs/notebooks`, or those that are given."""
    parser = argparse.ArgumentParser(prog="python -m kvpolicy_eval.notebooks", description=__doc__)
    parser.add_argument("paths", nargs="*", type=Path, help="notebooks; all by default")
    parser.add_argument("--check", action="store_true", help="write nothing, and fail if an output differs")
    args = parser.parse_args()
    different: list[str] = []
    for path in args.paths or sorted(FOLDER.glob("*.ipynb")):
        notebook = read(path)
        found = run(notebook, path)
        for number, (cell, outputs) in enumerate(zip(code_cells(notebook), found, strict=True), 1):
            if text_of(cell["outputs"]) != text_of(outputs):
                different.append(f"{path}[{number}]")
            cell["outputs"] = outputs
            cell["execution_count"] = number
        if not args.check:
            write(path, notebook)
    print("\n".join(different) or "All outputs are as they were.", file=sys.stderr)
    if args.check and different:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
