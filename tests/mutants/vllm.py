"""Defects in documents for vLLM."""

from __future__ import annotations

from tests.mutants import Mutation

PACKAGE = "integrations/kvpolicy_vllm"

MUTATIONS = (
    Mutation(
        name="keys lose the factor of their embedding when they are moved",
        file="kvpolicy/hf/dense_cache.py",
        old="(rope.unrotate(keys[None], at)[0] * rope.scaling)",
        new="rope.unrotate(keys[None], at)[0]",
        tests=("tests/vllm/test_moved.py",),
    ),
    Mutation(
        name="keys are moved by all tokens of the text",
        file="kvpolicy/hf/dense_cache.py",
        old="moved(keys, total - kept, rope) if move",
        new="moved(keys, total, rope) if move",
        tests=("tests/vllm/test_dense_layers.py", "tests/vllm/test_moved.py"),
    ),
    Mutation(
        name="slots that stand for several tokens are served",
        file="kvpolicy/hf/dense_cache.py",
        old="if counts is not None and bool(counts.any()):",
        new="if counts is not None and bool(counts.isnan().any()):",
        tests=("tests/vllm/test_dense_layers.py",),
    ),
    Mutation(
        name="a prompt without a question begins with a document",
        file=f"{PACKAGE}/documents.py",
        old="return len(prompt) > self.kept and",
        new="return len(prompt) >= self.kept and",
        tests=("tests/vllm/test_library.py", "tests/vllm/test_requests.py"),
    ),
    Mutation(
        name="links may lead out of the folder",
        file=f"{PACKAGE}/documents.py",
        old="return path.is_file() and path.resolve().parent == self.folder",
        new="return path.is_file()",
        tests=("tests/vllm/test_library.py",),
    ),
    Mutation(
        name="a document may have another cache salt",
        file=f"{PACKAGE}/requests.py",
        old="if salt != document.salt or not",
        new="if not",
        tests=("tests/vllm/test_requests.py",),
    ),
    Mutation(
        name="a salt of a document is enough",
        file=f"{PACKAGE}/requests.py",
        old="if salt.startswith(SALT):",
        new="if salt == SALT:",
        tests=("tests/vllm/test_requests.py",),
    ),
    Mutation(
        name="a failed load spoils blocks that it does not write to",
        file=f"{PACKAGE}/loading.py",
        old="return load.blocks[load.start // self._block_size :",
        new="return load.blocks[0 :",
        tests=("tests/vllm/test_loader.py",),
    ),
    Mutation(
        name="a tail begins at the first token of a document",
        file=f"{PACKAGE}/loading.py",
        old="tail = load.kept - load.kept % self._block_size",
        new="tail = 0",
        tests=("tests/vllm/test_loader.py",),
    ),
    Mutation(
        name="only the kept tokens must fit into the trained positions",
        file=f"{PACKAGE}/engine.py",
        old="document.total + question > trained:",
        new="document.kept + question > trained:",
        tests=("tests/vllm/test_engine.py",),
    ),
    Mutation(
        name="a fine-tuned model may serve documents of its base",
        file=f"{PACKAGE}/engine.py",
        old="info, exact=True, remedy=remedy)",
        new="info, exact=False, remedy=remedy)",
        tests=("tests/vllm/test_engine.py",),
    ),
    Mutation(
        name="any scheme of authorization passes",
        file=f"{PACKAGE}/middleware.py",
        old='return scheme.lower() == "bearer" and any(same)',
        new="return any(same)",
        tests=("tests/vllm/test_middleware.py",),
    ),
    Mutation(
        name="documents are looked at without a key",
        file=f"{PACKAGE}/middleware.py",
        old="FIELD not in content or not is_let_in(scope, state.args):",
        new="FIELD not in content:",
        tests=("tests/vllm/test_middleware.py",),
    ),
    Mutation(
        name="usage counts placeholders",
        file=f"{PACKAGE}/usage.py",
        old="more = document.total - document.kept",
        new="more = 0",
        tests=("tests/vllm/test_middleware.py",),
    ),
    Mutation(
        name="a document of the system is plain text",
        file=f"{PACKAGE}/chat.py",
        old='("user", "system")',
        new='("user",)',
        tests=("tests/vllm/test_chat.py",),
    ),
)
