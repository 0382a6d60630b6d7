"""Loading of a model that is sharded over ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from kvpolicy.parallel.launch import World, meet, world
from kvpolicy.parallel.sharding import FAMILIES
from kvpolicy_deepspeed import checks
from kvpolicy_deepspeed.checkpoint import Checkpoint, of_tensors

Backend = Literal["deepspeed", "hf"]


def load(path_or_model: Any, *, backend: Backend = "deepspeed", dtype: Any = None, policy: Any = None) -> Any:
    """Load this rank's shard of a model, ready for `kvpolicy.attach`. All ranks must call this.

    The ranks are the processes that `torchrun` or `deepspeed` started. A single rank loads the whole model. No rank
    holds more of a checkpoint than its own shard and one file. If there are fewer KV heads than ranks, heads are
    replicated.

    Args:
        path_or_model: A folder with safetensors, a model name on the Hub, or (with DeepSpeed) a model in memory, which
            is sharded in place.
        backend: `"deepspeed"` (AutoTP) or `"hf"` (the tensor parallelism of transformers).
        dtype: The dtype of the weights; by default that of the checkpoint.
        policy: A policy or its spec. It is only checked, before any weight is read, and not attached.

    Returns:
        A `transformers.PreTrainedModel` in evaluation mode. On every rank, its logits are those of the whole model.

    Raises:
        KVPolicyError: If the backend cannot shard the model, or the policy does not support it.
        ImportError: If DeepSpeed is needed and not installed.
        KVPolicyStateError: If no launcher started this process; the message contains the command to use.
    """
    place = world()
    checks.check_backend(backend, path_or_model)
    config = path_or_model.config if isinstance(path_or_model, nn.Module) else _config(path_or_model)
    dtype = checks.check_dtype(dtype, backend)
    checks.check_policy(config, policy, dtype, place.size, follows_plan=backend == "hf")
    if place.size > 1:
        from kvpolicy.hf.weights import check_shardable

        check_shardable(config, backend, place.size)
    place = meet()
    if isinstance(path_or_model, nn.Module):
        model = _divide_model(path_or_model, dtype, place)
    elif place.size == 1:
        model = _whole(path_or_model, config, dtype, place)
    else:
        model = (_by_deepspeed if backend == "deepspeed" else _by_transformers)(path_or_model, config, dtype, place)
    return model.eval()


def _config(path: Any) -> Any:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(str(path))


def _whole(path: Any, config: Any, dtype: Any, place: World) -> Any:
    from transformers import AutoModelForCausalLM

    files = Checkpoint.find(str(path))
    model: Any = AutoModelForCausalLM.from_pretrained(files.folder, config=config, dtype=dtype or "auto")
    return model.to(place.device)


def _by_deepspeed(path: Any, config: Any, dtype: Any, place: World) -> Any:
    from transformers import GenerationConfig

    from kvpolicy.hf.weights import heads_of
    from kvpolicy_deepspeed.autotp import shard
    from kvpolicy_deepspeed.weight_copy import fill

    files = Checkpoint.find(str(path))
    dtype = checks.check_dtype(dtype or getattr(config, "dtype", None) or files.dtype(), "deepspeed")
    model = _empty(config, dtype)
    family = FAMILIES[config.model_type]
    heads = heads_of(config, place.rank, place.size)
    weights = _sample(model, files, dtype)
    slots = shard(model, family, heads, dtype, place)
    fill(model, family, slots, files.pieces(), place)
    if (files.folder / "generation_config.json").exists():
        model.generation_config = GenerationConfig.from_pretrained(files.folder)
    return _share(model, heads.replicas, weights)


def _by_transformers(path: Any, config: Any, dtype: Any, place: World) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.distributed.configuration_utils import DistributedConfig

    files = Checkpoint.find(str(path))
    model = AutoModelForCausalLM.from_pretrained(
        files.folder, config=config, dtype="auto", distributed_config=DistributedConfig(tp_size=place.size)
    )
    # The weights are cast after loading: during loading, the experts of a layer would be held in both dtypes.
    if dtype is not None and dtype != model.dtype:
        _replace(model, lambda parameter: parameter.to(dtype))
        model.config.dtype = dtype
    return _share(model, 1, _sample(model, files, model.dtype))


def _replace(model: nn.Module, change: Callable[[nn.Parameter], Tensor]) -> None:
    """Replace the parameters of a model one by one, so that only one is held twice; tied parameters stay tied."""
    owners: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            owners.setdefault(id(parameter), []).append((module, name))
    for places in owners.values():
        new = nn.Parameter(change(getattr(*places[0])), requires_grad=False)
        for module, name in places:
            setattr(module, name, new)


def _divide_model(model: Any, dtype: Any, place: World) -> Any:
    from kvpolicy.hf.discovery import find_sites, sample_weights
    from kvpolicy.hf.weights import heads_of
    from kvpolicy_deepspeed.autotp import shard
    from kvpolicy_deepspeed.weight_copy import fill

    dtype = checks.check_dtype(dtype or model.dtype, "deepspeed")
    if place.size == 1:
        return model.to(place.device, dtype)
    weights = sample_weights(find_sites(model).layers[0])
    tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
    _replace(model, lambda parameter: parameter.to("meta"))
    family = FAMILIES[model.config.model_type]
    heads = heads_of(model.config, place.rank, place.size)
    slots = shard(model, family, heads, dtype, place)
    fill(model, family, slots, of_tensors(tensors), place)
    return _share(model, heads.replicas, weights)


def _empty(config: Any, dtype: torch.dtype) -> Any:
    """Return a model whose parameters are on the meta device; its buffers are not."""
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    with init_empty_weights(include_buffers=False):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def _sample(model: nn.Module, files: Checkpoint, dtype: torch.dtype) -> Tensor | None:
    """Return the weight fingerprint of the whole model, from the first attention matrix of the checkpoint."""
    from kvpolicy.hf.discovery import Site, find_sites, sample_weights

    site = find_sites(model).layers[0]
    first = next(parameter for parameter in site.attention.parameters() if parameter.dim() == 2)
    name = next(name for name, parameter in model.named_parameters() if parameter is first)
    for key, piece in files.pieces():
        if name == key or name.endswith(f".{key}"):
            whole = nn.ParameterList([nn.Parameter(piece.take().to(dtype), requires_grad=False)])
            return sample_weights(Site(site.layer_idx, site.block, whole))
    return None


def _share(model: Any, replicas: int, weights: Tensor | None) -> Any:
    from kvpolicy.parallel.runtime import share

    share(model, dist.group.WORLD, replicas=replicas, weights=weights)
    return model
