"""Defects of generations: their hooks, their caches, and speculation."""

from __future__ import annotations

from tests.mutants import Mutation

MUTATIONS = (
    Mutation(
        name="generate announces one token too few",
        file="kvpolicy/hf/generation_hooks.py",
        old="new = max(length + 1 - columns, 0) if columns else None",
        new="new = max(length - columns, 0) if columns else None",
        tests=("tests/engine/test_announcements.py",),
    ),
    Mutation(
        name="a forward within a generation is its answer",
        file="kvpolicy/hf/generation_hooks.py",
        old="if answer is None or answer.cache is cache:",
        new="if answer is None or cache is not None:",
        tests=("tests/engine/test_recent_cache.py",),
    ),
    Mutation(
        name="a cache that begins again forgets what is still to come",
        file="kvpolicy/hf/generation_hooks.py",
        old="None if end is None else max(end - columns, 0)",
        new="None",
        tests=("tests/engine/test_restarting.py",),
    ),
    Mutation(
        name="a rejected draft is replaced by any token of the full cache",
        file="kvpolicy/hf/speculation.py",
        old="return self._draw((wanted - drawn).clamp_min(0))",
        new="return self._draw(wanted)",
        tests=("tests/engine/test_speculation.py",),
    ),
    Mutation(
        name="the draft's cache never sees the last of accepted drafts",
        file="kvpolicy/hf/speculation.py",
        old="self._unseen = drafts[-1] if drafts and not rejected else None",
        new="self._unseen = None",
        tests=("tests/engine/test_speculation.py",),
    ),
    Mutation(
        name="of two names of the cache, the old one is passed on too",
        file="kvpolicy/hf/cache_names.py",
        old="            arguments.pop(other, None)",
        new="            pass",
        tests=("tests/engine/test_cache_names.py::test_a_renamed_call_has_one_name",),
    ),
    Mutation(
        name="one token left over is a decode step for a scorer",
        file="kvpolicy/hf/forward_calls.py",
        old="and not cache.forward.is_step:",
        new="and (args[0] if args else kwargs['hidden_states']).shape[1] > 1:",
        tests=("tests/robust/test_tiles.py",),
    ),
)
