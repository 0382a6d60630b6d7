"""Limits of an engine: its config, and whether a document fits it."""

# vLLM is no dependency of development: where it is missing, its names are unknown to a type checker.
# pyright: reportMissingImports=false

from __future__ import annotations

import contextlib
import copy
import functools
import json
import sys
from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvpolicy.hf.dense_cache import Skeleton, skeleton
from kvpolicy.hf.discovery import samples_of
from kvpolicy.hf.model_spec import ModelShape, describe
from kvpolicy.hf.rotary_lookup import trained_positions
from kvpolicy.text.errors import KVPolicyError
from kvpolicy.text.model_identity import check_same_model
from kvpolicy_vllm.documents import Document
from kvpolicy_vllm.recipe import Recipe


@dataclass
class Engine:
    """An engine's properties.

    Attributes:
        model: A config of the model.
        source: Where its weights come from: a folder or a name on the Hub.
        revision: Their revision.
        max_len: The most tokens of a request.
    """

    model: Any
    source: str
    max_len: int
    revision: str | None = None
    _weights: dict[str, list[float] | None] = field(default_factory=dict)

    @classmethod
    def of(cls, vllm_config: Any) -> Engine:
        """Describe an engine of vLLM.

        Raises:
            KVPolicyError: If it cannot load documents, whatever they are.
        """
        for message in _unsupported(vllm_config):
            raise KVPolicyError(message)
        model = vllm_config.model_config
        found = cls(model.hf_config, str(model.model), int(model.max_model_len), getattr(model, "revision", None))
        with _without_compiling(vllm_config):
            found.check_model()
        return found

    @functools.cached_property
    def skeleton(self) -> Skeleton:
        """The model without weights."""
        return skeleton(self.model)

    def check_model(self) -> None:
        """Refuse a model whose positions or layers do not allow for documents.

        Raises:
            KVPolicyError: Naming what the model has.
        """
        text = self.model.get_text_config()
        shape = describe(self.model)
        if shape.unmanaged:
            raise KVPolicyError(
                f"All layers of the model must have full attention, got {text.model_type} with layers of a sliding "
                "window, which vLLM masks by slots; try kvpolicy serve --prefix."
            )
        if shape.states:
            raise KVPolicyError(
                f"All layers of the model must have attention alone, got {text.model_type} with states, which a "
                "document has no place for in vLLM; try kvpolicy serve --prefix."
            )
        rope: dict[str, Any] = getattr(text, "rope_parameters", None) or {}
        if "mrope_section" in rope:
            raise KVPolicyError(
                f"Positions must be single numbers, got those of {text.model_type}, which have several parts (M-RoPE)."
            )
        _ = self.skeleton

    def check(self, document: Document, question: int) -> None:
        """Refuse a document that is of another model, or too long for the engine.

        Args:
            document: The document.
            question: Tokens of the question behind it.

        Raises:
            KVPolicyError: Naming what differs.
        """
        name = f"The document {document.path.stem!r}"
        text = self.model.get_text_config()
        remedy = "make the document with the model that is served"
        if document.model["type"] != text.model_type:
            raise KVPolicyError(
                f"{name} must be of a model of type {text.model_type}, got {document.model['type']}; {remedy}."
            )
        weights = self._sample(document)
        info = describe(self.model).info(
            None if weights is None else torch.tensor(weights, dtype=torch.float32, device="cpu")
        )
        check_same_model(document.model, name, info, exact=True, remedy=remedy)
        ours = _plain(getattr(text, "rope_parameters", None))
        if _plain(document.model["rope"]) != ours:
            raise KVPolicyError(
                f"{name} must be for the rotary embedding {ours}, got {document.model['rope']}; {remedy}."
            )
        if document.kept + question >= self.max_len:
            raise KVPolicyError(
                f"{name} and its question must have fewer than {self.max_len:,} tokens, the engine's max_model_len, "
                f"got {document.kept:,} kept tokens and {question:,}; try a smaller budget."
            )
        trained = trained_positions(self.model)
        if trained is not None and document.total + question > trained:
            raise KVPolicyError(
                f"{name} and its question must fit into the {trained:,} positions that the model was trained for, got "
                f"{document.total:,} and {question:,}; try a shorter document."
            )

    def _sample(self, document: Document) -> list[float] | None:
        """The weights that identify the model, as the document's model had them; None if they cannot be read."""
        dtype = document.dtype
        if dtype not in self._weights:
            name = self.skeleton.first_weight
            found = None if name is None else sampled(self.source, self.revision, name)
            self._weights[dtype] = None if found is None else found.to(getattr(torch, dtype)).float().tolist()
        return self._weights[dtype]


