"""`kvpolicy-eval sweep`: run the cells of a config that are missing, and tell what was found."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any

NOTES = "sweep.json"
_hidden: list[Any] = []  # what hides bars, once it does


def add(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.epilog = (
        "Under a launcher, `accelerate launch -m kvpolicy_eval.cli sweep CONFIG`, the processes divide the examples of "
        "each cell; with tp in the config, `torchrun` or `deepspeed` divides the model."
    )
    parser.add_argument("config", metavar="CONFIG", help="a YAML file, or the bare name of a shipped one")
    parser.add_argument("--out", type=Path, help="folder of the results, in place of the config's")
    parser.add_argument("--jobs", type=int, default=1, help="local processes, each of which runs whole cells")
    parser.add_argument("--retry", action="store_true", help="run cells again that failed")
    parser.add_argument("--limit", type=int, help="the most examples of each task, in place of the config's")
    parser.add_argument("--plan", action="store_true", help="only say which cells would run")
    parser.add_argument("--verbose", action="store_true", help="show what lm-eval and its libraries say")


def run(args: argparse.Namespace) -> int:
    """Run the sweep, and write the tidy table.

    Returns:
        0, or 1 where a cell failed.

    Raises:
        ValueError: Where the config cannot be used, or the folder holds another sweep.
    """
    if not args.verbose:
        quiet()
    import dataclasses

    from kvpolicy_eval.sweep.cells import Store
    from kvpolicy_eval.sweep.config import load

    config = load(args.config)
    if args.limit is not None:
        if args.limit < 1:
            raise ValueError(f"The limit is {args.limit}: give a whole number of at least 1.")
        config = dataclasses.replace(config, limit=args.limit)
    if args.jobs < 1:
        raise ValueError(f"There cannot be {args.jobs} jobs: give 1 or more.")
    folder = Path(args.out or config.output or Path("results") / config.name)
    cells, store = config.cells(), Store(folder)
    states = {cell: store.state(cell) for cell in cells}
    wanted = {"missing", "failed"} if args.retry else {"missing"}
    waiting = [cell for cell in cells if states[cell] in wanted]
    first = os.environ.get("RANK", "0") == "0"
    if first:
        _tell(folder, states, waiting)
    if args.plan:
        print(*(f"{states[cell]:8}{cell}" for cell in cells), sep="\n")
        return 0
    same_settings(folder, config)
    if first:
        note(folder, config)
    return _measure(args, config, waiting, folder) if waiting else _finish(folder, first)


def _measure(args: argparse.Namespace, config: Any, waiting: list[Any], folder: Path) -> int:
    from kvpolicy_eval.sweep.run import run_here, run_jobs

    if args.jobs > 1 and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("A launcher has started several processes already: leave --jobs out.")
    if args.jobs > 1:
        run_jobs(config, waiting, folder, args.jobs)
    else:
        run_here(config, waiting, folder)
    return _finish(folder, os.environ.get("RANK", "0") == "0")


def _finish(folder: Path, first: bool) -> int:
    """Write the tables; the exit code says whether all is well."""
    from kvpolicy_eval.sweep.tidy import collect, write_tables

    if not first:
        return 0
    rows = collect(folder)
    write_tables(folder, rows)
    failed = [row for row in rows if row.status == "failed"]
    print(f"{folder}/table.csv and table.jsonl: {len(rows)} lines, {len(failed)} of them of failed cells.")
    return int(bool(failed))


def _tell(folder: Path, states: dict[Any, str], waiting: list[Any]) -> None:
    counts = [f"{list(states.values()).count(state)} {state}" for state in ("done", "failed", "missing")]
    print(f"{folder}: {', '.join(counts)}; {len(waiting)} to run", file=sys.stderr, flush=True)


def same_settings(folder: Path, config: Any) -> None:
    """Refuse to put cells into one table that were measured differently; where none is done, nothing was.

    Raises:
        ValueError: Where the folder's settings are others.
    """
    from kvpolicy_eval.sweep.cells import Store, load_json

    notes = folder / NOTES
    before = load_json(notes)["settings"] if notes.is_file() else {}
    if not Store(folder).holds_results():
        return
    now = json.loads(json.dumps(config.settings()))
    for key, value in now.items():
        old = before.get(key, value)
        if key == "models":
            value, old = ({name: said[name] for name in value if name in old} for said in (value, old))
        if old != value:
            raise ValueError(
                f"{folder} holds results with {key} {json.dumps(old)}, and the config says {json.dumps(value)}: "
                "give another --out, or remove the folder."
            )


def note(folder: Path, config: Any) -> None:
    """Write the config, and the command among those of earlier runs."""
    import dataclasses

    from kvpolicy.spec.formats import stamp
    from kvpolicy_eval.sweep.cells import FORMAT, load_json, write

    place = folder / NOTES
    before: dict[str, Any] = load_json(place) if place.is_file() else {}
    launcher = ["accelerate", "launch", "-m"] if "ACCELERATE_MIXED_PRECISION" in os.environ else []
    name = "kvpolicy_eval.cli" if launcher else "kvpolicy-eval"
    line = shlex.join([*launcher, name, *sys.argv[1:]])
    commands = list(dict.fromkeys([*before.get("commands", []), line]))
    settings = config.settings()
    settings["models"] = before.get("settings", {}).get("models", {}) | settings["models"]
    content = stamp(FORMAT) | {"settings": settings, "config": dataclasses.asdict(config), "commands": commands}
    write(place, json.dumps(content, indent=1))


def quiet() -> None:
    """Hold back bars, warnings and notes of the libraries; errors are kept with their cells."""
    import logging
    import warnings

    from tqdm import tqdm

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    bars: Any = tqdm
    start = bars.__init__

    def hidden(bar: Any, *args: Any, **kwargs: Any) -> None:  # lm-eval says disable=False, which outdoes TQDM_DISABLE
        start(bar, *args, **kwargs | {"disable": True})

    if not _hidden:
        _hidden.append(hidden)
        bars.__init__ = hidden
