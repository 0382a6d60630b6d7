"""Defects in the server: what a request may ask for."""

from __future__ import annotations

from tests.mutants import Mutation

MUTATIONS = (
    Mutation(
        name="an answer may not reach the last position",
        file="kvpolicy/serving/generation.py",
        old="if limit is not None and prompt + new > limit:",
        new="if limit is not None and prompt + new >= limit:",
        tests=("tests/serving/test_limits.py::test_an_answer_may_reach_the_last_position",),
    ),
    Mutation(
        name="a prompt that is the prefix alone is taken",
        file="kvpolicy/serving/prefix.py",
        old="if same is None and len(prompt) > len(self.ids):",
        new="if same is None and len(prompt) >= len(self.ids):",
        tests=("tests/serving/test_requests.py", "tests/serving/test_server.py"),
    ),
)
