"""Defects in calibrations."""

from __future__ import annotations

from tests.mutants import Mutation

DICTIONARY = ("tests/calibration/test_dictionary.py",)
ECHOES = ("tests/calibration/test_echoes.py",)
CHANNELS = ("tests/readers/test_readers.py", "tests/cli/test_calibrate.py")

MUTATIONS = (
    Mutation(
        name="principal directions go through the origin",
        file="kvpolicy/calibration/grouping.py",
        old="spread = (a.moment + b.moment) / count - torch.outer(mean, mean)",
        new="spread = (a.moment + b.moment) / count",
        tests=("tests/calibration/test_grouping.py",),
    ),
    Mutation(
        name="only neighbors of a group must be similar",
        file="kvpolicy/calibration/grouping.py",
        old="all(between(other, layer) <= pair for other in groups[-1])",
        new="step <= pair",
        tests=("tests/calibration/test_grouping.py",),
    ),
    Mutation(
        name="a training stops one epoch late",
        file="kvpolicy/calibration/dictionary.py",
        old="len(losses) - 1 - losses.index(min(losses)) >= patience",
        new="len(losses) - 1 - losses.index(min(losses)) > patience",
        tests=DICTIONARY,
    ),
    Mutation(
        name="the best atoms are the last ones",
        file="kvpolicy/calibration/dictionary.py",
        old="best = atoms if loss < min(state.losses) else state.best",
        new="best = atoms",
        tests=DICTIONARY,
    ),
    Mutation(
        name="the mean of curvatures starts too small",
        file="kvpolicy/calibration/dictionary.py",
        old="self._sum.view(self._count, self._count) / (1 - _MEMORY**self._batches)",
        new="self._sum.view(self._count, self._count) / (1 - _MEMORY)",
        tests=DICTIONARY,
    ),
    Mutation(
        name="percentiles of channels are not interpolated",
        file="kvpolicy/calibration/kvquant.py",
        old="return torch.lerp(neighbors[:, 0], neighbors[:, 1], position - below)",
        new="return neighbors[:, 0]",
        tests=(
            "tests/codecs/test_kvquant.py::test_percentiles_between_two_numbers_are_interpolated",
            "tests/codecs/test_kvquant.py::test_ranges_are_percentiles",
        ),
    ),
    Mutation(
        name="levels of values cover outliers",
        file="kvpolicy/calibration/kvquant.py",
        old=".scatter(-1, places, False)",
        new=".scatter(-1, places, True)",
        tests=(
            "tests/codecs/test_kvquant.py::test_levels_of_values_leave_out_outliers",
            "tests/codecs/test_kvquant.py::test_levels_are_where_numbers_are",
        ),
    ),
    Mutation(
        name="gradients of unrotated keys stay rotated",
        file="kvpolicy/calibration/samples.py",
        old="of_keys = {layer: self._unrotate(layer, g) for layer, g in of_keys.items()}",
        new="of_keys = dict(of_keys)",
        tests=("tests/calibration/test_collect.py::test_squared_gradients_are_those_of_the_loss",),
    ),
    Mutation(
        name="long windows have less Fisher information",
        file="kvpolicy/calibration/samples.py",
        old="* len(ids) ** 2 /",
        new="/",
        tests=("tests/calibration/test_lowrank.py",),
    ),
    Mutation(
        name="moments of a group are of heads that are not neighbors",
        file="kvpolicy/calibration/lowrank.py",
        old="x.unflatten(0, (-1, group)).transpose(1, 2).flatten(2)",
        new="x.unflatten(0, (-1, group)).flip(1).transpose(1, 2).flatten(2)",
        tests=("tests/calibration/test_lowrank.py",),
    ),
    Mutation(
        name="short windows weigh as much as long ones",
        file="kvpolicy/calibration/channels.py",
        old="(len(ids) / tokens)",
        new="(1 / len(windows))",
        tests=("tests/calibration/test_channels.py",),
    ),
    Mutation(
        name="the sum of products decides the sign of a filter",
        file="kvpolicy/calibration/qfilters.py",
        old="torch.where(majority == 0, products.sum(-1), majority)",
        new="products.sum(-1)",
        tests=("tests/calibration/test_qfilters.py",),
    ),
    Mutation(
        name="what begins the text counts as a copy",
        file="kvpolicy/calibration/echoes.py",
        old="(at - place >= self.first)",
        new="(at >= self.first)",
        tests=ECHOES,
    ),
    Mutation(
        name="only the copy before is a copy",
        file="kvpolicy/calibration/echoes.py",
        old="(copy >= self.random) & (copy % self.random == 0)",
        new="(copy == self.random)",
        tests=ECHOES,
    ),
    Mutation(
        name="the score of a KV head is the mean of its query heads",
        file="kvpolicy/calibration/echoes.py",
        old="(sums / queries).amax(1)",
        new="(sums / queries).mean(1)",
        tests=ECHOES,
    ),
    Mutation(
        name="both scores have equal shares",
        file="kvpolicy/calibration/echoes.py",
        old="(total / share)",
        new="2",
        tests=ECHOES,
    ),
    Mutation(
        name="special tokens are drawn",
        file="kvpolicy/calibration/echoes.py",
        old="if token not in special",
        new="if token >= 0",
        tests=ECHOES,
    ),
    Mutation(
        name="products of heads are not capped",
        file="kvpolicy/calibration/heads.py",
        old="    if softcap is not None:\n",
        new="    if softcap is not None and scale < 0:\n",
        tests=("tests/calibration/test_heads.py",),
    ),
    Mutation(
        name="the penalty of a gate does not depend on its inputs",
        file="kvpolicy/calibration/gate.py",
        old="1.0 if is_constant else size * max(ridge, 1e-12)",
        new="1.0 if is_constant else max(ridge, 1e-12)",
        tests=("tests/calibration/test_gate.py",),
    ),
    Mutation(
        name="labels of a gate are not centered",
        file="kvpolicy/calibration/gate.py",
        old="cross = self.cross / self.tokens - mean[:, None] * label",
        new="cross = self.cross / self.tokens",
        tests=("tests/calibration/test_gate.py",),
    ),
    Mutation(
        name="gates are fitted to what judges them",
        file="kvpolicy/calibration/gate.py",
        old="            if kept_out:\n                continue\n",
        new="            if kept_out and number < 0:\n                continue\n",
        tests=("tests/calibration/test_gate.py",),
    ),
    Mutation(
        name="gates are fitted to the scores themselves",
        file="kvpolicy/calibration/gate.py",
        old="scores.index_select(1, at).log().clamp_min(FLOOR).mT",
        new="scores.index_select(1, at).clamp_min(FLOOR).mT",
        tests=("tests/calibration/test_gate.py",),
    ),
    Mutation(
        name="a finished calibration is replaced unasked",
        file="kvpolicy/calibration/driver.py",
        old="kind.check_free(out, kind.content(None, run.identity, made), force=force)",
        new="kind.check_free(out, kind.content(None, run.identity, made), force=True)",
        tests=("tests/calibration/test_driver.py",),
    ),
    Mutation(
        name="the hash of a file does not cover its tensors",
        file="kvpolicy/text/model_file.py",
        old="        found.update(tensor.reshape(-1).view(torch.uint8).numpy().data)\n",
        new="",
        tests=("tests/files/test_model_files.py",),
    ),
    Mutation(
        name="an option of a calibration has no least value",
        file="kvpolicy/cli/commands/calibrate.py",
        old='{"min": each.metadata.get("least")}',
        new="{}",
        tests=("tests/calibration/test_driver.py",),
    ),
)
