"""`python -m kvpolicy_eval.data.windows`: prompts and answers of the embedded model's tasks, in a JSONL file.

Each line is an object with the keys `prompt`, `question`, `answer` and `task`. The prompt is compressed, the question
is fed to the compressed cache, and the answer comes next: see `kvpolicy_eval.data.modes`. A policy can be tuned on such
a file, and evaluated on one with another seed: its documents are drawn independently, so that their records and
questions differ. Source text around hidden records is cut out of the same held-out text, and may overlap.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from random import Random

from kvpolicy.text.formats import replace_file
from kvpolicy.text.output import check_output
from kvpolicy_eval.data.tasks import tasks
from kvpolicy_lm_eval.data.modes import MODES, place, second_question

TRIES = 4
"""Prompts that are drawn for each that is needed."""


def windows(names: Sequence[str], mode: str, n: int, seed: int, length: int) -> list[dict[str, str]]:
    """The lines of a file: `n` for each task, task by task.

    Args:
        names: Names of tasks.
        mode: The place of the question.
        n: Prompts per task.
        seed: Source of randomness, of which no task and no other seed sees the same.
        length: Rough prompt length in tokens, 512 to 1,024.

    Raises:
        ValueError: If there is no such mode or task, or a task has no second question.

    Examples:
        >>> (line,) = windows(["few_shot"], "inside", 1, 0, 512)
        >>> line["prompt"][-6:], line["question"], line["answer"]
        ('?salad', ':', 'D')
    """
    made: list[dict[str, str]] = []
    for name in names:
        draw = tasks(length)[name]
        drawn = [draw(Random(f"{seed} {name} {number}")) for number in range(TRIES * n)]
        if mode == "second":  # a hot key may have been asked for more often than all others
            drawn = [prompt for prompt in drawn if second_question(prompt)] or drawn
        for one in drawn[:n]:
            prompt, fed, answer = place(one, mode)
            if not fed and len(answer) == 1:
                # The only token of such an answer would be computed from the full prompt: hold back the one before.
                fed = prompt[-1]
                prompt = prompt[:-1]
            made.append({"prompt": prompt, "question": fed, "answer": answer, "task": name})
    return made


def main(argv: list[str] | None = None) -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(prog="python -m kvpolicy_eval.data.windows", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the file, such as windows.jsonl")
    parser.add_argument("--mode", choices=MODES, default="inside", help="the place of the question; inside by default")
    parser.add_argument(
        "--tasks", nargs="+", choices=[*tasks(512)], metavar="TASK", help="names of tasks; by default all that can"
    )
    parser.add_argument("-n", type=int, default=4, help="prompts per task; 4 by default")
    parser.add_argument("--seed", type=int, default=0, help="another one gives other documents")
    parser.add_argument("--length", type=int, default=1000, help="rough length of a prompt in tokens, 512 to 1024")
    parser.add_argument("--force", action="store_true", help="replace a file that exists")
    args = parser.parse_args(argv)
    if args.n < 1:
        parser.error(f"-n must be at least 1, got {args.n}.")
    names = args.tasks or [name for name in tasks(args.length) if args.mode != "second" or _has_second(name)]
    try:
        check_output(args.out, force=args.force)
        lines = windows(names, args.mode, args.n, args.seed, args.length)
        replace_file(args.out, "".join(json.dumps(line) + "\n" for line in lines).encode())
    except (OSError, ValueError) as error:
        parser.error(str(error))
    print(f"{len(lines)} windows of {', '.join(names)} in {args.out}")


def _has_second(name: str) -> bool:
    """Whether the prompts of a task have something else to ask for."""
    return second_question(tasks(512)[name](Random(0))) is not None


if __name__ == "__main__":
    main()
