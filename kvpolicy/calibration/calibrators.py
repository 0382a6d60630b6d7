"""Calibrators: each class is a command `kvpolicy calibrate NAME`, and its fields are the options.

Nothing here imports PyTorch before it runs: the help of the commands does not wait for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from kvpolicy.calibration.calibrator import Calibrator, option, refuse_unused
from kvpolicy.calibration.run import Run
from kvpolicy.text.errors import KVPolicyError
from kvpolicy.text.tables import shorten

if TYPE_CHECKING:
    from kvpolicy.allocators.head_files import HeadFile
    from kvpolicy.calibration.csr import Dictionaries
    from kvpolicy.codecs._files import CalibrationFile
    from kvpolicy.selectors.gate_files import GateFile

KEY_SPACES = ("rotated", "unrotated")


@dataclass(frozen=True, kw_only=True, slots=True)
class CSRCalibrator(Calibrator):
    """Train the dictionaries of CSR.

    To resume an interrupted run, run the same command again.

    Attributes:
        tokens: Approximate number of tokens whose keys and values are used.
        seed: Random seed.
        key_spaces: Keys: unrotated, rotated or both, by a comma.
        value_chunks: Chunks per value; several as 1,2,4.
        atoms: Atoms per dictionary; 0 for 256 per KV head, at most 8192.
        pairs: Atoms per key and value during training.
        key_groups: Layers that share a dictionary of keys: auto, each, all, or groups such as 0,1,2-4.
        value_groups: Layers that share a dictionary of values: auto, each, all, or groups such as 0,1,2-4.
        pair: With auto, the maximum difference of two layers in a group, 0 to 1.
        chain: With auto, the maximum sum of the differences of neighbors in a group.
        epochs: Maximum number of epochs.
        batch: Keys or values per step.
        rate: Initial length of a step, of a Newton step's.
        patience: Number of epochs without improvement after which training stops.
        dictionaries: The options of Python, which has more, in the place of all others; none of the command.
    """

    file: ClassVar[str] = "csr"
    use: ClassVar[str] = "csr:dictionary={}"

    tokens: int = option(20_480, least=1)
    seed: int = 0
    key_spaces: tuple[str, ...] = option(("unrotated",), names=("--frames",))
    value_chunks: tuple[int, ...] = option((2,), names=("--sn",))
    atoms: int = 0
    pairs: int = option(8, least=1)
    key_groups: str = "auto"
    value_groups: str = "auto"
    pair: float = 0.2
    chain: float = 1.0
    epochs: int = 5
    batch: int = 1024
    rate: float = 1.0
    patience: int = 5
    dictionaries: Dictionaries | None = field(default=None, metadata={"hidden": True})

    def __post_init__(self) -> None:
        """Check the options, before anything slow."""
        _ = self.options

    @property
    def options(self) -> Dictionaries:
        """Which dictionaries are trained, and how."""
        from kvpolicy.calibration.csr import Dictionaries
        from kvpolicy.calibration.dictionary import Training
        from kvpolicy.codecs.csr.csr import CSR

        if self.dictionaries is not None:
            return self.dictionaries
        former = CSR.VALUE_ALIASES["key_space"]
        own = {name: getattr(self, name) for name in self.__slots__ if name != "dictionaries"}
        own["key_spaces"] = tuple(former.get(space, space) for space in self.key_spaces)
        training = {name: own.pop(name) for name in ("epochs", "batch", "rate", "patience")}
        return Dictionaries(**own, training=Training(**training, seed=self.seed))

    def made(self, run: Run) -> dict[str, Any]:
        from kvpolicy.calibration.csr import facts_of

        return facts_of(run, self.options)

    def fit(self, run: Run, made: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        from kvpolicy.calibration.csr import trained

        return trained(run, self.options, made)

    def finish(self, run: Run) -> None:
        """Remove the checkpoints."""
        from kvpolicy.calibration.csr import clear

        clear(run.out)

    def report(self, content: CalibrationFile) -> Iterator[str]:
        for key, losses in content.meta["losses"].items():
            part, _, group = key.rpartition(".")
            layers = ",".join(map(str, content.meta["groups"][part][int(group)]))
            yield f"{part} of layers {layers}: error {losses[0]:.4f} before training, {min(losses):.4f} after"


@dataclass(frozen=True, kw_only=True, slots=True)
class KVQuantCalibrator(Calibrator):
    """Fit the ranges and quantization levels of KVQuant.

    By default, numbers are weighted by their Fisher information, which needs gradients of the model.

    Attributes:
        tokens: Approximate number of tokens whose keys and values are used.
        seed: Random seed.
        bits: Bits per number to fit levels for.
        outliers: Fraction of numbers that will stay in full precision.
        no_fisher: Use uniform weights instead of the Fisher information.
    """

    file: ClassVar[str] = "kvquant"
    use: ClassVar[str] = "kvquant:calibration={}"

    tokens: int = option(16_384, least=1)
    seed: int = 0
    bits: tuple[int, ...] = (2, 3, 4)
    outliers: float = 0.01
    no_fisher: bool = False

    def made(self, run: Run) -> dict[str, Any]:
        if not self.bits or set(self.bits) - {*range(1, 9)}:
            got = ",".join(map(str, self.bits)) or "none"
            raise KVPolicyError(f"The bits must be one or several of 1 to 8, got {got}; try 2,3,4.")
        if not 0 <= self.outliers < 1:
            raise KVPolicyError(
                f"The fraction of outliers must be at least 0 and less than 1, got {self.outliers}; try 0.01."
            )
        made = {"head_dim": run.identity["head_dim"], **run.text(windows=False), "bits": list(self.bits)}
        tokens = run.enough("fit KVQuant's ranges to", ", or more tokens of it", self.tokens)
        options = {"outliers": self.outliers, "fisher": not self.no_fisher, "tokens": tokens, "seed": self.seed}
        return made | options

    def fit(self, run: Run, made: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        from kvpolicy.calibration.kvquant import fit_layers

        return fit_layers(run, self.bits, self.outliers, self.tokens, fisher=not self.no_fisher, seed=self.seed), {}


@dataclass(frozen=True, kw_only=True, slots=True)
class LowRankCalibrator(Calibrator):
    """Find the directions in which keys and values vary most, for the codec lowrank.

    It takes one forward pass of each window, without gradients; with --fisher, a backward pass too.

    Attributes:
        key_spaces: Keys: rotated, unrotated or both.
        head_groups: Numbers of KV heads that share directions, in addition to single ones, such as 2,4.
        fisher: Collect the Fisher information too, by which ranks=fisher divides ranks.
    """

    file: ClassVar[str] = "lowrank"
    use: ClassVar[str] = "lowrank:calibration={}"

    key_spaces: tuple[str, ...] = KEY_SPACES
    head_groups: tuple[int, ...] = ()
    fisher: bool = False

    def made(self, run: Run) -> dict[str, Any]:
        unknown = sorted({*self.key_spaces} - {*KEY_SPACES})
        if unknown or not self.key_spaces:
            got = ", ".join(unknown) or "none"
            raise KVPolicyError(f"The key spaces must be of {' and '.join(KEY_SPACES)}, got {got}; try rotated.")
        heads: int = run.identity["heads"]
        for group in self.head_groups:
            if group < 2 or heads % group:
                raise KVPolicyError(
                    f"A group of heads must be at least 2 and divide the {heads} KV heads of the model, got {group}; "
                    f"try {heads}."
                )
        made = run.text() | {"tokens": run.enough("find bases with"), "key_spaces": sorted({*self.key_spaces})}
        return made | {"head_groups": sorted({*self.head_groups}), "fisher": self.fisher}

    def fit(self, run: Run, made: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        from kvpolicy.calibration.lowrank import find_bases

        return find_bases(run, self.key_spaces, made["head_groups"], fisher=self.fisher)

    def report(self, content: CalibrationFile) -> Iterator[str]:
        for part, share in content.meta["energy"].items():
            yield f"{part}: {share:.3f} of the variance in a quarter of the directions"


@dataclass(frozen=True, kw_only=True, slots=True)
class RotationCalibrator(Calibrator):
    """Find the rotations of OSCAR: directions of queries, and of values by how much they are attended to.

    It takes two forward passes of each window, without gradients.

    Attributes:
        shared: One rotation for all KV heads of a layer, as in the paper, instead of one for each.
    """

    file: ClassVar[str] = "oscar"
    use: ClassVar[str] = "oscar:calibration={}"

    shared: bool = False

    def made(self, run: Run) -> dict[str, Any]:
        return run.text() | {"tokens": run.enough("find rotations with"), "shared": self.shared}

    def fit(self, run: Run, made: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        from kvpolicy.calibration.oscar import find_rotations

        return find_rotations(run, shared=self.shared), {}


@dataclass(frozen=True, kw_only=True, slots=True)
class TransformCalibrator(Calibrator):
    """Find the principal components of KVTC, and their bits, for cache files.

    It takes one forward pass of each window, without gradients.

    Attributes:
        tokens: Approximate number of tokens whose keys and values are used.
        seed: Random seed.
        ratios: 16 bits over the mean bits of a number: which of them files may have.
        layers: Neighboring layers that have components together, as all do in the paper.
    """

    file: ClassVar[str] = "kvtc"
    use: ClassVar[str] = "cache.save(path, compress='kvtc:calibration={}:ratio={}')"

    tokens: int = option(8_192, least=1)
    seed: int = 0
    ratios: tuple[int, ...] = (4, 8, 16, 32)
    layers: int = option(1, least=1)

    def __post_init__(self) -> None:
        """Check the options, before anything slow."""
        if not self.ratios or not all(map(_is_count, self.ratios)):
            got = ",".join(map(str, self.ratios)) or "none"
            raise KVPolicyError(f"The ratios must be one or several integers from 1, got {got}; try 4,8,16,32.")
        if not _is_count(self.layers):
            raise KVPolicyError(f"layers must be an integer from 1, got {self.layers}; try 1.")

    def made(self, run: Run) -> dict[str, Any]:
        from kvpolicy.calibration.kvtc import SINKS, check_model

        check_model(run.model)
        purpose = f"find components with, without the first {SINKS} of each window,"
        tokens = run.enough(purpose, ", longer windows, or more tokens of it", self.tokens, skip=SINKS)
        options = {"ratios": sorted({*self.ratios}), "layers": self.layers, "seed": self.seed}
        return run.text() | {"tokens": tokens} | options

    def fit(self, run: Run, made: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        from kvpolicy.calibration.kvtc import find_kvtc

        return find_kvtc(run, made["ratios"], self.layers, self.tokens, self.seed)

    def spec(self, out: str) -> str:
        return self.use.format(out, 16 if 16 in self.ratios else self.ratios[0])


@dataclass(frozen=True, kw_only=True, slots=True)
class ChannelCalibrator(Calibrator):
    """Measure how salient each key channel is, for the reader labels."""

    file: ClassVar[str] = "channels"
    use: ClassVar[str] = "labels:calibration={}"

    def made(self, run: Run) -> dict[str, Any]:
        tokens = run.enough("measure channels with", ", or more windows of it")
        return {"head_dim": run.identity["head_dim"], **run.text(windows=False), "tokens": tokens}

    def fit(self, run: Run, made: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        from kvpolicy.calibration.channels import measure_salience

        return measure_salience(run, made["tokens"]), {}


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadCalibrator(Calibrator):
    """Score every KV head by what it retrieves, for the head allocator duo.

    It takes one forward pass of each window of the text, or one of a random text, without gradients.

    Attributes:
        seed: Random seed.
        probe: reach: how far back attention reaches in a text. razor: attention to copies of random tokens.
        sinks: First tokens that a streaming head keeps.
        recent: Newest tokens that a streaming head keeps.
        positions: With reach, positions of the estimate.
        random: With razor, random tokens; 2500 if the model has positions for them.
        repeats: With razor, number of copies of the random tokens.
        echo: With razor, share of the heads with the highest echo score.
        induction: With razor, share of the heads with the highest induction score.
    """

    file: ClassVar[str] = "kvpolicy.allocators.head_files:HEAD_FILES"
    use: ClassVar[str] = "uniform/duo:file={}{}+streaming:sinks={}@0.5"
    writes: ClassVar[str] = "scores"
    windows: ClassVar[int] = 50

    seed: int = 0
    probe: str = "reach"
    sinks: int = option(64, least=0)
    recent: int = option(256, least=1)
    positions: int = option(500, least=2)
    random: int | None = option(None, least=2)
    repeats: int = option(4, least=2)
    echo: float = 0.01
    induction: float = 0.14

    def __post_init__(self) -> None:
        """Refuse what the probe does not use."""
        razor = ("random", "repeats", "echo", "induction")
        refuse_unused(self, razor if self.probe == "reach" else ("positions",), f"--probe {self.probe}")

    def check_text(self, paths: Sequence[str]) -> None:
        """Refuse an unknown probe, a text that it does not read, and a missing one."""
        if self.probe not in ("reach", "razor"):
            raise KVPolicyError(f"--probe must be reach or razor, got {shorten(repr(self.probe))}; try reach.")
        if self.probe == "razor" and paths:
            raise KVPolicyError(f"--probe razor must have no text, got {shorten(paths[0])}; remove it, or try reach.")
        if self.probe == "reach" and not paths:
            raise KVPolicyError("--probe reach must have a text, got none; try --text FILE, or --probe razor.")

    def made(self, run: Run) -> dict[str, Any]:
        from kvpolicy.calibration.echoes import check_shares, random_tokens
        from kvpolicy.text.validation import check_size

        sizes = {"sinks": check_size("sinks", self.sinks, 0), "recent": check_size("recent", self.recent, 1)}
        if self.probe == "reach":
            return sizes | run.text() | {"positions": self.positions}
        check_shares(self.echo, self.induction)
        random = random_tokens(run.model, self.random, self.repeats)
        options = {"probe": "razor", "random": random, "repeats": self.repeats, "seed": self.seed}
        return sizes | options | {"echo": self.echo, "induction": self.induction}

    def fit(self, run: Run, made: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        from kvpolicy.calibration.echoes import echo_scores, ranked_scores, warn_if_even
        from kvpolicy.calibration.heads import head_scores, rows_of

        if self.probe == "reach":
            return rows_of(
                run.model, head_scores(run.model, run.windows, positions=self.positions, progress=run.progress)
            ), {}
        random: int = made["random"]
        found = echo_scores(run.model, random=random, repeats=self.repeats, seed=self.seed, progress=run.progress)
        warn_if_even(found, random, self.repeats)
        return rows_of(run.model, ranked_scores(found, echo=self.echo, induction=self.induction)), {}

    def report(self, content: HeadFile) -> Iterator[str]:
        for layer, row in enumerate(content.heads):
            yield f"layer {layer}: {' '.join(f'{score:.3f}' for score in row) or 'not managed by policies'}"

    def spec(self, out: str) -> str:
        sparsity = f":sparsity={1 - self.echo - self.induction:.4g}" if self.probe == "razor" else ""
        return self.use.format(out, sparsity, self.sinks)


@dataclass(frozen=True, kw_only=True, slots=True)
class FilterCalibrator(Calibrator):
    """Find the main direction of the queries of every KV head, for the selector qfilters.

    It takes one forward pass of each window, without gradients.

    Attributes:
        tokens: Approximate number of tokens whose queries are used.
        seed: Random seed.
    """

    file: ClassVar[str] = "kvpolicy.selectors.filter_files:FILTER_FILES"
    use: ClassVar[str] = "qfilters:file={}@0.2"
    writes: ClassVar[str] = "filters"
    length: ClassVar[int] = 2048
    windows: ClassVar[int] = 20

    tokens: int = option(3000, least=1)
    seed: int = 0

    def made(self, run: Run) -> dict[str, Any]:
        tokens = run.enough("find filters with", ", or more tokens of it", self.tokens)
        return run.text() | {"tokens": tokens, "seed": self.seed}

    def fit(self, run: Run, made: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        from kvpolicy.calibration.qfilters import query_filters, sample_queries

        found = sample_queries(run.model, run.windows, tokens=self.tokens, seed=self.seed, progress=run.progress)
        heads: int = run.identity["heads"]
        return {layer: query_filters(queries, heads) for layer, queries in run.bar(found.items(), "filters")}, {}


@dataclass(frozen=True, kw_only=True, slots=True)
class CenterCalibrator(Calibrator):
    """Find the mean query of every query head, for the selector triattention.

    It takes one forward pass of each window, without gradients.
    """

    file: ClassVar[str] = "kvpolicy.selectors.center_files:CENTER_FILES"
    use: ClassVar[str] = "triattention:file={}@0.2"
    writes: ClassVar[str] = "mean queries"
    length: ClassVar[int] = 2048
    windows: ClassVar[int] = 20

    def made(self, run: Run) -> dict[str, Any]:
        return run.text() | {"tokens": run.enough("find centers with")}

    def fit(self, run: Run, made: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        from kvpolicy.calibration.triattention import query_centers

        return query_centers(run.model, run.windows, progress=run.progress), {}


@dataclass(frozen=True, kw_only=True, slots=True)
class GateCalibrator(Calibrator):
    """Fit gates that predict the scores of kvzip:plus=true, for the selector kvzap.

    It takes two forward passes of each window, without gradients.

    Attributes:
        tokens: Approximate number of tokens to fit the gates to.
        seed: Random seed.
        kind: linear: ridge regression. mlp: one hidden layer, trained.
        ridge: With linear, penalty over the mean variance of the inputs.
        units: With mlp, units of the hidden layer.
        epochs: With mlp, epochs of the training.
    """

    file: ClassVar[str] = "kvpolicy.selectors.gate_files:GATE_FILES"
    use: ClassVar[str] = "kvzap:file={}@0.2"
    writes: ClassVar[str] = "gates"

    tokens: int = option(131_072, least=1)
    seed: int = 0
    kind: str = "linear"
    ridge: float = 1e-3
    units: int = 512
    epochs: int = 15

    def __post_init__(self) -> None:
        """Check the options, before anything slow."""
        if self.kind not in ("linear", "mlp"):
            raise KVPolicyError(f"The kind of a gate must be linear or mlp, got {self.kind!r}; try linear.")
        if not 0 <= self.ridge < math.inf:
            raise KVPolicyError(f"ridge must be a finite number of at least 0, got {self.ridge}; try 0.001.")
        for name, value, example in (("units", self.units, 512), ("epochs", self.epochs, 15)):
            if value < 1:
                raise KVPolicyError(f"{name} must be at least 1, got {value}; try {example}.")
        refuse_unused(self, ("units", "epochs") if self.kind == "linear" else ("ridge",), f"--kind {self.kind}")

    def made(self, run: Run) -> dict[str, Any]:
        tokens = run.enough("fit gates to", ", or more tokens of it", self.tokens)
        options = {"ridge": self.ridge} if self.kind == "linear" else {"units": self.units, "epochs": self.epochs}
        return run.text() | {"tokens": tokens, "seed": self.seed, "kind": self.kind} | options

    def fit(self, run: Run, made: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        from kvpolicy.calibration.gate import Training, fit_gates

        training = Training(units=self.units, epochs=self.epochs, seed=self.seed)
        return fit_gates(run, self.tokens, training, self.ridge if self.kind == "linear" else None)

    def report(self, content: GateFile) -> Iterator[str]:
        for layer, share in zip(content.gates, (content.made or {})["r2"], strict=True):
            yield f"layer {layer}: {share:.3f} of the variance explained"


CALIBRATORS: dict[str, type[Calibrator]] = {
    "csr": CSRCalibrator,
    "kvquant": KVQuantCalibrator,
    "lowrank": LowRankCalibrator,
    "oscar": RotationCalibrator,
    "kvtc": TransformCalibrator,
    "channels": ChannelCalibrator,
    "heads": HeadCalibrator,
    "qfilters": FilterCalibrator,
    "triattention": CenterCalibrator,
    "gate": GateCalibrator,
}
"""The calibrators by the names of their commands, in the order of the help."""


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
