"""Requests whose contexts begin with the same tokens, so that these are prefilled and held once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvpolicy.text.common_prefix import common_length
from kvpolicy.text.errors import KVPolicyError

PREFIX_TOKENS = 256
"""The fewest tokens of a common prefix with `group_by_prefix=true`."""

Tokens = tuple[int, ...]


class Group(NamedTuple):
    """Requests with a common prefix.

    Attributes:
        prefix: Tokens of the prefix; none for a request that shares none.
        members: Indices of the requests.
    """

    prefix: Tokens
    members: list[int]


class SharedText(NamedTuple):
    """A prefix that rows share, in a cache with one row.

    Attributes:
        tokens: Its tokens.
        cache: The cache.
    """

    tokens: Tokens
    cache: Any


class _Common(NamedTuple):
    """Contexts that begin with the same tokens, in groups.

    Attributes:
        depth: How many tokens all of them begin with.
        groups: The lengths of the prefixes of the groups, and the places of their contexts in the sorted order.
    """

    depth: int
    groups: list[tuple[int, list[int]]]

    def closed(self, least: int) -> list[tuple[int, list[int]]]:
        """Its groups, of which those become one that save fewer tokens alone than the common prefix saves them."""
        depth = self.depth
        gains = [len(places) * depth - (len(places) - 1) * size for size, places in self.groups]
        # Of the group that they make, one context is prefilled, whose tokens are not saved.
        if depth < least or sum(gain for gain in gains if gain > 0) <= depth:
            return self.groups
        joined = [place for gain, (_, places) in zip(gains, self.groups, strict=True) for place in places if gain > 0]
        return [(depth, joined), *(group for gain, group in zip(gains, self.groups, strict=True) if gain <= 0)]


def group_by_prefix(contexts: Sequence[Tokens], least: int, known: Sequence[int | None] = ()) -> list[Group]:
    """Group contexts by common prefixes, so that few tokens are prefilled, each prefix once.

    Contexts are sorted, and the common prefixes of neighbors are the nodes of a tree. From its leaves on, the groups
    below a node become one, but for those that save more tokens with their longer prefix.

    Args:
        contexts: The part of each context that may be in a prefix.
        least: The fewest tokens of a prefix.
        known: The tokens of the prefix of each context, 0 for none, where they are not to be found; None where they
            are. By default, all are found.

    Returns:
        The groups, in the order of their first members; a context that shares no prefix is in a group of its own.

    Examples:
        >>> [group.members for group in group_by_prefix([(1, 2, 3), (7, 8), (1, 2, 4), (1, 5)], least=2)]
        [[0, 2], [1], [3]]
    """
    given: defaultdict[Tokens, list[int]] = defaultdict(list)
    found: list[Group] = []
    for index, (context, size) in enumerate(zip(contexts, known, strict=False)):
        if size:
            given[context[:size]].append(index)
        elif size == 0:
            found.append(Group((), [index]))
    found += [Group(prefix, members) for prefix, members in given.items()]
    settled = {index for group in found for index in group.members}
    order = sorted(set(range(len(contexts))) - settled, key=lambda index: contexts[index])
    nodes = [_Common(0, [])]
    for place, index in enumerate(order):
        groups: list[tuple[int, list[int]]] = [(0, [place])]
        behind = contexts[order[place + 1]] if place + 1 < len(order) else ()
        depth = common_length(contexts[index], behind)
        while nodes[-1].depth > depth:
            nodes[-1].groups.extend(groups)
            groups = nodes.pop().closed(least)
        if nodes[-1].depth < depth:
            nodes.append(_Common(depth, []))
        nodes[-1].groups.extend(groups)
    for depth, places in nodes[0].groups:
        members = sorted(order[place] for place in places)
        found.append(Group(contexts[members[0]][:depth], members))
    return sorted(found, key=lambda group: group.members)


def read_least(value: Any) -> int:
    """The fewest tokens of a common prefix, from the argument `group_by_prefix`; 0 if requests are not grouped.

    Raises:
        KVPolicyError: If it is neither a bool nor an integer from 1.
    """
    if isinstance(value, bool):
        return PREFIX_TOKENS if value else 0
    if not isinstance(value, int) or value < 1:
        raise KVPolicyError(
            f"group_by_prefix must be true, false or the minimum length of a common prefix in tokens, got {value!r}; "
            f"try true, which is {PREFIX_TOKENS}."
        )
    return value


def check_processes(least: int, processes: int) -> None:
    """Refuse groups where several processes answer the requests, and wait for each other while they do.

    Raises:
        KVPolicyError: If requests are grouped and there are several.
    """
    if least and processes > 1:
        raise KVPolicyError(
            "group_by_prefix must be false if several processes answer the requests, since each would have other "
            f"groups, got {processes} processes; try one process, or tp."
        )


def behind_prefix(context: Tensor, mask: Tensor | None, prefix: Tokens, pad: int) -> tuple[Tensor, Tensor] | None:
    """A padded batch whose padding stands behind the prefix; None if a row does not begin with it.

    Args:
        context: Token ids, [B, T].
        mask: Which of them are not padding, [B, T]; None if all are.
        prefix: The tokens of the prefix.
        pad: The token id of padding.

    Returns:
        Token ids and the attention mask, both [B, S + R]: the S tokens of the prefix, then the rest of each row.
    """
    valid = torch.ones_like(context) if mask is None else mask
    rows = [ids[own.bool()].tolist() for ids, own in zip(context, valid, strict=True)]
    size = len(prefix)
    if any(tuple(row[:size]) != prefix or len(row) <= size for row in rows):
        return None
    width = max(map(len, rows))
    ids = context.new_full((len(rows), width), pad)
    seen = torch.zeros_like(ids)
    for number, row in enumerate(rows):
        rest = width - (len(row) - size)
        ids[number, :size] = context.new_tensor(prefix)
        ids[number, rest:] = context.new_tensor(row[size:])
        seen[number, :size] = 1
        seen[number, rest:] = 1
    return ids, seen
