"""The connector of vLLM that fills the beginning of a request with a document or with its own compressed prompt.

vLLM loads it by name: `"kv_connector": "KVPolicyConnector", "kv_connector_module_path": "kvpolicy_vllm.connector"`.
"""

# vLLM is no dependency of development: where it is missing, its names are unknown to a type checker.
# pyright: reportMissingImports=false, reportUntypedBaseClass=false

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, KVConnectorRole
from vllm.model_executor.models.utils import extract_layer_index

from kvpolicy.hf.model_spec import describe
from kvpolicy.text.errors import KVPolicyError
from kvpolicy_vllm.compressor import Compressor
from kvpolicy_vllm.documents import Library
from kvpolicy_vllm.engine import Engine, check_compresses
from kvpolicy_vllm.ledger import Ledger, Work
from kvpolicy_vllm.loading import Heads, Loader, check_own, layers_of
from kvpolicy_vllm.recipe import POLICY, Recipe
from kvpolicy_vllm.requests import Load, Requests
from kvpolicy_vllm.taps import compressor_of, tap


@dataclass
class Step(KVConnectorMetadata):
    """Work of a step."""

    loads: list[Load] = field(default_factory=list)
    work: Work = field(default_factory=Work)


class KVPolicyConnector(KVConnectorBase_V1):
    """Fills the beginning of requests with documents that kvpolicy has compressed, and compresses prompts.

    Its `kv_connector_extra_config` has `folder`, where the documents are. Without it, requests name files by their
    paths, which is for programs that make the requests themselves. With `policy`, or `KVPOLICY_POLICY` in the
    environment, prompts can be compressed; see `Recipe`.

    Raises:
        KVPolicyError: If the engine cannot load documents: a model with sliding windows or without rotary positions, a
            quantized format without `do_kv_cache_update`, context parallelism, a drafter with a cache of its own; or
            if it cannot compress prompts under the policy that it is given.
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
        self._recipe = Recipe.of(vllm_config.kv_transfer_config)
        self._ledger: Ledger | None = None
        if self._recipe is not None:
            check_compresses(vllm_config, self._recipe, describe(self._engine.model))
            self._ledger = Ledger(self._recipe, self._block_size)
        # Workers verify what they load, and need the scheduler's word only for its path.
        library = Library(folder, verify=False, paths=True)
        self._requests = Requests(self._engine, library, self._block_size, self._ledger)
        self._blocks = int(kv_cache_config.num_blocks)
        self._loader: Loader | None = None
        self._compressor: Compressor | None = None
        self._failed: set[int] = set()

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Whether a whole step may not be one graph: attention is looked at while prompts are compressed."""
        return bool(extra_config.get("policy", os.environ.get(POLICY)))

    # in the scheduler

    def on_new_request(self, request: Any) -> None:
        """Look at a new request."""
        self._requests.admit(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens from outside behind those that are in the prefix cache; None to ask again in the next step."""
        return self._requests.matched(request, num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Note the blocks of a request, also of one that was preempted and comes back."""
        self._requests.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """Documents that the workers load in this step."""
        work = Work()
        if self._ledger is not None:
            work = self._ledger.work(
                scheduler_output.num_scheduled_tokens,
                sorted(scheduler_output.preempted_req_ids or ()),
                lambda request_id: self._kv_cache_manager.get_block_ids(request_id)[0],
            )
        return Step(self._requests.take(), work)

    def update_connector_output(self, connector_output: Any) -> None:
        """Leave nothing in the prefix cache that follows from blocks that could not be filled."""
        if connector_output.invalid_block_ids:
            self._kv_cache_manager.evict_blocks(self._requests.failed(connector_output.invalid_block_ids))

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Forget a request; its blocks may be freed at once."""
        self._requests.forget(request)
        return False, None

    # in a worker

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        """Find the layers of this rank, whose caches are allocated now."""
        modules = self._config.compilation_config.static_forward_context
        check_own(modules, kv_caches)
        layers = layers_of(modules, extract_layer_index)
        total = describe(self._engine.model).whole.heads
        rank = get_tensor_model_parallel_rank()
        ranks = get_tensor_model_parallel_world_size()
        heads = Heads.of(total, rank, ranks)
        dtype = self._config.model_config.dtype

        def write(layer_idx: int, keys: Tensor, values: Tensor, slots: Tensor) -> None:
            layer = layers[layer_idx]
            cache = layer.kv_cache
            keys, values = (t.to(cache.device, dtype) for t in (keys, values))
            layer.impl.do_kv_cache_update(layer, keys, values, cache, slots.to(cache.device))

        take = None
        if self._recipe is not None:
            sizes = self._blocks, self._block_size
            compressor = compressor_of(self._recipe, self._engine, heads, layers, sizes, write)
            for index, layer in layers.items():
                tap(layer, index, compressor.see)
            self._compressor = compressor
            take = compressor.take
        self._loader = Loader(self._engine, heads, self._block_size, layers, write, take)

    @torch.inference_mode()
    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Take compressed prompts out of blocks that others get."""
        if self._compressor is not None and isinstance(kv_connector_metadata, Step):
            self._compressor.save(kv_connector_metadata.work)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Begin a step."""
        super().bind_connector_metadata(connector_metadata)
        if self._compressor is not None and isinstance(connector_metadata, Step):
            self._compressor.begin(connector_metadata.work)

    def clear_connector_metadata(self) -> None:
        """End a step."""
        super().clear_connector_metadata()
        if self._compressor is not None:
            self._compressor.end()

    @torch.inference_mode()
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Load the documents and the compressed prompts of the requests that this step begins."""
        step = self._get_connector_metadata()
        if isinstance(step, Step) and step.loads:
            assert self._loader is not None, "the caches of the layers were not registered"
            self._failed |= self._loader.load(step.loads)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """The blocks that could not be filled, or whose last token is lost: their requests end with an error."""
        failed = self._failed
        self._failed = set()
        return failed if self._compressor is None else failed | self._compressor.lost_blocks()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: documents are loaded before the step."""

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None:
        """Nothing is saved."""

    def wait_for_save(self) -> None:
        """Nothing is saved."""
