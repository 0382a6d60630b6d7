"""Importing kvpolicy is light: policies can be written and parsed without transformers."""

from __future__ import annotations

import subprocess
import sys

HEAVY = (
    "transformers",
    "lm_eval",
    "sklearn",
    "accelerate",
    "datasets",
    "deepspeed",
    "fastapi",
    "uvicorn",
    "openai",
    "kvpolicy_lm_eval.model",
    "kvpolicy_eval",
)
STATEMENTS = [
    "import kvpolicy",
    "str(kvpolicy.Policy.parse('squeeze+kvcrush/h2o+kivi:bits=4@0.2'))",
    "import kvpolicy.registry as r; [r.lookup(name) for name in r.names()]",
]


def test_nothing_heavy_is_imported() -> None:
    """By one statement after the other in one process."""
    lines = ["import sys", f"sys.path[:0] = {[path for path in sys.path if path]}"]
    for statement in STATEMENTS:
        lines += [statement, f"print({statement!r}, *[name for name in {HEAVY} if name in sys.modules], sep='|')"]
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == STATEMENTS
