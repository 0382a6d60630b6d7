"""Defects in the tuner."""

from __future__ import annotations

from tests.mutants import Mutation

MEASURE = ("tests/tuning/test_measure.py",)
TUNE = ("tests/tuning/test_tune.py",)

MUTATIONS = (
    Mutation(
        name="all prompts may be held out",
        file="kvpolicy/tuning/windows.py",
        old="for index in order[:-1]:  #",
        new="for index in order:  #",
        tests=("tests/tuning/test_windows.py",),
    ),
    Mutation(
        name="the divergence is of the changed predictions from the unchanged ones",
        file="kvpolicy/tuning/answers.py",
        old="(self._unchanged.exp() * (self._unchanged - changed))",
        new="(changed.exp() * (changed - self._unchanged))",
        tests=MEASURE,
    ),
    Mutation(
        name="a row that was changed earlier is computed as an unchanged one",
        file="kvpolicy/tuning/answers.py",
        old="if min(changes, default=layer_idx) >= layer_idx]",
        new="if max(changes, default=layer_idx) >= layer_idx]",
        tests=("tests/tuning/test_answers.py",),
    ),
    Mutation(
        name="massive activations are looked for in the answer too",
        file="kvpolicy/tuning/tap.py",
        old="massive_tokens(hidden[:, :prompt], None, count)",
        new="massive_tokens(hidden, None, count)[:, :prompt]",
        tests=("tests/tuning/test_answers.py",),
    ),
    Mutation(
        name="policies share statistics of queries that one does not ask for",
        file="kvpolicy/tuning/compression.py",
        old="return statistics_of(policy), policy.codec.statistics",
        new="return statistics_of(policy)",
        tests=MEASURE,
    ),
    Mutation(
        name="policies share the scores of one gate",
        file="kvpolicy/tuning/compression.py",
        old="return statistics_of(policy), policy",
        new="return tuple(map(type, statistics_of(policy))), policy",
        tests=MEASURE,
    ),
    Mutation(
        name="every draw has the same noise",
        file="kvpolicy/tuning/measure.py",
        old="_generator(seed, row, layer, draw)",
        new="_generator(seed, row, layer)",
        tests=MEASURE,
    ),
    Mutation(
        name="an interval has the level of one side",
        file="kvpolicy/tuning/comparison.py",
        old="[(1 - LEVEL) / 2, (1 + LEVEL) / 2]",
        new="[1 - LEVEL, LEVEL]",
        tests=("tests/tuning/test_comparison.py",),
    ),
    Mutation(
        name="tokens that are ruled out make the divergence NaN",
        file="kvpolicy/tuning/evidence.py",
        old="torch.where(theirs.isneginf(), 0.0, theirs.exp() * (theirs - ours))",
        new="theirs.exp() * (theirs - ours)",
        tests=("tests/tuning/test_evidence.py",),
    ),
    Mutation(
        name="the first round compares windows with references of others",
        file="kvpolicy/tuning/rivals.py",
        old="(windows[::step], reference[::step])",
        new="(windows[::step], reference[: len(windows[::step])])",
        tests=("tests/tuning/test_rivals.py",),
    ),
    Mutation(
        name="the standard error of a joint distortion is that of a layer alone",
        file="kvpolicy/tuning/tune.py",
        old="spread = spread[1:] * factor",
        new="spread = spread[1:]",
        tests=TUNE,
    ),
    Mutation(
        name="a line that was cut off refuses the unfinished run",
        file="kvpolicy/tuning/steps.py",
        old='.splitlines(keepends=True) if line.endswith("\\n")]',
        new=".splitlines(keepends=True)]",
        tests=TUNE,
    ),
    Mutation(
        name="the peak of tuning forgets prompts of other layers",
        file="kvpolicy/tuning/peak.py",
        old="else (layers + 1) * layer",
        new="else layer",
        tests=("tests/tuning/test_long_prompts.py",),
    ),
    Mutation(
        name="seconds of the evidence do not grow with the ordinary policies",
        file="kvpolicy/tuning/rivals.py",
        old="    scored = len(specs) * len(windows)\n",
        new="    scored = len(windows)\n",
        tests=("tests/tuning/test_long_prompts.py",),
    ),
    Mutation(
        name="what was seen of one layer stays on its device for other candidates",
        file="kvpolicy/tuning/measure.py",
        old="            known.clear()",
        new="            pass",
        tests=("tests/tuning/test_long_prompts.py",),
        equivalent="It takes memory of a device that a CPU does not have, and changes no result.",
    ),
)
