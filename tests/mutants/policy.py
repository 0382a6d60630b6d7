"""Defects in policies and specs."""

from __future__ import annotations

from tests.mutants import Mutation

MUTATIONS = (
    Mutation(
        name="heads that keep different tokens share latent vectors",
        file="kvpolicy/policy/combination.py",
        old="if not same_in_heads(policy.selector):",
        new="if False:",
        tests=("tests/codecs/test_lowrank_joint.py",),
    ),
    Mutation(
        name="only selectors of positions keep the same in all heads",
        file="kvpolicy/protocols/selector.py",
        old="return positions_only(selector) or joint_decode(selector)",
        new="return positions_only(selector)",
        tests=("tests/codecs/test_lowrank_joint.py",),
    ),
    Mutation(
        name="a codec of each layer is that of all",
        file="kvpolicy/policy/model_policy.py",
        old="return ModelPolicy(policy, codecs, codecs[model.indices[0]])",
        new="return policy",
        tests=("tests/codecs/test_lowrank_ranks.py",),
    ),
    Mutation(
        name="rounding puts a layer above what it can use",
        file="kvpolicy/spec/budget.py",
        old="for index in [index for index in order if whole[index] < ceiling][:missing]:",
        new="for index in order[:missing]:",
        tests=("tests/test_budget.py",),
    ),
    Mutation(
        name="eight pages for each head are too few",
        file="kvpolicy/spec/page_sizes.py",
        old="tokens // size < PAGES_PER_HEAD",
        new="tokens // size <= PAGES_PER_HEAD",
        tests=("tests/engine/test_pages.py", "tests/engine/test_page_geometry.py"),
    ),
    Mutation(
        name="layers read a part only if all of them do",
        file="kvpolicy/policy/policy.py",
        old="return any(not isinstance(own.reader, ReadAll) for own in self.distinct)",
        new="return all(not isinstance(own.reader, ReadAll) for own in self.distinct)",
        tests=("tests/test_policy.py",),
    ),
    Mutation(
        name="the smallest budget of layers is that of the largest selector",
        file="kvpolicy/policy/policy.py",
        old="return min(\n            own.selector",
        new="return max(\n            own.selector",
        tests=("tests/test_policy.py",),
    ),
    Mutation(
        name="a layer may read what one with another codec chose",
        file="kvpolicy/policy/layers.py",
        old="if (chooser.reader, chooser.codec) != (policy.reader, policy.codec):",
        new="if chooser.reader != policy.reader:",
        tests=("tests/test_policy.py",),
    ),
    Mutation(
        name="the older of two numbers of rows counts",
        file="kvpolicy/spec/validation.py",
        old="        return prompt\n    return torch.maximum(told, prompt)",
        new="        return told\n    return torch.maximum(told, prompt)",
        tests=("tests/test_policy.py",),
    ),
    Mutation(
        name="weights that are not numbers belong to any model",
        file="kvpolicy/spec/model_identity.py",
        old="bool(torch.cosine_similarity(ours, theirs, dim=0) >= _MIN_SIMILARITY)",
        new="not bool(torch.cosine_similarity(ours, theirs, dim=0) < _MIN_SIMILARITY)",
        tests=("tests/codecs/test_files.py", "tests/allocators/test_head_files.py"),
    ),
    Mutation(
        name="a file name that contains a head allocator is read as one",
        file="kvpolicy/spec/grammar.py",
        old="{_before_inner(cls).sub('%2F', shown) if _wraps(cls) else shown}",
        new="{shown}",
        tests=("tests/test_grammar.py",),
    ),
    Mutation(
        name="a budget of one token equals one of the whole prompt",
        file="kvpolicy/policy/policy.py",
        old="return same_parts and self.budget == other.budget and type(self.budget) is type(other.budget)",
        new="return same_parts and self.budget == other.budget",
        tests=("tests/test_policy.py",),
    ),
    Mutation(
        name="a codec of several stages is combined with budgets by head",
        file="kvpolicy/policy/combination.py",
        old="if codec.stages and not (codec.traits.fits_pages and len(codec.stages) == 1):",
        new="if codec.stages and not codec.traits.fits_pages:",
        tests=("tests/test_policy.py",),
    ),
    Mutation(
        name="a merger that acts in prompts alone may keep every token",
        file="kvpolicy/policy/combination.py",
        old='if whole and (when == "prompt" or decode == "grow"):',
        new='if whole and decode == "grow":',
        tests=("tests/mergers/test_regress.py", "tests/test_policy.py"),
    ),
    Mutation(
        name="a policy by layer of which other layers are not used keeps them",
        file="kvpolicy/policy/policy.py",
        old="layers = [policy if policy in used else self.layers[indices[0]] for policy in self.layers]",
        new="layers = list(self.layers)",
        tests=("tests/test_policy.py", "tests/engine/test_by_layer_edges.py", "tests/engine/test_by_layer.py"),
    ),
    Mutation(
        name="a file is left behind by a write that failed",
        file="kvpolicy/spec/formats.py",
        old="        temporary.unlink(missing_ok=True)\n",
        new="",
        tests=("tests/test_formats.py",),
    ),
    Mutation(
        name="fingerprints are compared by their direction alone where they must be equal",
        file="kvpolicy/spec/model_identity.py",
        old="if exact:",
        new="if exact and len(stored) != len(weights):",
        tests=("tests/test_formats.py",),
    ),
)
