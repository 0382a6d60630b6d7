"""Requests in groups that are answered together: of one task, with as many tokens held back, behind one prefix."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from kvpolicy.text.errors import KVPolicyError
from kvpolicy_lm_eval.held_back import HeldBack, find_held_back
from kvpolicy_lm_eval.prefixes import Tokens, group_by_prefix

TaskGroups = dict[tuple[str, HeldBack], list[int]]
"""Indices of requests, by the name of their task and by what they hold back."""


def group_by_task(kind: str, requests: Sequence[Any], encode: Callable[[str], list[int]]) -> TaskGroups:
    """Group the requests of each task that hold back as many tokens.

    Args:
        kind: The type of the requests.
        requests: The requests of lm-eval.
        encode: Encodes a text as tokens.
    """
    groups: defaultdict[tuple[str, HeldBack], list[int]] = defaultdict(list)
    for index, request in enumerate(requests):
        task = getattr(request, "task_name", None) or "unknown"
        groups[task, find_held_back(kind, request, encode)].append(index)
    return groups


def join_tasks(groups: TaskGroups, batch_size: int | str) -> TaskGroups:
    """Join the tasks: processes wait for each other while they answer, and may have requests of different tasks.

    Raises:
        KVPolicyError: If each process would measure the batch size a different number of times.
    """
    if batch_size == "auto" and any(held_back.tokens for _, held_back in groups):
        raise KVPolicyError(
            "batch_size must be a number for tasks whose question is fed later, if several processes answer them, "
            "because each would measure it a different number of times, got auto; try batch_size=1."
        )
    tasks = "+".join(sorted({task for task, _ in groups}))
    joined: defaultdict[tuple[str, HeldBack], list[int]] = defaultdict(list)
    for (_, held_back), indices in groups.items():
        joined[tasks, held_back] += indices
    return joined


class Sharing(NamedTuple):
    """Requests that are answered together.

    Attributes:
        task: Their task.
        held_back: What they hold back; the most of them behind a common prefix.
        prefix: The tokens that all of them begin with, and share; none if they share none.
        members: Their indices.
    """

    task: str
    held_back: HeldBack
    prefix: Tokens
    members: list[int]


def without_prefixes(groups: TaskGroups) -> list[Sharing]:
    """The same groups, whose requests share nothing."""
    return [Sharing(task, held_back, (), indices) for (task, held_back), indices in groups.items()]


def share_prefixes(
    groups: TaskGroups, prompts: Sequence[Tokens], least: int, known: Sequence[int | None]
) -> list[Sharing]:
    """Group prompts to generate from by their common prefixes; those that share none stay in their groups.

    Questions of different lengths about one text share it: what is compressed of their prompts is the same.

    Args:
        groups: The requests by task and by what they hold back.
        prompts: Token ids of the prompt of each request, as the model reads it: what was cut off is not shared.
        least: The fewest tokens of a prefix.
        known: The tokens that each prompt shared before, 0 for none; None if it is new.
    """
    found: list[Sharing] = []
    # A prompt that is compressed whole shares no more than all of it but a token, which would be less than the others.
    kinds: defaultdict[tuple[str, bool, bool], list[tuple[HeldBack, int]]] = defaultdict(list)
    for (task, held_back), indices in groups.items():
        kinds[task, held_back.beyond, held_back.tokens > 0] += [(held_back, index) for index in indices]
    for (task, _, _), members in kinds.items():
        compressed = [prompts[index][: -max(own.tokens, 1)] for own, index in members]
        alone: TaskGroups = defaultdict(list)
        for prefix, places in group_by_prefix(compressed, least, [known[index] for _, index in members]):
            if prefix:
                most = max(members[place][0] for place in places)
                found.append(Sharing(task, most, prefix, [members[place][1] for place in places]))
            else:
                own, index = members[places[0]]
                alone[task, own].append(index)
        found += without_prefixes(alone)
    return found
