"""Loading documents and compressed prompts into the blocks of an engine, in the process of one rank."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvpolicy.hf.cache_file import read
from kvpolicy.hf.dense_cache import DenseLayer, dense_layers
from kvpolicy.text.errors import KVPolicyError
from kvpolicy_vllm.engine import Engine
from kvpolicy_vllm.requests import Load

logger = logging.getLogger(__name__)

TAILS = 64
"""Documents of which the tokens behind their last whole block are held in memory."""

Write = Callable[[int, Tensor, Tensor, Tensor], None]
"""Writes keys and values [n, h, D] of a layer to slots [n] of its cache: `write(layer_idx, keys, values, slots)`."""


class Heads(NamedTuple):
    """The KV heads of a rank.

    Attributes:
        first: The first one.
        number: How many.
    """

    first: int
    number: int

    @classmethod
    def of(cls, total: int, rank: int, size: int) -> Heads:
        """The heads of one of `size` ranks; if there are fewer heads than ranks, several ranks have the same one.

        Raises:
            KVPolicyError: If they cannot be divided.

        Examples:
            >>> Heads.of(8, 1, 2), Heads.of(2, 3, 4)
            (Heads(first=4, number=4), Heads(first=1, number=1))
        """
        if total % size and size % total:
            raise KVPolicyError(
                f"tensor_parallel_size must divide the {total} KV heads or be a multiple of them, got {size}."
            )
        return cls(rank * total // size, max(total // size, 1))


class Loader:
    """Writes documents into blocks.

    vLLM's prefix cache shares the whole blocks of a document, so that its file is read once. What is behind the last
    whole block has to be written for every request, and is held in memory.

    Args:
        engine: The engine.
        heads: The heads of this rank.
        block_size: Tokens of a block.
        layers: The layers of this rank.
        write: Writes to the cache of a layer.
        take: The layers of a compressed prompt, by its name; None if none are compressed.
    """

    def __init__(
        self,
        engine: Engine,
        heads: Heads,
        block_size: int,
        layers: Iterable[int],
        write: Write,
        take: Callable[[str], Sequence[DenseLayer]] | None = None,
    ) -> None:
        """Load nothing yet."""
        self._engine = engine
        self._heads = heads
        self._block_size = block_size
        self._layers = {*layers}
        self._write = write
        self._take = take
        self._tails: OrderedDict[str, list[DenseLayer]] = OrderedDict()

    def load(self, loads: Sequence[Load]) -> set[int]:
        """Load what requests need, and log why a request gets nothing.

        Returns:
            The blocks that were not filled, which end their requests.
        """
        failed: set[int] = set()
        for each in loads:
            try:
                if each.reason:
                    raise KVPolicyError(each.reason)
                self._fill(each)
            except KVPolicyError as error:
                logger.error("Request %s ends without an answer. %s", each.request_id, error)
                failed |= {*self._blocks(each)}
            except Exception:  # whatever it is, other requests must go on
                logger.exception("Request %s ends without an answer.", each.request_id)
                failed |= {*self._blocks(each)}
        return failed

    def _blocks(self, load: Load) -> tuple[int, ...]:
        """The blocks that a load writes to."""
        return load.blocks[load.start // self._block_size : -(-load.kept // self._block_size)]

    def _fill(self, load: Load) -> None:
        blocks = torch.tensor(load.blocks[: -(-load.kept // self._block_size)], device="cpu")
        slots = (blocks[:, None] * self._block_size + torch.arange(self._block_size, device="cpu")).flatten()[
            : load.kept
        ]
        if load.prompt:
            for layer in [] if self._take is None else self._take(load.prompt):
                self._write_layer(layer, load.start, slots[load.start :])
        else:
            self._fill_document(load, slots)

    def _fill_document(self, load: Load, slots: Tensor) -> None:
        tail = load.kept - load.kept % self._block_size
        held = self._tails.get(load.digest) if load.start >= tail else None
        if held is not None:
            self._tails.move_to_end(load.digest)
            for layer in held:
                self._write_layer(layer, load.start - tail, slots[load.start :])
            return
        tails: list[DenseLayer] = []
        for layer in self._decoded(load):
            if layer.layer_idx in self._layers:
                self._write_layer(layer, load.start, slots[load.start :])
                tails.append(DenseLayer(layer.layer_idx, *(t[:, tail:].clone() for t in layer[1:])))
        if {layer.layer_idx for layer in tails} != self._layers:
            raise KVPolicyError(
                f"A document must have the layers {sorted(self._layers)}, got {[layer.layer_idx for layer in tails]}; "
                "make it with the model that is served."
            )
        self._tails[load.digest] = tails
        while len(self._tails) > TAILS:
            self._tails.popitem(last=False)

    def _decoded(self, load: Load) -> Iterator[DenseLayer]:
        content = read(Path(load.path), mapped=False)
        if content.header["sha256"] != load.digest:
            raise KVPolicyError(
                f"The document {load.path!r} must be the one that the prompt was made for, got an edited file; try the "
                "request again."
            )
        first, number = self._heads
        for layer in dense_layers(content, self._engine.skeleton, load.path):
            # Checked again, since the scheduler has read the header without its hash.
            if layer.keys.shape[1] != load.kept:
                raise KVPolicyError(
                    f"The document {load.path!r} must hold {load.kept} tokens, got {layer.keys.shape[1]}; save it "
                    "again."
                )
            yield DenseLayer(layer.layer_idx, *(t[first : first + number] for t in layer[1:]))

    def _write_layer(self, layer: DenseLayer, start: int, slots: Tensor) -> None:
        keys, values = (t[:, start:].transpose(0, 1).contiguous() for t in (layer.keys, layer.values))
        self._write(layer.layer_idx, keys, values, slots)


def layers_of(modules: Mapping[str, Any], index_of: Callable[[str], int]) -> dict[int, Any]:
    """The attention layers among an engine's modules, by their index in the model.

    Args:
        modules: Modules by name, such as `static_forward_context`.
        index_of: The index in a name.

    Raises:
        KVPolicyError: If a layer cannot hold documents, or two have the same index.
    """
    found: dict[int, Any] = {}
    for name, module in modules.items():
        if not hasattr(module, "kv_cache"):
            continue
        what = f"The attention of {name}"
        if getattr(module, "sliding_window", None) is not None:
            raise KVPolicyError(f"{what} must be full attention for documents, got a sliding window.")
        if getattr(getattr(module, "impl", None), "alibi_slopes", None) is not None:
            raise KVPolicyError(f"{what} must have rotary positions for documents, got ALiBi.")
        if getattr(module, "kv_sharing_target_layer_name", None):
            raise KVPolicyError(f"{what} must have its own cache for documents, got a shared one.")
        if not hasattr(getattr(module, "impl", None), "do_kv_cache_update"):
            raise KVPolicyError(
                f"{what} must write keys and values by do_kv_cache_update for documents, got the backend "
                f"{type(getattr(module, 'impl', module)).__name__}; try another --attention-backend."
            )
        index = index_of(name)
        if index in found:
            raise KVPolicyError(f"{what} must be the only one of layer {index} for documents, got two.")
        found[index] = module
    return found


def check_own(modules: Mapping[str, Any], caches: Mapping[str, Tensor]) -> None:
    """Refuse caches of another engine: all engines of a process have the connector of its first one.

    Args:
        modules: Modules of the connector's engine by name.
        caches: Caches of attention layers by name.

    Raises:
        KVPolicyError: If they are not the caches of these modules.
    """
    for name, cache in caches.items():
        own = getattr(modules.get(name), "kv_cache", None)
        if not isinstance(own, Tensor) or own.data_ptr() != cache.data_ptr():
            raise KVPolicyError(
                f"An engine must be alone in its process for documents, got another one's cache of {name}; try "
                "VLLM_ENABLE_V1_MULTIPROCESSING=1."
            )
