"""Defects in the server: what a request may ask for."""

from __future__ import annotations

from tests.mutants import Mutation

MUTATIONS = (
    Mutation(
        name="a fraction of a short prompt is kept as it is by generate",
        file="kvpolicy/cli/commands/generate.py",
        old="(0 if is_sample else LEAST_TOKENS) if least is None else least",
        new="least or 0",
        tests=("tests/cli/test_generate.py",),
    ),
    Mutation(
        name="a fraction of a short prompt is kept as it is by the server",
        file="kvpolicy/cli/commands/serve.py",
        old="default = LEAST_TOKENS if prefix is None else 0",
        new="default = 0",
        tests=("tests/serving/test_server.py",),
    ),
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
