"""Shard one model over two ranks, which keep exactly the tokens that a single rank keeps.

    torchrun --standalone --nproc_per_node 2 docs/examples/two_ranks.py --model meta-llama/Llama-2-70b-hf
    python docs/examples/two_ranks.py

Each rank holds half of the KV heads and their slots. Methods that use all heads, such as `kvcrush`, communicate with
the other rank. The spec of the policy and the report are the same as on a single rank. Without a launcher, as in the
second line, the script runs on one rank: only the number of ranks and the bytes per rank differ in its last line.

Without `--model`, it runs the embedded model on two CPU processes.

Prints (embedded model, CPU): 2 rank(s): answer 3513, right is 3513; kept per layer [415, 415, 59, 59, 59, 59, 59,
59]; 627,720 bytes on this rank
"""

import argparse
import os
from importlib.resources import files
from importlib.util import find_spec
from random import Random

from transformers import AutoTokenizer

import kvpolicy
import kvpolicy_deepspeed
from kvpolicy_eval.data import prompts


def main() -> None:
    """Generate on every rank; the first one prints."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default=str(files("kvpolicy") / "assets" / "tiny"))
    parser.add_argument("--policy", default="squeeze+kvcrush/snapkv@0.3")
    found = "deepspeed" if find_spec("deepspeed") else "hf"
    parser.add_argument("--backend", default=found, help="deepspeed, if it is installed, or hf for transformers")
    args = parser.parse_args()
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1")):
        os.environ.setdefault(name, value)  # without a launcher: one rank
    with kvpolicy_deepspeed.ranks(seed=0) as place:  # ends all ranks together if one fails
        model = kvpolicy_deepspeed.load(args.model, backend=args.backend, dtype="float32", policy=args.policy)
        tokenizer = AutoTokenizer.from_pretrained(args.model)
        prompt, right = prompts.recall(Random(0), records=70)
        inputs = tokenizer(prompt, return_tensors="pt").to(place.device)
        with kvpolicy.attach(model, args.policy) as handle:
            output = model.generate(**inputs, max_new_tokens=4, do_sample=False)
            report = handle.report()
        if place.rank == 0:
            kept = [layer.kept[0] for layer in report.layers]
            print(
                f"{place.size} rank(s): answer {tokenizer.decode(output[0, -4:])}, right is {right}; "
                f"kept per layer {kept}; {report.nbytes:,} bytes on this rank"
            )


if __name__ == "__main__":
    main()
