"""Importing kvpolicy is light: policies can be written and parsed without transformers."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = (
    "transformers",
    "lm_eval",
    "sklearn",
    "accelerate",
    "datasets",
    "deepspeed",
    "kvpolicy_lm_eval.model",
    "kvpolicy_eval",
)
CODE = """
import sys
sys.path[:0] = {path}
{statement}
print(*[name for name in {heavy} if name in sys.modules])
"""


@pytest.mark.parametrize(
    "statement",
    [
        "import kvpolicy",
        "import kvpolicy; str(kvpolicy.Policy.parse('squeeze+kvcrush/h2o+kivi:bits=4@0.2'))",
        "import kvpolicy.registry as r; [r.lookup(name) for name in r.names()]",
    ],
)
def test_nothing_heavy_is_imported(statement: str) -> None:
    code = CODE.format(path=[path for path in sys.path if path], statement=statement, heavy=HEAVY)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
