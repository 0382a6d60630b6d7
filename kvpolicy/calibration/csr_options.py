"""Options of a calibration of CSR: which dictionaries are trained, and how."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvpolicy.calibration.dictionary import Training
from kvpolicy.codecs.csr.dictionaries import FILE_KEY_SPACES
from kvpolicy.text.errors import KVPolicyError
from kvpolicy.text.parameters import check_min

ATOMS_PER_HEAD = 256
"""The default number of atoms of a dictionary, for each KV head."""

MAX_ATOMS = 8192
"""The maximum of this default."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Dictionaries:
    """Which dictionaries are trained for CSR, and how.

    Source: CSR (arXiv:2412.11741; AAAI-25), Section 3.3 and its appendix.
    Differences: layers are compared with base-2 logarithms over the joint range of a pair, and grouped from left to
    right (the paper does not say how; its groups are adjusted by hand). The error is the mean over a batch; with the
    paper's sum, the weight of the diversity term would always be 1. This weight is computed from the same batch, not
    from the previous one. Codes are treated as constants, and the gradient of an atom has no component along the atom.
    The paper names no optimizer, learning rate or schedule; ours are damped Newton steps from the centers of a k-means,
    with a running mean of the curvature, a cosine schedule and early stopping on held-out vectors. The size of 256
    atoms "per KV head" is interpreted as the size of one dictionary for all heads.

    Attributes:
        key_spaces: The key spaces to train dictionaries for: `unrotated`, `rotated` or both.
        value_chunks: The numbers of chunks of a value to train dictionaries for, such as 1, 2 and 4.
        atoms: The number of atoms of each dictionary, N; 0 for 256 times the KV heads, at most 8192.
        pairs: Pairs per key during training, and per value over all its chunks.
        key_groups: Layers that share a dictionary of keys: `auto`, `each`, `all` or groups such as `0,1-3`.
        value_groups: The same for values.
        pair: With `auto`, the maximum divergence of two layers of a group, 0 to 1.
        chain: With `auto`, the maximum sum of the divergences of neighbors in a group.
        tokens: About how many tokens are sampled.
        seed: Seed of the sample.
        training: How each dictionary is trained.
    """

    key_spaces: tuple[str, ...] = ("unrotated",)
    value_chunks: tuple[int, ...] = (2,)
    atoms: int = 0
    pairs: int = 8
    key_groups: str = "auto"
    value_groups: str = "auto"
    pair: float = 0.2
    chain: float = 1.0
    tokens: int = 20_480
    seed: int = 0
    training: Training = field(default_factory=Training)

    def __post_init__(self) -> None:
        """Check the options."""
        if not self.key_spaces or set(self.key_spaces) - set(FILE_KEY_SPACES):
            raise KVPolicyError(
                f"Dictionaries.key_spaces must be 'unrotated', 'rotated' or both, got {self.key_spaces}; try "
                "('unrotated',)."
            )
        if not self.value_chunks or any(chunks < 1 or self.pairs % chunks for chunks in self.value_chunks):
            raise KVPolicyError(
                f"Dictionaries.value_chunks must be divisors of pairs={self.pairs}, got {self.value_chunks}; try (1,)."
            )
        check_min(self, atoms=0, tokens=1)


def check_chunks(options: Dictionaries, dim: int) -> None:
    """Refuse numbers of chunks that do not divide the head dimension."""
    for chunks in options.value_chunks:
        if dim % chunks:
            raise KVPolicyError(
                f"Dictionaries.value_chunks must be divisors of the head dimension, {dim}, got {chunks}; try 1."
            )


def atoms_of(options: Dictionaries, heads: int) -> int:
    """The number of atoms of each dictionary, for a model with that many KV heads."""
    return options.atoms or min(ATOMS_PER_HEAD * heads, MAX_ATOMS)
