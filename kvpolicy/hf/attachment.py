"""The attachment of a policy to a model, which the model's caches share."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn, TypeVar

from torch import Tensor, nn

from kvpolicy.hf.model_spec import ModelShape
from kvpolicy.hf.tile_size import TileSize, tile_size
from kvpolicy.kernels.rotary import Rope
from kvpolicy.parallel.runtime import Sharing
from kvpolicy.policy import Policy
from kvpolicy.protocols import SINGLE_RANK, LayerShape, ModelInfo, Ranks, fits_pages
from kvpolicy.statistics import OutputNorms
from kvpolicy.statistics.statistic import Projection, first_of
from kvpolicy.text.errors import KVPolicyError, KVPolicyTypeError
from kvpolicy.text.limits import MAX_SIZE
from kvpolicy.text.tables import shorten

Word = TypeVar("Word", bound=str)

Chunks = Literal["select", "hold"]
"""Treatment of a chunk of a prompt: it is compressed, or held until the last one."""

SELECT: Chunks = "select"
HOLD: Chunks = "hold"


Hold = Literal["plain", "codes"]
"""How a prompt is held that waits: as its keys and values, or in the codes of the codec."""

PLAIN: Hold = "plain"
CODES: Hold = "codes"


def check_hold(hold: object) -> Hold:
    """Return `plain` or `codes`.

    Raises:
        KVPolicyError: If it is neither.
    """
    return _one_of("hold", hold, PLAIN, CODES)


def check_compile(compile: object) -> bool | None:
    """Return whether `generate` compiles its steps.

    Raises:
        KVPolicyError: If it is no bool and not None.
    """
    if compile is None or isinstance(compile, bool):
        return compile
    raise KVPolicyError(f"compile must be True, False or None, got {compile!r}; try compile=True.")


def check_projections(policy: Policy, projections: Mapping[int, Projection]) -> None:
    """Refuse a policy that needs norms of values behind an output projection that cannot be read.

    Raises:
        KVPolicyError: Naming the attention module.
    """
    replay = policy.replay
    if (replay is not None and replay.norms) or any(
        first_of(OutputNorms, own.selector.statistics) for own in policy.distinct
    ):
        for projection in projections.values():
            projection()


def check_replayed_ids(policy: Policy, vocabulary: int) -> None:
    """Refuse a replay of token ids that the model does not have.

    Args:
        policy: The policy.
        vocabulary: How many tokens the model knows.

    Raises:
        KVPolicyError: Naming the largest one.
    """
    plan = policy.replay
    largest = -1 if plan is None else max((*plan.first, *plan.later, *plan.reply), default=-1)
    if largest >= vocabulary:
        raise KVPolicyError(
            f"Token ids that are replayed must be below {vocabulary}, the size of the model's vocabulary, got "
            f"{largest}; try those of the model's own tokenizer."
        )


def check_held_codes(hold: Hold, policy: Policy, shape: LayerShape) -> None:
    """Refuse to hold prompts in the codes of a codec that does not encode every token by itself.

    Raises:
        KVPolicyError: Naming the codec.
    """
    codecs = [own.codec for own in policy.distinct]
    codec = next((each for each in codecs if not fits_pages(each)), None)
    if hold == CODES and codec is not None:
        raise KVPolicyError(
            f"The codec must encode every token by itself for hold='codes', got {codec}; try tokenwise, or "
            "hold='plain'."
        )
    if hold == CODES and shape.value_dim is not None:
        raise KVPolicyError(
            f"Values must have the size of keys for hold='codes', got {shape.value_dim} and {shape.head_dim}; try "
            "hold='plain'."
        )


def check_chunks(chunks: object) -> Chunks:
    """Return `select` or `hold`.

    Raises:
        KVPolicyError: If it is neither.
    """
    return _one_of("chunks", chunks, SELECT, HOLD)


def _one_of(name: str, value: object, usual: Word, other: Word) -> Word:
    if value == usual:
        return usual
    if value == other:
        return other
    raise KVPolicyError(f"{name} must be {usual!r} or {other!r}, got {value!r}; try {name}={other!r}.")


# Weak, so that a model can be freed. An attachment must therefore hold no reference to its model.
attachments: weakref.WeakKeyDictionary[nn.Module, Attachment] = weakref.WeakKeyDictionary()
"""The attachment of every model that has one."""


@dataclass(kw_only=True, eq=False)
class Attachment:
    """A policy's attachment to a model, as the caches of that model know it.

    Attributes:
        policy: The attached policy.
        model_shape: The model's cache.
        info: The same as codecs see it.
        identity: Description of the model in a cache file.
        rotations: Rotary embedding of each layer; empty if it cannot be undone.
        sharing: How the model is sharded over ranks, or None.
        rotary: The model's rotary embedding, or None.
        trained_positions: The positions that it was trained for; None if its kind extrapolates.
        projections: Reads the output projection of each layer.
        tile: The most tokens of a prompt that a layer takes at a time; `auto` to choose by free memory, None for all.
        chunks: `select` to compress each chunk of a prompt, `hold` to wait for the last one where it is announced.
        hold: `codes` to hold prompts that wait in the codes of the codec, else `plain`.
        compile: Whether `generate` compiles its steps on any device, or on none; None where transformers would.
        vocabulary: How many tokens the model knows.
        move_obstacle: Why tokens cannot be moved in a cache; empty if they can.
        active: False once the policy is detached.
    """

    policy: Policy
    model_shape: ModelShape
    info: ModelInfo
    identity: dict[str, Any]
    rotations: dict[int, Rope]
    sharing: Sharing | None = None
    rotary: nn.Module | None = None
    trained_positions: int | None = None
    projections: dict[int, Projection] = field(default_factory=dict[int, Projection])
    tile: TileSize = None
    chunks: Chunks = SELECT
    hold: Hold = PLAIN
    compile: bool | None = None
    vocabulary: int = MAX_SIZE
    move_obstacle: Callable[[], str] = str
    active: bool = True
    _ranks: dict[int, Ranks] = field(default_factory=dict[int, Ranks], init=False)
    _warned: set[str] = field(default_factory=set[str], init=False)

    @property
    def ropes(self) -> dict[int, Rope]:
        """Rotary embedding of each layer; empty unless the policy undoes it."""
        return self.rotations if self.policy.undoes_rotation else {}

    def check(self, policy: Policy, *, waits: bool = True) -> None:
        """Refuse a cache's policy that needs hooks which this attachment does not have.

        Args:
            policy: The policy.
            waits: Whether prompts under it are held in its codes.

        Raises:
            KVPolicyError: Naming the part of the policy.
        """
        policy.check(self.info)  # first: what follows asks a policy by layer for each layer of the model
        check_projections(policy, self.projections)
        check_replayed_ids(policy, self.vocabulary)
        if waits:
            check_held_codes(self.hold, policy, self.model_shape.shape)
        if policy.layer_metric == "cosine" != self.policy.layer_metric:
            raise KVPolicyError(
                f"The attached policy must measure every layer as the cache's {policy} does, got {self.policy}; try to "
                "attach a policy with the same allocator."
            )
        if policy.undoes_rotation and not self.ropes:
            raise KVPolicyError(
                f"The attached policy must store unrotated keys, as the cache's {policy} does, got {self.policy}; try "
                "to attach a policy with the same codec."
                if policy.undoes_rotation == "codec"
                else f"The attached policy must undo the same rotations, as the cache's {policy} does, got "
                f"{self.policy}; try to attach a policy with the same {policy.undoes_rotation}."
            )
        pinning = [_pins_massive(policy, index) > _pins_massive(self.policy, index) for index in self.info.indices]
        if any(pinning):
            raise KVPolicyError(
                f"The attached policy must read hidden states, as the cache's {policy} does, got {self.policy}; try to "
                "attach a policy with the same codec."
            )

    def tile_size(self, tokens: Tensor) -> int | None:
        """The most tokens that layers take at a time of `tokens` [B, P(, hidden)]; None if all."""
        return tile_size(self.tile, tokens, self.policy, self.model_shape)

    @property
    def place(self) -> tuple[int, int]:
        """This rank, and the number of ranks over which the model is sharded."""
        return (0, 1) if self.sharing is None else (self.sharing.rank, self.sharing.size)

    def resolve_ranks(self, layer_idx: int, queries: Tensor, keys: Tensor) -> Ranks:
        """The ranks that share a layer, from the heads [B, heads, P, D] of its first prompt; asked once per layer."""
        if self.sharing is None:
            return SINGLE_RANK
        if layer_idx not in self._ranks:
            self._ranks[layer_idx] = self.sharing.resolve_ranks(queries.shape[1], keys.shape[1], keys.device)
        return self._ranks[layer_idx]

    def first_warning(self, about: str) -> bool:
        """Whether a warning is still due; True only once for each thing that it is about."""
        due = about not in self._warned
        self._warned.add(about)
        return due

    def __reduce__(self) -> NoReturn:
        """Refuse: what is loaded elsewhere belongs to no attachment."""
        raise KVPolicyTypeError(
            "A cache under a policy cannot be pickled, since it belongs to its model; try cache.save."
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Attachment:
        """Copies of a cache belong to the same attachment."""
        return self


def detached() -> KVPolicyError:
    """The error for a cache whose policy is not attached to its model anymore."""
    return KVPolicyError(
        "The cache's policy must be attached to its model, got a detached one; try to attach a policy, and to make a "
        "new cache."
    )


def not_copied(policy: Policy) -> KVPolicyTypeError:
    """The error for a copy of a model with a policy: its hooks would work for the original."""
    return KVPolicyTypeError(
        f"A model must have no policy attached to be copied, got {shorten(str(policy))}; try to attach once the "
        "copy is made, as a trainer's, or detach(), then attach to both."
    )


def not_pickled(policy: Policy) -> KVPolicyTypeError:
    """The error for pickling a model with a policy."""
    return KVPolicyTypeError(
        f"A model must have no policy attached to be pickled, got {shorten(str(policy))}; try save_pretrained or "
        "state_dict, or detach() first."
    )


def _pins_massive(policy: Policy, layer_idx: int) -> bool:
    """Whether the codec of a layer keeps the tokens with the largest activations in full precision."""
    return policy.at(layer_idx).codec.traits.pins == "massive"


def attachment_of(model: nn.Module) -> Attachment:
    """The attachment of a model.

    Raises:
        KVPolicyError: If no policy is attached.
        KVPolicyTypeError: If it is no model.
    """
    if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise KVPolicyTypeError(
            f"The model must be a torch.nn.Module with a policy attached, got {type(model).__name__}; try "
            "kvpolicy.attach(model, policy), then kvpolicy.PolicyCache(model)."
        )
    found = attachments.get(model)
    if found is None:
        raise KVPolicyError(
            "The model must have a policy attached, got none; try kvpolicy.attach(model, policy) first."
        )
    return found
