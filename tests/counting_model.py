"""A model that says the words of its vocabulary in their order, with a tokenizer as SentencePiece makes them.

Each word is one token with the space before it, and one character has a token for each of its bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

PROMPT = "the capital of france is"
ANSWER = " paris🙂 on river seine"
"""What the model says behind the prompt; a special token ends it."""

_BYTES = [f"<0x{byte:02X}>" for byte in "🙂".encode()]
_WORDS = [[f"▁{word}" for word in text.split()] for text in (f"{PROMPT} paris", "on river seine")]
WORDS = ["<unk>", *_WORDS[0], *_BYTES, *_WORDS[1], "</s>"]
"""The vocabulary: the next word of the model is the next one here."""


def counting_model(said: Sequence[str] = ()) -> tuple[Any, Any]:
    """The model and its tokenizer; `said` are the words behind the prompt, if they are not those of `ANSWER`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = ["<unk>", *(f"▁{word}" for word in (*PROMPT.split(), *said)), "</s>"] if said else WORDS
    core = Tokenizer(models.WordLevel({word: token for token, word in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Metaspace()
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    core.decoder = decoders.Sequence(steps)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", eos_token="</s>", pad_token="</s>")
    end = len(words) - 1
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=128,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=end,
    )
    model: Any = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for layer in model.model.layers:  # so that the last token alone decides
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(len(words), 32))
        model.lm_head.weight.copy_(torch.eye(len(words), 32).roll(1, 0))
    return model, tokenizer
