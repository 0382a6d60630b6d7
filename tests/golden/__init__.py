"""A golden record: what the code computes, as hashes, so that a restructured tree can be compared bit for bit.

    python -m tests.golden record FILE      run every case on the tree that is importable, write the hashes
    python -m tests.golden compare FILE     run every case again, print each case and field that differs
    python -m tests.golden against REV      record a git revision in a temporary worktree, then compare with it

All three take `--quick` (one model family, under a minute) and `--only TEXT` (cases whose name contains the text;
several mean any of them). `compare` and `against` take `--allow PATTERN`: a difference is allowed where
`fnmatch` finds the pattern in "CASE FIELD", for example `--allow "h2o+kivi * *.codes.*"`. Allowed differences are
printed apart; any other one makes the exit status 1. What deliberate changes made different is listed in
`expected.py`, counted and not printed; `--strict` compares it too.

A case is a policy on a model family in one dtype, put through one scenario (`scenarios.py`):

- `turns`: a left-padded batch whose prompt comes in two chunks, 40 decode steps, a second turn without one of the
  rows, and a few more steps;
- `prompt`: `generate` on one row without padding, where the model makes its cache itself;
- `rows`: more steps than the cache was told of, rows chosen and repeated, and the cache used for another prompt;
- `long`: a prompt of several tiles of queries and several chunks of codes;
- `beams`: `generate` with three beams on a padded batch;
- `ranks`: `turns` on a model whose heads are sharded over two processes.

Policies are a star: each selector with the plain codec, each codec with h2o, each allocator with snapkv, as the
registry names them, and on few families some with other options (`policies.py`). A policy that a family refuses is
recorded as `refused`, whatever the message.

A field is named after the moment, the quantity and the layer, such as `steps.codes.0`. `kept`, `keys` and `values` do
not depend on the order of slots; `slots` is the order. Tensors are hashed with their dtype and shape. Numbers (bytes,
plans) are recorded as they are.

Hashes are comparable on one machine with one set of library versions, with one thread; the record names these, and
`compare` warns where they differ. `against` does not need a record of the same machine. All that depends on the
internals of the engine is in `access.py`.
"""
