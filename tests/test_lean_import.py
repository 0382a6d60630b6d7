"""What is imported when: policies and plans need no transformers, pictures no matplotlib before they are drawn."""

from __future__ import annotations

import subprocess
import sys

from kvpolicy import registry

LIBRARIES = {
    "transformers",
    "huggingface_hub",
    "lm_eval",
    "sklearn",
    "accelerate",
    "datasets",
    "deepspeed",
    "fastapi",
    "uvicorn",
    "openai",
    "yaml",
    "matplotlib",
    "sympy",
    "torch._dynamo",
    "kvpolicy_lm_eval.model",
}
SPECS = [f"{base}{name}@0.5" for name in registry.names() for base in ("", "snapkv+", "uniform/")]
"""No part makes PyTorch import its symbolic shapes, with SymPy: that takes a third as long as PyTorch itself."""
STEPS = {
    "the help of the evaluation": """
from kvpolicy_eval import cli
try:
    cli.main(["--help"])
except SystemExit:
    pass
""",
    "the names of pictures": """
from kvpolicy import plots
assert "bytes_by_kind" in dir(plots)
""",
    "plans": f"""
import kvpolicy
from kvpolicy.cli.app import main
assert main(["explain"]) == main(["plan"]) == main(["explain", "snapkv", "gpt-oss-20b"]) == 0
for name, ranks in (("llama-3.1-8b", "2"), ("gemma-3-12b", "1")):
    assert main(["plan", name, "squeeze+kvcrush+rotate@20%", "--tp", ranks]) == 0
for spec in {SPECS}:
    try:
        kvpolicy.plan("tiny", kvpolicy.Policy.parse(spec), prompt=1024)
    except kvpolicy.KVPolicyError:
        pass  # such as a part that must be calibrated
""",
    "every method": """
import kvpolicy.registry as r
assert all(r.lookup(name) for name in r.names())
""",
}
WITHOUT_TORCH = 2
"""The first steps, which do not import PyTorch either."""

BARE = """
import warnings
warnings.filterwarnings("ignore", "Failed to initialize NumPy")
blocked = ("matplotlib", "numpy", "transformers")
sys.modules |= dict.fromkeys(blocked)
import kvpolicy
from kvpolicy import plots
for look in (lambda: kvpolicy.attach, lambda: kvpolicy.tiny(), lambda: plots.kept, lambda: plots.budgets):
    try:
        look()
    except ImportError as error:
        print(str(error).partition("pip install ")[2], file=sys.stderr)
"""


def run(code: str) -> list[str]:
    """The words that a new process writes to its standard error."""
    start = f"import sys; sys.path[:0] = {[path for path in sys.path if path]}\n"
    done = subprocess.run([sys.executable, "-c", start + code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stderr.splitlines()


def test_nothing_is_imported_before_it_is_needed() -> None:
    """By one step after the other in one process."""
    code = ""
    for number, (title, step) in enumerate(STEPS.items()):
        unwanted = LIBRARIES | ({"torch"} if number < WITHOUT_TORCH else set())
        code += f"{step}\nprint({title!r}, *sorted({unwanted} & set(sys.modules)), sep=': ', file=sys.stderr)\n"
    drawn = "assert plots.kept and 'matplotlib.pyplot' not in sys.modules, 'pyplot has a state of its own'\n"
    assert run(code + drawn) == [*STEPS]


def test_a_bare_install_is_told_what_it_lacks() -> None:
    assert run(BARE) == ["'kvpolicy[hf]'."] * 2 + ["'kvpolicy[plots]'."] * 2
