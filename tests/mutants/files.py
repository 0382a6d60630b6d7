"""Defects in files of saved caches, and in what identifies a model or a prompt."""

from __future__ import annotations

from tests.mutants import Mutation

SAVED = ("tests/files/test_saved_cache.py",)
REPLAY = ("tests/engine/test_replay.py",)

MUTATIONS = (
    Mutation(
        name="the hash of a cache file leaves out dtypes and shapes",
        file="kvpolicy/hf/cache_file.py",
        old='found.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())',
        new="found.update(name.encode())",
        tests=("tests/files/test_hostile_files.py",),
    ),
    Mutation(
        name="views are written to a cache file as they are",
        file="kvpolicy/hf/cache_file.py",
        old="return owned(tensor.detach().cpu().contiguous())",
        new="return tensor.detach().cpu().contiguous()",
        tests=("tests/files/test_hostile_files.py",),
    ),
    Mutation(
        name="a loaded window has seen no token",
        file="kvpolicy/hf/saved_cache.py",
        old='            layer.cumulative_length = header["windows"][str(index)]\n',
        new="",
        tests=SAVED,
    ),
    Mutation(
        name="a loaded cache forgets what was measured",
        file="kvpolicy/hf/cache_forward.py",
        old='        self._measured.known = numbers["cosines"]\n',
        new="",
        tests=SAVED,
    ),
    Mutation(
        name="a loaded cache forgets the announced prompt",
        file="kvpolicy/hf/cache_forward.py",
        old='        self._prompt = numbers["prompt"]\n',
        new="",
        tests=("tests/files/test_saved_schedules.py",),
    ),
    Mutation(
        name="every rank loads as many heads as the first",
        file="kvpolicy/hf/saved_cache.py",
        old="torch.empty(1, saved[name][rank], 0, 1, device=device, dtype=torch.float32)",
        new="torch.empty(1, saved[name][0], 0, 1, device=device, dtype=torch.float32)",
        tests=("tests/parallel/test_exact.py::test_what_looks_at_all_heads",),
    ),
    Mutation(
        name="a row without tokens in a chunk gets the next position of its padding",
        file="kvpolicy/hf/transcript.py",
        old="after = torch.where(flags.any(1), after, earlier.next_position)",
        new="after = torch.where(flags.any(1), after, after)",
        tests=("tests/engine/test_transcript.py",),
    ),
    Mutation(
        name="positions that the first chunk was given are forgotten",
        file="kvpolicy/hf/transcript.py",
        old="positioned = earlier.positioned or position_ids is not None",
        new="positioned = position_ids is not None",
        tests=("tests/engine/test_transcript.py",),
    ),
    Mutation(
        name="a transcript takes the caller's own ids",
        file="kvpolicy/hf/transcript.py",
        old="ids = tokens.detach().clone()",
        new="ids = tokens.detach()",
        tests=("tests/engine/test_transcript.py",),
    ),
    Mutation(
        name="a transcript's ids are not selected with the rows",
        file="kvpolicy/hf/transcript.py",
        old="ids=tuple(map(fn, self.ids)), ",
        new="",
        tests=REPLAY,
    ),
    Mutation(
        name="codes that do not become smaller are compressed",
        file="kvpolicy/hf/cache_file.py",
        old="if blob.nbytes < tensors[name].nbytes}",
        new="if blob.nbytes <= tensors[name].nbytes + 64}",
        tests=("tests/files/test_saved_cache.py::test_codes_that_would_not_become_smaller_stay_as_they_are",),
    ),
    Mutation(
        name="a text of a file is compared from its end",
        file="kvpolicy/hf/seen_text.py",
        old="text = ids[:, :columns].cpu()",
        new="text = ids[:, -columns:].cpu()",
        tests=("tests/files/test_known_tokens.py",),
    ),
    Mutation(
        name="a cache counts from the offsets of the last prompt on the model",
        file="kvpolicy/hf/rope_deltas.py",
        old="        if counts and isinstance(cache, PolicyCache):\n            self.show(cache)\n",
        new="",
        tests=("tests/files/test_pictures.py",),
    ),
    Mutation(
        name="a prompt of text counts from the offsets of the last picture",
        file="kvpolicy/hf/rope_deltas.py",
        old='is_new and counts and named.get("inputs_embeds") is None',
        new="False",
        tests=("tests/files/test_pictures.py",),
    ),
)
