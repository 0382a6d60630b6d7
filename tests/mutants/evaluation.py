"""Defects in what the documentation recommends, and in what start-up and the command line import."""

from __future__ import annotations

from tests.mutants import Mutation

CHOICES = ("tests/eval/board/test_choices.py",)
PREFILL = ("tests/eval/real/test_shared_prefill.py",)

MUTATIONS = (
    Mutation(
        name="the worst policies of a situation are recommended",
        file="eval/kvpolicy_eval/board/choices.py",
        old="key=lambda choice: choice.worth, reverse=True)[:BEST]",
        new="key=lambda choice: choice.worth)[:BEST]",
        tests=CHOICES,
    ),
    Mutation(
        name="a policy is recommended twice, once held in codes",
        file="eval/kvpolicy_eval/board/policies.py",
        old='if entry.by_bytes and entry.hold == "plain"]',
        new="if entry.by_bytes]",
        tests=CHOICES,
    ),
    Mutation(
        name="the fastest policy is recommended whatever it answers",
        file="eval/kvpolicy_eval/board/choices.py",
        old=" and choice.answers.mean >= ANSWERED",
        new="",
        tests=CHOICES,
    ),
    Mutation(
        name="lengths of which few policies were measured are compared",
        file="eval/kvpolicy_eval/board/choices.py",
        old="if count and 2 * count >= max(counts.values())]",
        new="if count]",
        tests=CHOICES,
    ),
    Mutation(
        name="a page is found wrong after others were written",
        file="eval/kvpolicy_eval/board/__main__.py",
        old="argv, _check)",
        new="argv, lambda args: None)",
        tests=CHOICES,
    ),
    Mutation(
        name="policies of a sweep are chosen with every budget",
        file="eval/kvpolicy_eval/sweep/config.py",
        old="if named & {method, spec})",
        new="if method in {name.partition('@')[0] for name in named})",
        tests=("tests/eval/sweep/test_plan.py",),
    ),
    Mutation(
        name="the start-up file hooks into every Python",
        file="integrations/kvpolicy_lm_eval/startup.py",
        old='        if any(finder.find_spec("lm_eval", None) for finder in sys.meta_path):\n            _hook()\n',
        new="        _hook()\n",
        tests=("tests/lm_eval/test_startup.py",),
    ),
    Mutation(
        name="the header of a cache file is read with PyTorch",
        file="kvpolicy/hf/cache_header.py",
        old='framework="np"',
        new='framework="pt"',
        tests=("tests/cli/test_app.py::test_help_lists_and_headers_do_not_import_pytorch",),
    ),
    Mutation(
        name="a plan imports the symbolic shapes of PyTorch",
        file="kvpolicy/engine/layer_tensors.py",
        old="    budget = torch.zeros(batch, dtype=torch.int64, device=device)\n",
        new="    budget = torch.zeros_like(length)\n",
        tests=("tests/test_lean_import.py",),
    ),
    Mutation(
        name="what was computed of another prompt is returned",
        file="eval/kvpolicy_eval/real/shared_prefill.py",
        old="equal = torch.equal(earlier, now)",
        new="equal = earlier.shape == now.shape",
        tests=PREFILL,
    ),
    Mutation(
        name="a cache writes to what is returned to the next policy",
        file="eval/kvpolicy_eval/real/shared_prefill.py",
        old="return found.clone()",
        new="return found",
        tests=PREFILL,
    ),
    Mutation(
        name="prompts are answered again that were answered before",
        file="eval/kvpolicy_eval/real/measure.py",
        old="found = {policy: self.answers(policy, task, place) for policy in policies}",
        new="found: dict[str, Result] = {policy: {} for policy in policies}",
        tests=("tests/eval/real/test_real.py::test_more_prompts_continue_what_is_known",),
    ),
)
