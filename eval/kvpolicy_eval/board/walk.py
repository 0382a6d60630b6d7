"""`python -m kvpolicy_eval.board.walk`: a task with a long generation, which tells apart how policies decode.

The prompt is a ring of records, `tiger=lime`, each of whose values is the key of another one. Every answer is what the
next question asks for: `?tiger=lime`, `?lime=oak`. After a few passes along the ring, the records of a second ring come
as generated tokens, and from then on passes along either ring take turns, so that every record is needed again and
again after a pause. The right answer is fed whatever the model has said, so that one mistake is counted once. A budget
is a fraction of the bytes that the full cache holds at the end.

A result is kept in the file as soon as it is measured: a command that is interrupted continues.
"""

from __future__ import annotations

import argparse
from random import Random
from typing import Any, NamedTuple

import torch
from torch import Tensor

import kvpolicy
from kvpolicy import registry
from kvpolicy.embedded import tiny
from kvpolicy.hf.cache_names import cache_argument
from kvpolicy.text.embedded_names import EmbeddedName
from kvpolicy.text.errors import KVPolicyError
from kvpolicy_eval.board.cells import CHANCE, MARK, MARKED
from kvpolicy_eval.board.policies import SELECTORS
from kvpolicy_eval.common.markdown import add_fill_argument, publish, table
from kvpolicy_eval.common.results import (
    Known,
    Result,
    add_results_arguments,
    check_results,
    keep_result,
    parse_checked,
    read_results,
)
from kvpolicy_lm_eval.data.prompts import rings

SHARES = [0.05]
"""Budgets, in the order in which they are measured."""

MERGED = "h2o"
"""Selector that mergers are combined with."""

MORE = ("keydiff:every=16", "rkv:every=16", "h2o+tokenwise:bits=4", "keyformer+tokenwise:bits=4", "kvcrush/h2o")
"""Options and combinations."""


class Walk(NamedTuple):
    """A generation that every policy is asked for.

    Attributes:
        records: Records of each of the two rings.
        passes: Passes along a ring, one after the other; in each one, every record of it is asked for.
        first: How many of them come before the records of the second ring.
        walks: Walks, which are a batch.
        model: The embedded model.
    """

    records: int = 24
    passes: int = 18
    first: int = 4
    walks: int = 8
    model: EmbeddedName = "tiny-4k"

    @property
    def order(self) -> list[int]:
        """The ring of each pass, 0 or 1.

        >>> Walk(passes=6, first=3).order
        [0, 0, 0, 1, 0, 1]
        """
        return [0 if number < self.first else 1 - (number - self.first) % 2 for number in range(self.passes)]

    def key(self, policy: str, share: float) -> str:
        """Key of a result in the file."""
        return f"{policy} at {share:g} records={self.records} passes={self.passes} n={self.walks} {self.model}"


def policies() -> list[str]:
    """Policies that are compared: the full cache, selectors, mergers and a few combinations."""
    selectors = [SELECTORS.get(name, name).replace("{model}", "tiny-4k") for name in registry.SELECTORS]
    mergers = [f"{MERGED}+{name}" for name in registry.MERGERS if name != "drop"]
    return [*selectors, *mergers, *MORE]


class Texts(NamedTuple):
    """Walks as token ids.

    Attributes:
        prompt: The records of the first ring and the first question, [walks, P].
        steps: What is fed after each question, [walks, T]: the right answer, the records of the second ring at their
            time, and the next question.
    """

    prompt: Tensor
    steps: list[Tensor]

    @property
    def new(self) -> int:
        """Generated tokens of a walk."""
        return sum(step.shape[1] for step in self.steps)


def texts(walk: Walk, tokenizer: Any) -> Texts:
    """Draw rings; a word is one token, so that all walks are equally long."""
    prompts: list[list[int]] = []
    steps: list[list[list[int]]] = []
    for number in range(walk.walks):
        drawn = rings(Random(f"walk {number}"), 2, walk.records)
        asked = [word for ring in walk.order for word in drawn[ring][1]]
        answers = [word for ring in walk.order for word in [*drawn[ring][1][1:], drawn[ring][1][0]]]
        told = {walk.first * walk.records - 1: drawn[1][0]}
        prompts.append(tokenizer(f"{drawn[0][0]}?{asked[0]}=").input_ids)
        lines = [
            f"{answer}\n{told.get(hop, '')}?{following}="
            for hop, (answer, following) in enumerate(zip(answers, [*asked[1:], asked[0]], strict=True))
        ]
        steps.append([tokenizer(line, add_special_tokens=False).input_ids for line in lines])
    return Texts(torch.tensor(prompts), [torch.tensor(step) for step in zip(*steps, strict=True)])


