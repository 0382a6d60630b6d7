"""The script of the tests of launchers: load a model on every rank, generate, and exit; or fail on one rank then."""

import sys

import torch
import torch.distributed as dist

import kvpolicy_deepspeed


def main(folder: str, backend: str, end: str) -> None:
    torch.set_num_threads(1)
    with kvpolicy_deepspeed.ranks(seed=0) as place:
        model = kvpolicy_deepspeed.load(folder, backend=backend)  # pyright: ignore[reportArgumentType]
        tokens = model.generate(torch.arange(3, 19)[None], max_new_tokens=5, min_new_tokens=5, do_sample=True)
        print(f"rank {place.rank} of {place.size} sampled {tokens[0, 16:].tolist()}", flush=True)
        if end == "fail":
            dist.barrier()  # both have printed
            if place.rank == 1:
                raise RuntimeError("the second rank failed on purpose")
            dist.all_reduce(torch.ones(1))  # waits for a rank that never calls it
    raise AssertionError("the code after the block must not run")


if __name__ == "__main__":
    main(*sys.argv[1:])
