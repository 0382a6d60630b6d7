"""Defects in plans and in the division of budgets."""

from __future__ import annotations

from tests.mutants import Mutation

TUNED = ("tests/planning/test_tuned.py",)
LEAST = ("tests/engine/test_least_tokens.py",)
LAYERS = ("tests/engine/test_by_layer.py", "tests/engine/test_by_layer_edges.py")

MUTATIONS = (
    Mutation(
        name="the least number of tokens of a budget is not kept",
        file="kvpolicy/planning/tokens.py",
        old="return torch.maximum(tokens_of(budget.fraction, prompt), tokens_of(budget.least, prompt))",
        new="return tokens_of(budget.fraction, prompt)",
        tests=LEAST,
    ),
    Mutation(
        name="the least number of tokens of a budget is its most",
        file="kvpolicy/planning/tokens.py",
        old="return torch.maximum(tokens_of(budget.fraction, prompt), tokens_of(budget.least, prompt))",
        new="return tokens_of(budget.least, prompt)",
        tests=LEAST,
    ),
    Mutation(
        name="a policy by layer has no least number of tokens",
        file="kvpolicy/planning/planner.py",
        old="budget = policy.budget.of_prompt(length) if isinstance(policy.budget, Share) else policy.budget",
        new="budget = policy.budget.fraction if isinstance(policy.budget, Share) else policy.budget",
        tests=LEAST,
    ),
    Mutation(
        name="a tuned policy has no least number of tokens",
        file="kvpolicy/planning/tuned.py",
        old="budget = policy.budget.of_prompt(length) if isinstance(policy.budget, Share) else policy.budget",
        new="budget = policy.budget.fraction if isinstance(policy.budget, Share) else policy.budget",
        tests=TUNED,
    ),
    Mutation(
        name="a least number of tokens is warned of",
        file="kvpolicy/planning/notes.py",
        old="return isinstance(policy.budget, float) and bool(keeps_few(keep, prompt, FEW_TOKENS).any())",
        new="return bool(keeps_few(keep, prompt, FEW_TOKENS).any())",
        tests=LEAST,
    ),
    Mutation(
        name="costs are rounded down to units of the limit",
        file="kvpolicy/planning/tuned.py",
        old="            cost = -(-option.cost // unit)\n",
        new="            cost = option.cost // unit\n",
        tests=("tests/planning/test_tuned.py",),
    ),
    Mutation(
        name="an exchange may not use up the limit",
        file="kvpolicy/planning/tuned.py",
        old="option.cost - now.cost <= left and saved > 0",
        new="option.cost - now.cost < left and saved > 0",
        tests=("tests/planning/test_tuned.py",),
    ),
    Mutation(
        name="layers with small shares never keep everything",
        file="kvpolicy/planning/planner.py",
        old="most = int((ceiling.amax() / smallest_share).ceil().clamp_max(MAX_SIZE))",
        new="most = int(min(ceiling.amax(), MAX_SIZE))",
        tests=LAYERS,
    ),
    Mutation(
        name="shares of layers are rounded down without tolerance",
        file="kvpolicy/planning/planner.py",
        old="tokens = (weights * most + EPSILON).long()",
        new="tokens = (weights * most).long()",
        tests=LAYERS,
    ),
    Mutation(
        name="pages of other ranks are counted on this one",
        file="kvpolicy/planning/memory.py",
        old="rows.body - (heads - shape.heads)",
        new="rows.body",
        tests=("tests/planning/test_division.py",),
    ),
    Mutation(
        name="the last page of a head is not planned on several ranks",
        file="kvpolicy/planning/memory.py",
        old="most = torch.maximum(-(-tokens.last // rows.size), rows.body // heads + 1) * shape.heads",
        new="most = torch.maximum(tokens.last // rows.size, rows.body // heads + 1) * shape.heads",
        tests=("tests/planning/test_division.py",),
    ),
    Mutation(
        name="later chunks of a measured prompt take no memory",
        file="kvpolicy/planning/memory.py",
        old="max(measured, sum(layers) + piece * (piece < prompt)) + unmanaged_nbytes",
        new="measured + unmanaged_nbytes",
        tests=("tests/planning/test_division.py",),
    ),
    Mutation(
        name="a text longer than announced has a negative reserve",
        file="kvpolicy/planning/tokens.py",
        old="(end - prompt).clamp_min(0)",
        new="(end - prompt)",
        tests=("tests/engine/test_announcements.py",),
    ),
    Mutation(
        name="a text longer than announced is divided by what was announced",
        file="kvpolicy/planning/tokens.py",
        old='most = prompt if policy.decode == "grow" or end is None else torch.maximum(end, prompt)',
        new='most = prompt if policy.decode == "grow" or end is None else end',
        tests=("tests/engine/test_announcements.py",),
    ),
    Mutation(
        name="a limit of one rank is multiplied by whole ranks",
        file="kvpolicy/planning/tuned.py",
        old="limit = limit * whole.heads // shape.heads",
        new="limit = limit * (whole.heads // shape.heads)",
        tests=("tests/planning/test_division.py",),
    ),
    Mutation(
        name="a tuned policy for a short text leaves no prompt",
        file="kvpolicy/planning/tuned.py",
        old="new = min(new, policy.source.length - 1)",
        new="new = min(new, policy.source.length)",
        tests=("tests/planning/test_division.py",),
    ),
    Mutation(
        name="a loaded plan has no peak of the full cache",
        file="kvpolicy/planning/result.py",
        old='full_peak_nbytes=content.get("full_peak_nbytes", 0)',
        new="full_peak_nbytes=0",
        tests=("tests/files/test_saved_cache.py",),
    ),
    Mutation(
        name="a fraction of the prompt is computed in single precision",
        file="kvpolicy/planning/tokens.py",
        old="(prompt.double() * budget + EPSILON)",
        new="(prompt.float() * budget + EPSILON)",
        tests=("tests/planning/test_division.py",),
    ),
    Mutation(
        name="a prompt as long as the selector's minimum is refused",
        file="kvpolicy/planning/planner.py",
        old="torch.where(prompt <= floor, base.clamp_min(floor), base)",
        new="torch.where(prompt < floor, base.clamp_min(floor), base)",
        tests=(
            "tests/planning/test_division.py",
            "tests/engine/test_budgets.py",
        ),
    ),
    Mutation(
        name="the largest batch fits only while it is prefilled",
        file="kvpolicy/planning/result.py",
        old="max(needed(rows, prefill=True), needed(rows, prefill=False)) <= memory",
        new="needed(rows, prefill=True) <= memory",
        tests=(
            "tests/planning/test_division.py",
            "tests/test_weights.py",
        ),
    ),
    Mutation(
        name="a short text that is kept whole is noted as one of few tokens",
        file="kvpolicy/planning/notes.py",
        old="return (mean < tokens) & (mean < prompt)",
        new="return mean < tokens",
        tests=(
            "tests/planning/test_division.py",
            "tests/test_notices.py",
        ),
    ),
    Mutation(
        name="the window before a chunk is not in the mask of a sliding layer",
        file="kvpolicy/planning/activations.py",
        old="seen = min(prefill.columns - piece.columns, window - 1) + piece.columns",
        new="seen = min(prefill.columns, max(window - 1, piece.columns))",
        tests=("tests/planning/test_division.py",),
    ),
    Mutation(
        name="the tokens that an error names are rounded down",
        file="kvpolicy/planning/planner.py",
        old="wanted = -(-smallest // token) if",
        new="wanted = smallest // token if",
        tests=("tests/engine/test_by_layer_edges.py",),
    ),
    Mutation(
        name="every layer has the bytes of the first",
        file="kvpolicy/planning/tuned.py",
        old="like = curves.layers[number if parts[key].reads_part else 0]",
        new="like = curves.layers[0]",
        tests=("tests/planning/test_tuned.py",),
    ),
    Mutation(
        name="heads that grow have pages for generated tokens twice",
        file="kvpolicy/planning/tokens.py",
        old="return Tokens(keep, extra, expected_len, prompt if grows else last)",
        new="return Tokens(keep, extra, expected_len, last)",
        tests=("tests/engine/test_announcements.py",),
    ),
    Mutation(
        name="codes that wait are planned as keys and values",
        file="kvpolicy/hf/plan.py",
        old="in_codes = held_codes if coded else None",
        new="in_codes = None",
        tests=("tests/planning/test_activations.py",),
    ),
    Mutation(
        name="a codec that encodes in ranges is planned as if it did not",
        file="kvpolicy/planning/activations.py",
        old="at_once = min(encoded, piece.batch * traits.at_once) if traits.at_once else encoded",
        new="at_once = encoded",
        tests=("tests/planning/test_activations.py",),
    ),
)
