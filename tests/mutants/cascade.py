"""Defects in what layers drop of a prompt while they are measured."""

from __future__ import annotations

from tests.mutants import Mutation

BOUNDS = ("tests/allocators/test_bounds.py",)
TRIMMING = ("tests/engine/test_trimming.py",)
WAITING = ("tests/planning/test_waiting.py",)

MUTATIONS = (
    Mutation(
        name="a bound is exact, though rounding depends on all layers",
        file="kvpolicy/allocators/attention.py",
        old="divided(lightest) + 1)",
        new="divided(lightest))",
        tests=BOUNDS,
    ),
    Mutation(
        name="layers that are not measured weigh the same as the lightest for both bounds",
        file="kvpolicy/allocators/attention.py",
        old="(divided(heaviest) - 1)",
        new="(divided(lightest) - 1)",
        tests=BOUNDS,
    ),
    Mutation(
        name="the even part is scaled with the rest, and more weight elsewhere may raise a budget",
        file="kvpolicy/text/budget.py",
        old="result[index] = each + above * target[index] / mass if mass > 0 else rest / len(free)",
        new="result[index] = rest * (each + target[index]) / (each * len(free) + mass + 1e-300)",
        tests=BOUNDS,
    ),
    Mutation(
        name="a layer shares the rest with those of a lower cosine, and with none of the first groups",
        file="kvpolicy/allocators/squeeze.py",
        old="sharers.clamp_min(self.groups - 1).clamp_max(layers)",
        new="sharers.clamp_min(self.groups)",
        tests=BOUNDS,
    ),
    Mutation(
        name="equal cosines may be in two groups",
        file="kvpolicy/allocators/squeeze.py",
        old="        start = int(same[0]) or int(same[-1]) + 1\n",
        new="        pass\n",
        tests=("tests/allocators/test_kmeans.py",),
    ),
    Mutation(
        name="the preference of a layer has no largest value",
        file="kvpolicy/allocators/cake.py",
        old="heaviest = (largest - highest)",
        new="heaviest = (largest * 0 - highest)",
        tests=BOUNDS,
    ),
    Mutation(
        name="a lazy layer never gets what others cannot use",
        file="kvpolicy/allocators/simlayer.py",
        old="few.maximum(many).maximum(even) + 1",
        new="few.minimum(many) + 1",
        tests=BOUNDS,
    ),
    Mutation(
        name="prompts are trimmed whatever the selector needs",
        file="kvpolicy/engine/trimming.py",
        old="return bool((least >= nested).all())",
        new="return True",
        tests=TRIMMING,
    ),
    Mutation(
        name="prompts are trimmed although a merger wants what is evicted",
        file="kvpolicy/engine/trimming.py",
        old='spec.merger_traits.when == "never" and spec.heads is None',
        new="spec.heads is None",
        tests=TRIMMING,
    ),
    Mutation(
        name="the vectors of a padded prompt are not in the order of its ranking",
        file="kvpolicy/engine/trimming.py",
        old="    if ranking.order is None:\n",
        new="    if True:\n",
        tests=TRIMMING,
    ),
    Mutation(
        name="a row without a token is observed",
        file="kvpolicy/engine/trimming.py",
        old="state = ranking.state if idle is None else select_rows(idle, ranking.before, ranking.state)",
        new="state = ranking.state",
        tests=TRIMMING,
    ),
    Mutation(
        name="a trimmed prompt is ranked by the budget that it was trimmed to",
        file="kvpolicy/engine/trimming.py",
        old="    view = trimmed.view._replace(budget=keep)\n",
        new="    view = trimmed.view\n",
        tests=TRIMMING,
    ),
    Mutation(
        name="the codec does not see the channels of a trimmed prompt",
        file="kvpolicy/engine/trimming.py",
        old="isinstance(each, _NOT_OF_TOKENS)",
        new="False",
        tests=TRIMMING,
    ),
    Mutation(
        name="a trimmed prompt is as long as what is left of it",
        file="kvpolicy/engine/prefill.py",
        old="            return self.trimmed.columns\n",
        new="            return self.keys.shape[2]\n",
        tests=TRIMMING,
    ),
    Mutation(
        name="a trimmed prompt keeps the memory of the whole one",
        file="kvpolicy/engine/trimming.py",
        old="    return smaller.owned()\n",
        new="    return pending\n",
        tests=TRIMMING,
    ),
    Mutation(
        name="a budget beyond the bound goes unnoticed",
        file="kvpolicy/engine/trimming.py",
        old="    if bool(lost.any()):\n",
        new="    if False:\n",
        tests=TRIMMING,
    ),
    Mutation(
        name="a plan counts trimmed prompts of one row only",
        file="kvpolicy/planning/planner.py",
        old="return len(prompt) * held * of_token",
        new="return held * of_token",
        tests=WAITING,
    ),
    Mutation(
        name="a plan counts on bounds that a selector cannot use",
        file="kvpolicy/planning/planner.py",
        old="    if bool((least < nested).any()):\n",
        new="    if False:\n",
        tests=WAITING,
    ),
    Mutation(
        name="what the allocator needs is gathered for rows without slots alone",
        file="kvpolicy/engine/layer_contents.py",
        old="has_unbegun = bool((self.tensors.length == 0).any())",
        new="has_unbegun = any(count == 0 for count in self.expected_len)",
        tests=("tests/allocators/test_attention.py",),
    ),
)
