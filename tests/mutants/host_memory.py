"""Defects where keys and values lie in host memory."""

from __future__ import annotations

from tests.mutants import Mutation

TESTS = ("tests/engine/test_host_memory.py",)

MUTATIONS = (
    Mutation(
        name="copies from host memory are counted as reads of the device",
        file="kvpolicy/engine/link.py",
        old="self.loaded += size if self._host else 0",
        new="self.loaded += 0",
        tests=TESTS,
    ),
    Mutation(
        name="the slot of a merged token is not copied to host memory",
        file="kvpolicy/engine/link.py",
        old="target.nbytes // target.shape[2] * count",
        new="target.nbytes // target.shape[2]",
        tests=TESTS,
    ),
    Mutation(
        name="what is read whole stays in host memory",
        file="kvpolicy/engine/link.py",
        old="return (keys.to(device), values.to(device))",
        new="return vectors",
        tests=TESTS,
    ),
    Mutation(
        name="a layer is copied whole to read a part of it",
        file="kvpolicy/engine/link.py",
        old="return flat.index_select(0, index).to(device)",
        new="return flat.to(device).index_select(0, index.to(device))",
        tests=TESTS,
    ),
    Mutation(
        name="values in host memory are summed by other means",
        file="kvpolicy/engine/layer_index.py",
        old="if sums_in_place(q.shape[1] // slots.shape[1], held):",
        new="if values is None and sums_in_place(q.shape[1] // slots.shape[1], held):",
        tests=TESTS,
    ),
    Mutation(
        name="layers that look at every key lie in host memory",
        file="kvpolicy/engine/reading.py",
        old="return traits.host and reads_part(reader, layer_idx) and not looks_at_all",
        new="return traits.host and reads_part(reader, layer_idx)",
        tests=TESTS,
    ),
    Mutation(
        name="dense layers lie in host memory",
        file="kvpolicy/engine/reading.py",
        old="return traits.host and reads_part(reader, layer_idx) and not looks_at_all",
        new="return traits.host and not looks_at_all",
        tests=TESTS,
    ),
    Mutation(
        name="a prompt stays on the device",
        file="kvpolicy/engine/layer_tensors.py",
        old="if self.host and name in HOST_PARTS:",
        new="if self.host and not name:",
        tests=TESTS,
    ),
    Mutation(
        name="keys in host memory are counted as exact ones of the device",
        file="kvpolicy/engine/layer_tensors.py",
        old='            kinds |= {"exact": 0, HOST: kinds["exact"]}',
        new="            pass",
        tests=TESTS,
    ),
    Mutation(
        name="the log of a mark counts steps in host memory",
        file="kvpolicy/engine/undo_log.py",
        old='positions, _ = targets["positions"]',
        new='positions, _ = targets["keys"]',
        tests=TESTS,
    ),
    Mutation(
        name="a file is loaded to the device first",
        file="kvpolicy/engine/snapshot.py",
        old='own = torch.device("cpu") if store.tensors.host and name in HOST_PARTS else device',
        new="own = device",
        tests=TESTS,
        equivalent="set_part moves it to host memory: only the peak on the device is larger",
    ),
    Mutation(
        name="a budget in bytes bounds host memory too",
        file="kvpolicy/planning/planner.py",
        old="sum(layer.device_nbytes for layer in layers)",
        new="sum(sum(layer.nbytes.values()) for layer in layers)",
        tests=TESTS,
    ),
    Mutation(
        name="a batch must fit on the device with what lies in host memory",
        file="kvpolicy/planning/result.py",
        old="held = self.peak_nbytes if prefill else self.device_nbytes",
        new="held = self.peak_nbytes if prefill else self.nbytes",
        tests=TESTS,
    ),
    Mutation(
        name="the prefill holds what lies in host memory",
        file="kvpolicy/hf/plan.py",
        old="sizes = [layer.device_nbytes for layer in layers]",
        new="sizes = [sum(layer.nbytes.values()) for layer in layers]",
        tests=TESTS,
    ),
    Mutation(
        name="the budget of a policy by layer bounds host memory too",
        file="kvpolicy/planning/planner.py",
        old="sum(plan.device_nbytes for plan in plans)",
        new="sum(sum(plan.nbytes.values()) for plan in plans)",
        tests=TESTS,
    ),
    Mutation(
        name="mergers that look at every key are taken",
        file="kvpolicy/policy/combination.py",
        old='if merger.traits.when == "always" and decode != "grow":',
        new='if merger.traits.when == "always" and decode == "grow":',
        tests=TESTS,
    ),
    Mutation(
        name="a step's copies to host memory take no time",
        file="kvpolicy/cli/layer_table.py",
        old='"seconds": (planned.loaded + planned.stored) / rate',
        new='"seconds": planned.loaded / rate',
        tests=("tests/cli/test_transfers.py",),
    ),
)
