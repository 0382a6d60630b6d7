"""The training loop: single-threaded, deterministic for a seed, with checkpoints."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from kvpolicy_eval.train.export import load_llama
from kvpolicy_eval.train.muon import Muon
from kvpolicy_eval.train.net import Focus, Net, Shape
from kvpolicy_eval.train.phases import Phase, learning_rate
from kvpolicy_eval.train.start import structure
from kvpolicy_eval.train.tokens import ANSWER, LOSS_WEIGHTS, TEXT, Sampler, Vocabulary

PEAK_RATE = 3e-3
LONG_RATE = 1e-3
"""Of a training that continues a trained model."""
LOG_EVERY = 50
_STATE = "state.safetensors"
_PROGRESS = "progress.json"


@dataclass(slots=True)
class Progress:
    """Progress of the training; together with weights and moments, all that resuming needs."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    rng: dict[str, object] = field(default_factory=dict)


class Trainer:
    """Train a net through the phases.

    Args:
        tokenizer: The embedded tokenizer.
        text: Ids of the training sources, [N].
        phases: The curriculum.
        seed: Seed of the initialization and of the data.
        shape: Sizes of the model.
        start: Exported model to continue; None trains from a structured initialization.
        peak_rate: Largest learning rate.
        autocast: Whether sequences of more than 256 tokens are computed in bfloat16. Faster where the CPU has
            instructions for it, and many times slower where it has none.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        text: np.ndarray,
        phases: Sequence[Phase],
        seed: int = 0,
        shape: Shape | None = None,
        start: Path | None = None,
        peak_rate: float = PEAK_RATE,
        autocast: bool = True,
    ) -> None:
        """Create a net with the structured initialization, its optimizers and its data."""
        self.phases = list(phases)
        self.total = sum(p.tokens for p in self.phases)
        self.progress = Progress()
        vocabulary = Vocabulary(tokenizer)
        self.sampler = Sampler(vocabulary, text, np.random.default_rng(seed + 1))
        self.net = Net(shape or Shape(vocab_size=len(tokenizer)), seed)
        if start is None:
            structure(self.net, vocabulary.words, vocabulary.bos, seed)
        else:
            load_llama(self.net, start)
        self.peak_rate = peak_rate
        self.autocast = autocast
        self.muon = Muon(self.net.matrices())
        self.adam = torch.optim.AdamW(self.net.vectors(), lr=peak_rate, betas=(0.9, 0.98), weight_decay=0.01)
        self._recent: dict[str, list[float]] = {}

    @property
    def phase(self) -> int:
        """Index of the phase that the next step belongs to."""
        end = 0
        for i, phase in enumerate(self.phases):
            end += phase.tokens
            if self.progress.tokens < end:
                return i
        return len(self.phases) - 1

    def run(self, on_log: Callable[[dict[str, object]], None] | None = None, max_steps: int | None = None) -> None:
        """Train until the tokens of every phase are used up, or for `max_steps` more steps."""
        last_step = None if max_steps is None else self.progress.step + max_steps
        earlier_seconds = self.progress.seconds
        start = time.perf_counter()
        while self.progress.tokens < self.total and self.progress.step != last_step:
            self._step()
            self.progress.seconds = earlier_seconds + time.perf_counter() - start
            if on_log and (self.progress.step % LOG_EVERY == 0 or self.progress.tokens >= self.total):
                on_log(self._report())

    def _step(self) -> None:
        phase = self.phases[self.phase]
        rng = self.sampler.rng
        progress = self.progress
        size, length = phase.shapes[rng.integers(len(phase.shapes))]
        task = str(rng.choice(list(phase.tasks), p=list(phase.tasks.values())))
        focus = None if rng.random() < phase.all_full else phase.focus(task)
        ids, kinds = self.sampler.batch(task, size, length + 1, phase.digits)
        loss = self._loss(task, ids, kinds, focus)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
        rate = learning_rate(progress.step, progress.tokens / self.total, self.peak_rate)
        for group in self.adam.param_groups:
            group["lr"] = rate
        self.adam.step()
        self.adam.zero_grad()
        self.muon.step(rate)
        progress.step += 1
        progress.tokens += size * length

    def _loss(self, task: str, ids: Tensor, kinds: Tensor, focus: Focus | None) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast and ids.shape[1] > 256):
            logits = self.net(ids[:, :-1], focus)
        target = ids[:, 1:].flatten()
        kind = kinds[:, 1:].flatten()
        flat = logits.float().flatten(0, 1)
        each = F.cross_entropy(flat, target, reduction="none")
        weight = torch.tensor(LOSS_WEIGHTS)[kind]
        answers = kind == ANSWER
        if answers.any():
            right = (flat.detach()[answers].argmax(-1) == target[answers]).float().mean().item()
            self._recent.setdefault(task, []).append(right)
        if (kind == TEXT).any():
            self._recent.setdefault("text_loss", []).append(each.detach()[kind == TEXT].mean().item())
        return (each * weight).sum() / weight.sum()

    def _report(self) -> dict[str, object]:
        p = self.progress
        report: dict[str, object] = {
            "step": p.step,
            "seconds": round(p.seconds),
            "phase": self.phase,
            "tokens": p.tokens,
        }
        report |= {name: round(float(np.mean(seen)), 3) for name, seen in sorted(self._recent.items())}
        self._recent = {}
        return report

    def save(self, folder: Path) -> None:
        """Write a checkpoint to `folder`: weights, both optimizers' moments and the random state."""
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {f"net.{name}": weight.detach() for name, weight in self.net.state_dict().items()}
        tensors |= {f"muon.{i}": buffer for i, buffer in enumerate(self.muon.buffers)}
        for i, moments in self.adam.state_dict()["state"].items():
            tensors |= {f"adam.{i}.{name}": value for name, value in moments.items()}
        self.progress.rng = dict(self.sampler.rng.bit_generator.state)
        progress = {name: getattr(self.progress, name) for name in Progress.__slots__}
        save_file(tensors, folder / f"{_STATE}.new")
        (folder / f"{_STATE}.new").replace(folder / _STATE)
        (folder / _PROGRESS).write_text(json.dumps(progress) + "\n")

    def load(self, folder: Path) -> None:
        """Continue from the checkpoint in `folder`, exactly as if training had not stopped.

        Raises:
            ValueError: `folder` holds no checkpoint.
        """
        if not (folder / _PROGRESS).exists():
            raise ValueError(f"{folder} holds no checkpoint; start without --resume.")
        tensors = load_file(folder / _STATE)
        self.net.load_state_dict({k[4:]: v for k, v in tensors.items() if k.startswith("net.")})
        self.muon.buffers = [tensors[f"muon.{i}"].clone() for i in range(len(self.muon.buffers))]
        state: dict[int, dict[str, Tensor]] = {}
        for name, value in tensors.items():
            if name.startswith("adam."):
                _, i, moment = name.split(".")
                state.setdefault(int(i), {})[moment] = value.clone()
        groups = self.adam.state_dict()["param_groups"]
        self.adam.load_state_dict({"state": state, "param_groups": groups})
        self.progress = Progress(**json.loads((folder / _PROGRESS).read_text()))
        self.sampler.rng.bit_generator.state = self.progress.rng


def show(report: dict[str, object], total: int) -> None:
    """Print one report as a progress bar and its numbers."""
    done = int(str(report["tokens"])) / total
    bar = "#" * round(20 * done)
    numbers = " ".join(f"{name}={value}" for name, value in report.items())
    print(f"[{bar:<20}] {done:4.0%} {numbers}", file=sys.stderr, flush=True)
