"""How long training the dictionaries of CSR will take, from one window and one step of each kind."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from kvpolicy.calibration.corpus import as_windows
from kvpolicy.calibration.csr_options import Dictionaries, atoms_of, check_chunks
from kvpolicy.calibration.curvature import Curvature
from kvpolicy.calibration.dictionary import INIT_VECTORS, check_enough, improved, start
from kvpolicy.calibration.samples import collect, tokens_per_window
from kvpolicy.codecs.csr.sparse import unit
from kvpolicy.hf.identity import identity
from kvpolicy.hf.model_spec import describe

_SMALL = 256
"""The most atoms that are initialized for the estimate."""


def estimate_csr(model: nn.Module, windows: Sequence[Tensor], options: Dictionaries) -> float:
    """Estimate how long `calibrate_csr` takes, at most: early stopping shortens it.

    One window is run, and one step is timed for each size of vectors, with random numbers.

    Args:
        model: A causal language model without a policy attached.
        windows: Token ids, each [n] or [1, n]; see `token_windows`.
        options: Which dictionaries will be trained, and how.

    Returns:
        Seconds.

    Raises:
        KVPolicyTypeError: If the windows are not token ids.
        KVPolicyError: If the model is not supported, the text is too short, or a number of chunks does
            not divide the head dimension.

    Examples:
        >>> import kvpolicy
        >>> windows = [torch.arange(3, 40)] * 4
        >>> estimate_csr(kvpolicy.tiny()[0], windows, Dictionaries(tokens=100, atoms=16)) > 0
        True
    """
    windows = as_windows(windows)
    facts = identity(model, None)
    check_chunks(options, facts["head_dim"])
    counts = tokens_per_window(windows, options.tokens)
    window = _timed(
        lambda: collect(model, windows[:1], tokens=counts[0], key_spaces=options.key_spaces, seed=options.seed)
    )
    layers = len(describe(model.config).evictable)
    vectors = sum(counts) * facts["heads"] * layers
    atoms = atoms_of(options, facts["heads"])
    device = next(model.parameters()).device
    kinds = [1] * len(options.key_spaces) + list(options.value_chunks)
    seconds = window * len(windows)
    for chunks in kinds:
        check_enough(vectors * chunks, atoms)  # if all layers share a dictionary; the training refuses the rest
        seconds += _training(options, atoms, chunks, facts["head_dim"] // chunks, vectors, layers, device)
    return seconds


def _training(
    options: Dictionaries, atoms: int, chunks: int, dim: int, vectors: int, layers: int, device: torch.device
) -> float:
    """Seconds for the dictionaries of all layers, of one kind.

    Args:
        options: How they are trained.
        atoms: Atoms of a dictionary.
        chunks: Chunks of a vector.
        dim: Channels of a chunk.
        vectors: Whole vectors of all layers.
        layers: The most dictionaries: layers that share one have one with as many vectors.
        device: Device on which they are trained.
    """
    training = options.training
    generator = torch.Generator().manual_seed(0)
    batch = min(training.batch, vectors) * chunks
    x = torch.randn(batch, dim, generator=generator, dtype=torch.float32, device="cpu").to(device)
    table = unit(torch.randn(atoms, dim, generator=generator, dtype=torch.float32, device="cpu")).to(device)
    curvature = Curvature(table)
    step = _timed(lambda: improved(x, table, options.pairs // chunks, training.rate, training.diverse, curvature))
    # Held-out vectors are encoded before the training and after each epoch.
    batches = math.ceil(vectors / training.batch)
    steps = batches * (training.epochs + training.held_out * (1 + training.epochs))
    few = min(atoms, _SMALL)
    sample = torch.randn(INIT_VECTORS * few, dim, generator=generator, dtype=torch.float32, device="cpu")
    # The time of k-means grows with the vectors and with the centers.
    beginning = _timed(lambda: start(sample, few, 0)) * (atoms / few) ** 2
    return step * steps + beginning * layers


def _timed(run: Callable[[], object]) -> float:
    """Seconds of the second run: the first one loads and allocates."""
    run()
    begin = _now()
    run()
    return _now() - begin


def _now() -> float:
    """The time when the device has done what it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
