"""What is imported when: policies and plans need no transformers, pictures no matplotlib before they are drawn."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from kvpolicy import registry
from kvpolicy.tuning.grid import PARTS
from kvpolicy.tuning.ordinary import rivals

LIBRARIES = {
    *("transformers", "huggingface_hub", "lm_eval", "sklearn", "accelerate", "datasets", "deepspeed", "fastapi"),
    *("llguidance", "uvicorn", "openai", "yaml", "matplotlib", "sympy", "torch._dynamo", "kvpolicy_lm_eval.model"),
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


DOORS = {
    "explain snapkv@0.5": {"uniform", "snapkv", "full", "drop", "plain", "all"},
    # SnapKV is the default of kvcrush.
    "explain squeeze+kvcrush/h2o+kivi@0.5": {
        *("uniform", "squeeze", "kvcrush", "h2o", "snapkv", "full", "drop", "kivi", "plain", "all"),
    },
    "plan llama-3.1-8b snapkv@0.5 --tp 2": {"uniform", "snapkv", "full", "drop", "plain", "all"},
}
"""Commands, and the methods that a process imports for each: those of the policy, and the defaults."""

OF_TORCH = {"torch.utils._device", "torch.utils._triton"}
"""What kvpolicy itself imports of PyTorch, beyond what `import torch` does."""

IMPORTED = """
import torch
before = set(sys.modules)
from kvpolicy.cli.app import main
assert main({words}) == 0
print(*(set(sys.modules) - before), file=sys.stderr)
"""


def imported_by(command: str) -> tuple[set[str], set[str], set[str]]:
    """What a command imports after PyTorch: methods, modules of PyTorch, and libraries that a command may not need."""
    (line,) = run(IMPORTED.format(words=command.split()))
    modules = set(line.split())
    targets = {name: target.partition(":")[0] for table in registry.BUILT_IN.values() for name, target in table.items()}
    methods = {name for name, module in targets.items() if module in modules}
    return methods, {name for name in modules if name.startswith("torch.")}, modules & LIBRARIES


@pytest.mark.parametrize("command", DOORS)
def test_a_command_imports_the_methods_of_its_policy(command: str) -> None:
    """And no other, so that no package of methods may import them all."""
    methods, torch_modules, libraries = imported_by(command)
    assert methods == DOORS[command]
    assert torch_modules <= OF_TORCH and not libraries


def test_a_plan_imports_what_its_advice_needs() -> None:
    """The last line of a plan says whether `tune` fits, which depends on the methods that it would try."""
    methods, torch_modules, libraries = imported_by("plan llama-3.1-8b snapkv@0.5")
    tried = {word for spec in (*PARTS, *rivals()) for word in re.findall(r"[a-z0-9]+", spec)}
    assert {"snapkv", "plain"} < methods <= tried | DOORS["explain snapkv@0.5"]
    assert not methods & {"csr", "gear", "kvquant", "minicache", "lava", "cake"}
    assert torch_modules <= OF_TORCH and not libraries