def check_compresses(vllm_config: Any, recipe: Recipe, shape: ModelShape) -> None:
    """Refuse an engine that cannot compress prompts.

    Args:
        vllm_config: Its config.
        recipe: How prompts are to be compressed.
        shape: The cache of its model.

    Raises:
        KVPolicyError: Naming what it has.
    """
    recipe.policy.check(shape.info())
    parallel = vllm_config.parallel_config
    for name in ("data_parallel_size", "pipeline_parallel_size"):
        if (size := getattr(parallel, name, 1)) > 1:
            raise KVPolicyError(
                f"{name} must be 1 for prompts to be compressed, since both requests of a prompt must be in one engine "
                f"of whole layers, got {size}; try tensor parallelism."
            )
    ranks = getattr(parallel, "tensor_parallel_size", 1)
    if shape.heads % ranks:
        raise KVPolicyError(
            f"tensor_parallel_size must divide the {shape.heads} KV heads for prompts to be compressed, got {ranks}."
        )
    if ranks > 1 and recipe.compares_heads:
        raise KVPolicyError(
            f"The selector must look at each KV head alone with tensor_parallel_size={ranks}, got {recipe.policy}, "
            "which compares heads that other ranks have; try snapkv."
        )
    if getattr(vllm_config.model_config, "enable_sleep_mode", False):
        raise KVPolicyError(
            "--enable-sleep-mode must be off for prompts to be compressed, got it on, with which the engine may "
            "discard their kept tokens; try documents instead."
        )
    kind = vllm_config.cache_config.cache_dtype
    if kind not in ("auto", "bfloat16", "float16", "float32"):
        raise KVPolicyError(
            "--kv-cache-dtype must be auto for prompts to be compressed, since no attention backend reads codes back, "
            f"got {kind}."
        )


def sampled(source: str, revision: str | None, name: str) -> Tensor | None:
    """Samples of a parameter in the checkpoint of a model, [64]; None if it is not in safetensors on this machine.

    Args:
        source: A folder or a name on the Hub.
        revision: The revision on the Hub.
        name: The name of the parameter, possibly with another prefix.
    """
    from safetensors import SafetensorError, safe_open

    with contextlib.suppress(OSError, SafetensorError, ValueError):
        for file in _checkpoint(source, revision, name):
            with safe_open(file, framework="pt") as opened:
                names = [each for each in opened.keys() if each == name or name.endswith(f".{each}")]  # noqa: SIM118
                if not names:
                    continue
                weight = opened.get_tensor(names[0])
                return samples_of(weight) if weight.is_floating_point() else None
    return None


def _checkpoint(source: str, revision: str | None, name: str) -> list[Path]:
    """The files that may have a parameter."""
    from transformers.utils.hub import cached_file

    def local(file: str) -> Path | None:
        wanted: Any = {"revision": revision, "local_files_only": True, "_raise_exceptions_for_missing_entries": False}
        found = cached_file(source, file, **wanted)
        return None if found is None else Path(str(found))

    index = local("model.safetensors.index.json")
    if index is None:
        whole = local("model.safetensors")
        return [] if whole is None else [whole]
    shards: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    files = {shards[each] for each in shards if each == name or name.endswith(f".{each}")}
    return [path for path in map(local, sorted(files)) if path is not None]


@contextlib.contextmanager
def _without_compiling(vllm_config: Any) -> Generator[None]:
    """Make models of transformers as they are.

    Where vLLM runs a model by its backend of transformers, it has changed the class of the model, whose instances then
    need the config of an engine, and would be compiled.
    """
    if "vllm.compilation.decorators" not in sys.modules or not hasattr(vllm_config, "compilation_config"):
        yield
        return
    from vllm.config import CompilationMode, set_current_vllm_config

    plain = copy.copy(vllm_config)
    plain.compilation_config = copy.copy(vllm_config.compilation_config)
    plain.compilation_config.mode = CompilationMode.NONE
    with set_current_vllm_config(plain):
        yield


def _unsupported(config: Any) -> list[str]:
    """Why an engine cannot load documents, a sentence each."""
    found: list[str] = []
    transfer = config.kv_transfer_config
    if transfer is not None and transfer.kv_load_failure_policy != "fail":
        found.append(
            "kv_load_failure_policy must be 'fail', got "
            f"{transfer.kv_load_failure_policy!r}: a document that cannot be loaded cannot be computed from its "
            "placeholders either."
        )
    if getattr(config.model_config, "use_mla", False):
        found.append("The model must cache keys and values, got one that caches latent vectors (MLA).")
    if getattr(getattr(config, "aux_output_config", None), "enabled", False):
        found.append(
            "--enable-return-routed-experts must be off for documents and compressed prompts, got it on, with which "
            "vLLM 0.33 computes placeholders instead of loading tokens."
        )
    parallel = config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if (size := getattr(parallel, name, 1)) > 1:
            found.append(f"{name} must be 1 for documents, got {size}; try tensor parallelism.")
    speculative = config.speculative_config
    if speculative is not None and (method := getattr(speculative, "method", None)) != "ngram":
        found.append(
            f"Speculative decoding must be by n-grams beside documents, got {method!r}, whose drafter has a cache of "
            "its own."
        )
    return found


def _plain(rope: Any) -> Any:
    """Parameters of a rotary embedding as JSON, without those that are not set."""
    content: Any = json.loads(json.dumps(rope, default=str))
    return {key: value for key, value in content.items() if value is not None} if isinstance(content, dict) else content
