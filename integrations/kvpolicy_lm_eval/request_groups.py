"""Requests in groups that are answered together: of one task, with as many tokens held back, behind one prefix."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from kvpolicy.text.errors import KVPolicyError
from kvpolicy_lm_eval.held_back import HeldBack, find_held_back
from kvpolicy_lm_eval.prefixes import Group, group_by_prefix

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


def group_prompts(
    requests: Sequence[Any], indices: list[int], encode: Callable[[str], list[int]], held_back: int, least: int
) -> list[Group]:
    """Group prompts to generate from by their common prefixes; those that share none are one group.

    Args:
        requests: The requests of lm-eval.
        indices: Which of them to group.
        encode: Encodes a text as tokens.
        held_back: How many tokens at the end of a prompt are held back.
        least: The fewest tokens of a prefix.
    """
    behind = max(held_back, 1)
    prompts = [tuple(encode(requests[index].args[0]))[:-behind] for index in indices]
    found = group_by_prefix(prompts, least)
    alone = [member for group in found if len(group.members) == 1 for member in group.members]
    shared = [group for group in found if len(group.members) > 1]
    groups = [*shared, Group((), alone)] if alone else shared
    return [Group(prefix, [indices[member] for member in members]) for prefix, members in groups]
