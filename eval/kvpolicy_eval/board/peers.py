"""Rows of the board that other libraries answer: presses of kvpress, and the quantized cache of transformers."""

from __future__ import annotations

import torch

import kvpolicy
from kvpolicy.text.embedded_names import EmbeddedName
from kvpolicy_eval.board.policies import Entry
from kvpolicy_eval.common.accuracy import held_back
from kvpolicy_eval.data.tasks import draw_prompts
from kvpolicy_eval.peers.pair import attention_for, embedded_model
from kvpolicy_eval.peers.process import Process
from kvpolicy_lm_eval.data.modes import place, second_question

METHODS = {
    "SnapKVPress(window_size=32)": "snapkv:window_size=32",
    "SnapKVPress(window_size=32, kernel_size=7)": "snapkv:window_size=32:kernel_size=7",
    "SnapKVPress(window_size=8, kernel_size=7)": "snapkv:window_size=8:kernel_size=7",
    "TOVAPress()": "tova",
    "StreamingLLMPress()": "streaming",
    "KnormPress()": "knorm",
    "ObservedAttentionPress()": "observed",
    "ExpectedAttentionPress()": "expected",
    "KeyDiffPress()": "keydiff",
    "PyramidKVPress(window_size=32, kernel_size=7)": "pyramid:window_size=32:kernel_size=7",
    "AdaKVPress(SnapKVPress(window_size=32, kernel_size=7))": "ada/snapkv:window_size=32:kernel_size=7",
    "SnapKVPress(window_size=32, kernel_size=7), QuantizedCache('quanto', nbits=4)": (
        "snapkv:window_size=32:kernel_size=7+quanto-4"
    ),
    "QuantizedCache('quanto', nbits=4)": "quanto-4",
    "QuantizedCache('quanto', nbits=2)": "quanto-2",
}
"""Rows of the board, and what `kvpolicy_eval.peers.theirs` calls them."""

PEERS = [Entry(spec, "kvpress" if "Press" in spec else "transformers") for spec in METHODS]


class PeerEvaluator:
    """Answers of a peer to the prompts of the board, one at a time, since padding changes what its methods keep.

    Args:
        process: The peer.
        docs: Prompts per task.
        length: Rough prompt length in tokens.
        model: The embedded model.
    """

    def __init__(self, process: Process, docs: int, length: int, model: EmbeddedName) -> None:
        """Draw the prompts; the peer loads the model when it is asked."""
        self.process = process
        self.name: EmbeddedName = model
        self.model, self.tokenizer = kvpolicy.tiny(torch.float32, name=model)
        self.prompts = draw_prompts(docs, length)

    def accuracy(self, spec: str, byte_share: float, mode: str) -> tuple[dict[str, float], float]:
        """Fraction of right answers of each task, and the bytes held over the full cache's.

        Args:
            spec: One of `METHODS`.
            byte_share: Budget as a fraction of the full cache's bytes.
            mode: The place of the question.

        Raises:
            kvpolicy_eval.peers.process.Failed: With the peer's message, if it raised an error.
        """
        method = METHODS[spec]
        with embedded_model(self.name) as path:
            self.process.ask("load", path=str(path), dtype="float32", attention=attention_for(method), threads=1)
        right: dict[str, float] = {}
        held_bytes = full_bytes = 0
        for task, prompts in self.prompts.items():
            if mode == "second" and second_question(prompts[0]) is None:
                continue
            hits = 0
            for prompt in prompts:
                compressed, fed, answer = place(prompt, mode)
                ids = self.tokenizer(compressed + fed).input_ids
                new = len(self._ids(answer))
                full = kvpolicy.plan(
                    self.model.config, "full", prompt=len(ids) + new - 1, dtype=self.model.dtype
                ).full_nbytes
                after = len(self._ids(fed)) + held_back(task, by_step=False, mode=mode)
                limit = int(byte_share * full)
                found = self.process.ask("answer", ids=[ids], method=method, limit=limit, new=new, after=after)
                text = self.tokenizer.decode(found["ids"], skip_special_tokens=True)
                hits += text.strip().startswith(answer)
                held_bytes += found["held"]
                full_bytes += full
            right[task] = hits / len(prompts)
        return right, held_bytes / full_bytes

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False).input_ids
