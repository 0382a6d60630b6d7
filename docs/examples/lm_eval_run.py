"""Evaluate a policy with lm-eval from Python, and read accuracy and bytes from the results.

    python docs/examples/lm_eval_run.py --model meta-llama/Llama-3.1-8B --tasks gsm8k --policy snapkv+kivi:bits=4@0.2

The equivalent of `lm_eval --model kvpolicy --model_args pretrained=...,policy=... --tasks ...`, for scripts that use
the numbers. The policy `full` is the stock cache with lm-eval's own code.

Without `--model`, the embedded model answers 4 documents of an offline task, so nothing is downloaded.

Prints (embedded model, CPU): full: kvpolicy_recall_512 exact_match 1.00, 1.00 of the bytes;
squeeze+kvcrush/snapkv@0.2: kvpolicy_recall_512 exact_match 1.00, 0.20 of the bytes
"""

import argparse
from typing import Any

from lm_eval import evaluator
from lm_eval.tasks import TaskManager

from kvpolicy_lm_eval import startup
from kvpolicy_lm_eval.model import KVPolicyLM

simple_evaluate: Any = evaluator.simple_evaluate  # its decorator hides its type


def main() -> None:
    """Evaluate the stock cache and the policy."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--tasks", nargs="+", default=["kvpolicy_recall_512"])
    parser.add_argument("--policy", default="squeeze+kvcrush/snapkv@0.2")
    parser.add_argument("--limit", type=int, default=4)
    args = parser.parse_args()
    tiny = args.model == "tiny"
    tasks = TaskManager(include_path=startup.tasks_path(), include_defaults=not tiny)
    summaries: list[str] = []
    for spec in ("full", args.policy):
        lm = KVPolicyLM(pretrained=None if tiny else args.model, policy=spec)
        results: dict[str, Any] = simple_evaluate(model=lm, tasks=args.tasks, task_manager=tasks, limit=args.limit)
        scores = [
            f"{task} {metric.partition(',')[0]} {value:.2f}"
            for task, metrics in results["results"].items()
            for metric, value in metrics.items()
            if isinstance(value, float) and "stderr" not in metric
        ]
        costs = results["config"]["kvpolicy"]["tasks"].values()  # one entry per task and type of request
        held = sum(cost["kv_bytes"] for cost in costs)
        full = sum(cost["full_kv_bytes"] for cost in costs)
        summaries.append(f"{spec}: {', '.join(scores)}, {held / full:.2f} of the bytes")
    print("; ".join(summaries))


if __name__ == "__main__":
    main()
