"""Defects in what says that a family is right, and in what refuses the others."""

from __future__ import annotations

from tests.mutants import Mutation

CHECK = "eval/kvpolicy_eval/families/check.py"
ORACLE = "eval/kvpolicy_eval/families/oracle.py"

MUTATIONS = (
    Mutation(
        name="what a policy held is not hidden from the stock model",
        file=ORACLE,
        old="        _readable.update(held)\n",
        new="",
        tests=("tests/families/test_oracle.py",),
    ),
    Mutation(
        name="a layer that reads the keys of another one sees what that one evicted",
        file=ORACLE,
        old="if owner in held})",
        new="if owner in held and reader < 0})",
        tests=("tests/families/test_oracle.py",),
    ),
    Mutation(
        name="logits that are no numbers are equal",
        file="eval/kvpolicy_eval/families/differences.py",
        old="    if not bool((finite | ruled_out).all()) or not bool(finite.any()):\n        return math.inf\n",
        new="    found, expected = found.nan_to_num(), expected.nan_to_num()\n",
        tests=("eval/kvpolicy_eval/families/differences.py",),
    ),
    Mutation(
        name="a model that shows nothing is right",
        file=CHECK,
        old='if found.get("unmasked", SEEN_FROM) < SEEN_FROM:',
        new='if found.get("unmasked", SEEN_FROM) < 0:',
        tests=("tests/families/test_wrong.py",),
    ),
    Mutation(
        name="rows of a padded batch may differ",
        file=CHECK,
        old="stock <= WITHIN < rows",
        new="stock <= 0 < rows",
        tests=("tests/families/test_wrong.py",),
    ),
    Mutation(
        name="results of other code are kept",
        file="eval/kvpolicy_eval/families/__main__.py",
        old='if known.get(entry.key, {}).get("made") != made]',
        new="if entry.key not in known]",
        tests=("tests/families/test_command.py",),
    ),
    Mutation(
        name="the config of a model is taken for that of its text part",
        file="kvpolicy/hf/discovery.py",
        old=" and isinstance(text, needed):",
        new=":",
        tests=("tests/families/test_refusals.py",),
    ),
    Mutation(
        name="attention modules that layers share count as one layer",
        file="kvpolicy/hf/discovery.py",
        old="return isinstance(index, int) and index >= 0",
        new="return isinstance(index, int)",
        tests=("tests/families/test_refusals.py",),
    ),
)
