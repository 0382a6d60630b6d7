"""The tables of the page of supported models, from results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from kvpolicy_eval.common.markdown import table
from kvpolicy_eval.common.results import Known, Result
from kvpolicy_eval.families.aliases import aliases
from kvpolicy_eval.families.check import FAILED, PLANNED, REFUSED, RIGHT, VERDICTS
from kvpolicy_eval.families.entries import CAUSAL, IMAGE, KINDS, Entry, counted, counted_version, newer
from kvpolicy_eval.families.reasons import REASONS, reason_of

COUNTS = "families-counts"
REASONS_PLACE = "families-reasons"
NAMES = "families"
NEWER = "families-newer"
PLACES = (COUNTS, REASONS_PLACE, NAMES, NEWER)
"""The places of the page that this room fills."""

_KINDS = {CAUSAL: "text", IMAGE: "text and pictures"}


def tables(known: Known) -> dict[str, str]:
    """The content of each place.

    Args:
        known: A result for each entry, by its key.
    """
    entries = [entry for entry in counted() if entry.key in known]
    made = ", ".join(sorted({known[entry.key].get("made", "") for entry in entries}))
    return {
        COUNTS: f"{counts(entries, known)}\n\n{len(entries)} entries of transformers {counted_version()}. {made}.",
        REASONS_PLACE: refusals(entries, known),
        NAMES: names(entries, known),
        NEWER: names(newer(), known),
    }


def counts(entries: Iterable[Entry], known: Known) -> str:
    """How many entries of each kind have each verdict."""
    found = Counter((entry.kind, known[entry.key]["verdict"]) for entry in entries)
    shown = [verdict for verdict in VERDICTS if any(found[kind, verdict] for kind in KINDS)]
    rows = [[verdict, *(found[kind, verdict] for kind in KINDS)] for verdict in shown]
    return table(["", *(_KINDS[kind] for kind in KINDS)], rows)


def refusals(entries: Iterable[Entry], known: Known) -> str:
    """The reasons for refusals, with the names that they concern."""
    concerned: dict[str, dict[str, None]] = {reason: {} for reason in REASONS}
    for entry in entries:
        if known[entry.key]["verdict"] == REFUSED:
            concerned[reason_of(known[entry.key]["sentence"])][f"`{entry.name}`"] = None
    rows = [[reason, len(found), ", ".join(found)] for reason, found in concerned.items() if found]
    return table(["reason", "names", "of transformers"], rows)


def names(entries: Iterable[Entry], known: Known) -> str:
    """A row for each name: what people call its models, whether they run, and the bytes planned and held."""
    found: dict[str, dict[str, Result]] = {}
    for entry in entries:
        if entry.key in known:
            found.setdefault(entry.name, {})[entry.kind] = known[entry.key]
    called = aliases()
    rows = [
        [", ".join(called.get(name, [])), f"`{name}`", *(answer(by_kind.get(kind)) for kind in KINDS), held(by_kind)]
        for name, by_kind in sorted(found.items())
    ]
    heads = [
        "models",
        "name in transformers",
        *(_KINDS[kind] for kind in KINDS),
        f"bytes planned and held, `{PLANNED}`",
    ]
    return table(heads, rows)


def answer(result: Result | None) -> str:
    """Whether a model runs, for a reader of the page.

    >>> answer({"verdict": "refused", "sentence": "A Falcon must use rotary embeddings, got one with ALiBi."})
    'no: ALiBi'
    """
    if result is None:
        return ""
    verdict = result["verdict"]
    if verdict == RIGHT:
        return "yes"
    if verdict == REFUSED:
        return f"no: {reason_of(result['sentence'])}"
    return f"{verdict}: {result['sentence']}"


def held(by_kind: Mapping[str, Result]) -> str:
    """Bytes that were planned from the config alone, and those held; one number where they are equal.

    >>> found = {"planned": {"nbytes": 1000}, "policies": {"snapkv@0.5": {"nbytes": 1000}}}
    >>> held({"causal": {"verdict": "right", **found}})
    '1,000'
    """
    found = [bytes_of(result) for result in by_kind.values() if result["verdict"] == RIGHT]
    shown = (
        "" if pair is None else f"{pair[0]:,}" if pair[0] == pair[1] else f"{pair[0]:,}, {pair[1]:,}" for pair in found
    )
    return "; ".join(dict.fromkeys(filter(None, shown)))


def bytes_of(result: Result) -> tuple[int, int] | None:
    """Bytes planned and held of a result that has both."""
    planned = result.get("planned", {}).get("nbytes")
    measured = result.get("policies", {}).get(PLANNED, {}).get("nbytes")
    return None if planned is None or measured is None else (planned, measured)


def faults(entries: Sequence[Entry], known: Known) -> list[str]:
    """What is wrong with results, a line each."""
    return [f"{entry.key}: {fault}" for entry in entries for fault in faults_of(known[entry.key])]


def faults_of(result: Result) -> Iterator[str]:
    """What is wrong with a result: an accepted model that is not right, a refusal without a reason, a wrong plan."""
    verdict = result["verdict"]
    planned = result.get("planned", {})
    if verdict in FAILED:
        yield f"{verdict}: {result['sentence']}"
    elif verdict == REFUSED:
        if not reason_of(result["sentence"]):
            yield f"the page has no reason for: {result['sentence']}"
        if "attached" not in result and planned.get("refused") != result["sentence"]:
            yield f"attach and plan must say the same, and plan says {planned}: {result['sentence']}"
    elif verdict == RIGHT:
        pair = bytes_of(result)
        if "nbytes" not in planned:
            yield f"attach accepts it, and plan says {planned}"
        elif pair is not None and pair[0] != pair[1]:
            yield f"plan says {pair[0]:,} bytes, and the cache holds {pair[1]:,}"
