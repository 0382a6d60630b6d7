"""The connector of vLLM that fills the beginning of a request with a document.

vLLM loads it by name: `"kv_connector": "KVPolicyConnector", "kv_connector_module_path": "kvpolicy_vllm.connector"`.
"""

# vLLM is no dependency of development: where it is missing, its names are unknown to a type checker.
# pyright: reportMissingImports=false, reportUntypedBaseClass=false

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, KVConnectorRole
from vllm.model_executor.models.utils import extract_layer_index

from kvpolicy.hf.model_spec import describe
from kvpolicy.spec.errors import KVPolicyError
from kvpolicy_vllm.documents import Library
from kvpolicy_vllm.engine import Engine
from kvpolicy_vllm.loading import Heads, Loader, check_own, layers_of
from kvpolicy_vllm.requests import Load, Requests


@dataclass
class Loads(KVConnectorMetadata):
    """What the workers load in a step."""

    loads: list[Load] = field(default_factory=list)


class KVPolicyConnector(KVConnectorBase_V1):
    """Fills the beginning of requests with documents that kvpolicy has compressed.

    Its `kv_connector_extra_config` has `folder`, where the documents are. Without it, requests name files by their
    paths, which is for programs that make the requests themselves.

    Raises:
        KVPolicyError: If the engine cannot load documents: a model with sliding windows or without rotary positions, a
            quantized format without `do_kv_cache_update`, context parallelism, a drafter with a cache of its own.
    """

    requires_kv_delivery = False  # nothing is handed to another engine

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        """Make the part of the scheduler or of a worker."""
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        groups = kv_cache_config.kv_cache_groups
        if len(groups) != 1:
            raise KVPolicyError(
                f"All layers must have the same kind of cache for documents, got {len(groups)} kinds, such as sliding "
                "windows."
            )
        self._config = vllm_config
        self._block_size = int(groups[0].kv_cache_spec.block_size)
        self._engine = Engine.of(vllm_config)
        folder = vllm_config.kv_transfer_config.get_from_extra_config("folder", None)
        # Workers verify what they load, and need the scheduler's word only for its path.
        self._requests = Requests(self._engine, Library(folder, verify=False, paths=True), self._block_size)
        self._loader: Loader | None = None
        self._failed: set[int] = set()

    # in the scheduler

    def on_new_request(self, request: Any) -> None:
        """Look at a new request."""
        self._requests.admit(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Tokens of a request's document behind those that are in the prefix cache."""
        return self._requests.matched(request, num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Note the blocks of a request, also of one that was preempted and comes back."""
        self._requests.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """What the workers load in this step."""
        return Loads(self._requests.take())

    def update_connector_output(self, connector_output: Any) -> None:
        """Leave nothing in the prefix cache that follows from blocks that could not be filled."""
        if connector_output.invalid_block_ids:
            self._kv_cache_manager.evict_blocks(self._requests.failed(connector_output.invalid_block_ids))

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Forget a request; its blocks may be freed at once."""
        self._requests.forget(request.request_id)
        return False, None

    # in a worker

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        """Find the layers of this rank, whose caches are allocated now."""
        modules = self._config.compilation_config.static_forward_context
        check_own(modules, kv_caches)
        layers = layers_of(modules, extract_layer_index)
        total = describe(self._engine.model).whole.heads
        heads = Heads.of(total, get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size())
        dtype = self._config.model_config.dtype

        def write(layer_idx: int, keys: Tensor, values: Tensor, slots: Tensor) -> None:
            layer = layers[layer_idx]
            cache = layer.kv_cache
            keys, values = (t.to(cache.device, dtype) for t in (keys, values))
            layer.impl.do_kv_cache_update(layer, keys, values, cache, slots.to(cache.device))

        self._loader = Loader(self._engine, heads, self._block_size, layers, write)

    @torch.inference_mode()
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Load the documents of the requests that this step begins."""
        loads = self._get_connector_metadata()
        if isinstance(loads, Loads) and loads.loads:
            assert self._loader is not None, "the caches of the layers were not registered"
            self._failed |= self._loader.load(loads.loads)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """The blocks that could not be filled: their requests end with an error."""
        failed, self._failed = self._failed, set()
        return failed

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: documents are loaded before the step."""

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None:
        """Nothing is saved."""

    def wait_for_save(self) -> None:
        """Nothing is saved."""
