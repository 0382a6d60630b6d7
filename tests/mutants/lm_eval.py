"""Defects in the model of lm-eval."""

from __future__ import annotations

from tests.mutants import Mutation

MUTATIONS = (
    Mutation(
        name="a prefix may be the whole of a context",
        file="integrations/kvpolicy_lm_eval/scoring.py",
        old="limits = [max(len(prefix) + min(holdback - 1, 0), 0) for prefix, _ in every]",
        new="limits = [len(prefix) for prefix, _ in every]",
        tests=("tests/lm_eval/test_prefixes.py::test_requests_are_split_behind_their_common_prefix",),
    ),
    Mutation(
        name="a shorter common prefix swallows longer ones",
        file="integrations/kvpolicy_lm_eval/prefixes.py",
        old="gains = [len(places) * depth - (len(places) - 1) * size for size, places in self.groups]",
        new="gains = [len(places) * depth for size, places in self.groups]",
        tests=("tests/lm_eval/test_prefixes.py::test_documents_behind_the_same_instruction_are_groups_of_their_own",),
    ),
    Mutation(
        name="padding stays before the prefix",
        file="integrations/kvpolicy_lm_eval/prefixes.py",
        old="seen[number, :size] = seen[number, rest:] = 1",
        new="seen[number, rest - size :] = 1",
        tests=("tests/lm_eval/test_prefixes.py::test_padding_moves_behind_the_prefix",),
    ),
)
