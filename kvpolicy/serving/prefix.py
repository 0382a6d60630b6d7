"""A saved cache that every request starts from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvpolicy.hf.attachment import attachment_of
from kvpolicy.hf.cache import PolicyCache
from kvpolicy.hf.cache_file import found_path
from kvpolicy.hf.cache_header import read_header
from kvpolicy.hf.saved_cache import load_cache
from kvpolicy.hf.shared_fork import check_shareable
from kvpolicy.policy import Policy, TunedPolicy
from kvpolicy.text.errors import KVPolicyError


def check_together(*, prefix: bool, shared: bool, caching: bool, rows: int, codes: bool = False) -> None:
    """Refuse options of the server that exclude each other.

    Args:
        prefix: Whether there is a saved cache that every request starts from.
        shared: Whether requests share its slots.
        caching: Whether beginnings of prompts are held.
        rows: How many requests are answered at a time, as far as it is known.
        codes: Whether a prompt that waits is held as codes.

    Raises:
        KVPolicyError: Saying which option is to be left out.
    """
    if shared and not prefix:
        raise KVPolicyError("--share-prefix must be given with --prefix, got no prefix; try --prefix FILE.")
    if caching and prefix:
        raise KVPolicyError(
            "--prefix-caching must be without --prefix, from which every request starts; try one of the two."
        )
    if caching and codes:  # what goes on from codes is not what it would be alone
        raise KVPolicyError(
            "--prefix-caching must be without --hold-codes, since it holds beginnings in full precision; try one of "
            "the two."
        )
    if shared and rows > 1:
        raise KVPolicyError(
            f"--share-prefix must be without --rows, got {rows} rows, of which each has a copy of the prefix; try "
            "--prefix alone."
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Prefix:
    """A saved cache that every request starts from.

    Attributes:
        ids: The tokens that the cache has seen.
        cache: The cache.
        shared: Whether requests share its slots, and do not copy them.
    """

    ids: tuple[int, ...]
    cache: Any
    shared: bool = False

    def start(self) -> PolicyCache:
        """A cache that a request starts from."""
        return self.cache.fork(shared=self.shared)

    def check(self, prompt: list[int]) -> None:
        """Refuse a prompt that is not the prefix with something behind it.

        Raises:
            KVPolicyError: Saying where the prompt differs.
        """
        same = next((i for i, (a, b) in enumerate(zip(prompt, self.ids, strict=False)) if a != b), None)
        if same is None and len(prompt) > len(self.ids):
            return
        got = f"only {len(prompt):,} tokens" if same is None else f"another token at position {same:,}"
        raise KVPolicyError(
            f"The prompt must be the {len(self.ids):,} tokens of --prefix and at least one more, got {got}; try the "
            "text of the file, followed by a question."
        )


def check_room(prefix: Prefix, positions: int | None, length: int | None) -> None:
    """Refuse a prefix behind which no prompt and no answer has room: every request would be refused.

    Args:
        prefix: The prefix.
        positions: The positions of the model; None without a limit.
        length: The tokens for which a row has room; None without a limit.

    Raises:
        KVPolicyError: If there is no room for a token of a question and one of an answer.
    """
    limit = min((each for each in (positions, length) if each is not None), default=None)
    if limit is not None and len(prefix.ids) + 2 > limit:
        what = "positions" if limit == positions else "tokens, see --length"
        raise KVPolicyError(
            f"The cache of --prefix must leave room for a question and an answer in {limit:,} {what}, got "
            f"{len(prefix.ids):,} tokens; try {'a shorter text' if limit == positions else 'a larger one'}."
        )


@dataclass(frozen=True, slots=True)
class PrefixFile:
    """A file of a cache, checked as far as its header tells, before the model is loaded.

    Args:
        path: The file.
        policy: The policy that it must have.
        shared: Whether requests share its slots, and do not copy them.
        ranks: How many ranks share the model; each loads its own file of the cache, or its part of one file.

    Raises:
        KVPolicyError: If the file cannot be read, or its cache has another policy or several rows.
    """

    path: Path
    policy: Policy
    shared: bool = False
    ranks: int = 1

    def __post_init__(self) -> None:
        """Read the header."""
        header = read_header(found_path(self.path, 0, self.ranks))
        if not isinstance(self.policy, TunedPolicy):  # which is known only when the model is
            _check_policy(Policy.from_dict(header["policy"]), self.policy)
        if header["rows"] != 1:
            raise KVPolicyError(f"The cache of --prefix must have one row, got {header['rows']}; try saving one row.")

    def load(self, model: Any) -> Prefix:
        """Load the cache.

        Args:
            model: The model, with the policy attached.

        Raises:
            KVPolicyError: If the file is of another model, was edited, has no token ids, or has padding, or its slots
                cannot be shared and are to be, or cannot be divided among the ranks.
        """
        cache, tokens = load_cache(PolicyCache, model, str(self.path))
        _check_policy(cache.policy, attachment_of(model).policy)
        if tokens is None:
            raise KVPolicyError(
                "The file of --prefix must have the token ids of its cache, got one without; try cache.save(path, "
                "tokens=ids)."
            )
        seen = int(cache.policy_layers[0].length[0])
        if seen != tokens.shape[1]:
            raise KVPolicyError(
                f"The cache of --prefix must be without padding, got {tokens.shape[1]:,} columns of {seen:,} tokens; "
                "try saving the cache of the prompt alone."
            )
        if self.shared:
            check_shareable(cache)
        return Prefix(ids=tuple(tokens[0].tolist()), cache=cache, shared=self.shared)


def _check_policy(theirs: Policy, ours: Policy) -> None:
    if theirs != ours:
        raise KVPolicyError(
            f"The cache of --prefix must have the policy {ours}, got {theirs}; try kvpolicy serve with that policy."
        )