@torch.inference_mode()
def measure(walk: Walk, policy: str, share: float, model: Any, given: Texts) -> Result:
    """Walk under a policy that holds at most a share of the bytes of the full cache at the end.

    Returns:
        `right`, answers of each walk; `passes`, the fraction of them in each pass; `held`; or `refused`, a message.
    """
    prompt = given.prompt.shape[1]
    full = kvpolicy.plan(model, "full", prompt=prompt + given.new, batch=walk.walks).nbytes
    sized = policy if policy == "full" else f"{policy}@{int(share * full)}B"
    right = torch.zeros(walk.walks, len(given.steps), dtype=torch.bool)
    try:
        with kvpolicy.attach(model, sized):
            cache = kvpolicy.PolicyCache(model, prompt=prompt, new=given.new)
            said = model(given.prompt, **cache_argument(model, cache), logits_to_keep=1).logits[:, -1].argmax(-1)
            held = cache.nbytes
            for hop, step in enumerate(given.steps):
                right[:, hop] = said == step[:, 0]
                for token in step.split(1, 1):
                    said = model(token, **cache_argument(model, cache)).logits[:, -1].argmax(-1)
                held = max(held, cache.nbytes)
    except KVPolicyError as error:
        return {"refused": str(error)}
    passes = [round(part.float().mean().item(), 3) for part in right.split(walk.records, 1)]
    return {"right": right.sum(1).tolist(), "passes": passes, "held": round(held / full, 4)}


def rows(walk: Walk, known: Known, listed: list[str], shares: list[float]) -> str:
    """The table: mean right answers of the walks, the lowest and the highest; what was refused is empty."""

    def cell(policy: str, share: float) -> str:
        found = known.get(walk.key(policy, share), {})
        if "right" not in found:
            return ""
        parts = [count / (walk.passes * walk.records) for count in found["right"]]
        return f"{sum(parts) / len(parts):.2f} ({min(parts):.2f}-{max(parts):.2f})"

    def last(policy: str, ring: int) -> str:
        """The last pass along a ring, at the smallest budget."""
        found = known.get(walk.key(policy, shares[-1]), {})
        passes = [share for number, share in zip(walk.order, found.get("passes", []), strict=False) if number == ring]
        return f"{passes[-1]:.2f}" if passes else ""

    def marked(policy: str, share: float) -> str:
        """The cell, with a mark if `random` answers more."""
        found, chance = (known.get(walk.key(each, share), {}) for each in (policy, CHANCE))
        below = "right" in found and "right" in chance and sum(found["right"]) < sum(chance["right"])
        return cell(policy, share) + (MARK if below else "")

    measured = [policy for policy in listed if any(cell(policy, share) for share in shares)]
    measured.sort(key=lambda policy: [cell(policy, share) for share in reversed(shares)], reverse=True)
    least = f"{shares[-1]:.0%}"
    names = ["policy", *(f"{share:.0%}" for share in shares), f"prompt's ring at last, {least}", f"other ring, {least}"]
    body = [
        [f"`{policy}`", *(marked(policy, share) for share in shares), last(policy, 0), last(policy, 1)]
        for policy in measured
    ]
    note = (
        f"`{walk.model}`, {walk.walks} texts of {walk.passes} passes along two rings of {walk.records} records: mean "
        "fraction of right answers, and the lowest and highest of the texts; then the last pass along each ring."
    )
    if any(MARK in text for line in body for text in line):
        note += f" {MARKED}"
    return f'<div class="sortable" markdown>\n\n{table(names, body)}\n\n</div>\n\n{note}'


def main(argv: list[str] | None = None) -> None:
    """Measure what is not known, print the table, and fill a page with it on request."""
    parser = argparse.ArgumentParser(
        prog="python -m kvpolicy_eval.board.walk", description=(__doc__ or "").split("\n\n")[0]
    )
    add_results_arguments(parser)
    parser.add_argument("--only", nargs="+", metavar="POLICY", help="specs without budgets, instead of all")
    parser.add_argument("--shares", nargs="+", type=float, default=SHARES, help="fractions of the full cache's bytes")
    parser.add_argument("--records", type=int, default=Walk().records, help="records of a ring")
    parser.add_argument("--passes", type=int, default=Walk().passes, help="passes along a ring")
    parser.add_argument("--n", type=int, default=Walk().walks, help="walks")
    add_fill_argument(parser, "walk")
    args = parse_checked(parser, argv, lambda args: check_results(args, "walk"))
    torch.set_num_threads(1)
    walk = Walk(args.records, args.passes, walks=args.n)
    known = read_results(args.results)
    listed = args.only or policies()
    missing = [(policy, share) for share in args.shares for policy in listed if walk.key(policy, share) not in known]
    if missing and not args.page_only:
        model, tokenizer = tiny(name=walk.model)
        given = texts(walk, tokenizer)
        for policy, share in missing:
            keep_result(args.results, known, walk.key(policy, share), measure(walk, policy, share, model, given))
    publish(rows(walk, known, listed, sorted(args.shares, reverse=True)), "walk", args.fill)


if __name__ == "__main__":
    main()
