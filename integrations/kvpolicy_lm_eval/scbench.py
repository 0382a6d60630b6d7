"""Documents of the tasks `kvpolicy_scbench`: SCBench (arXiv:2412.10319), whose long contexts have several turns each.

The benchmark has two modes. A prompt is divided as its code does it: what is compressed is what it prefills first, and
what is fed later is kept in addition to the budget.

| mode | compressed | fed to the compressed cache |
|---|---|---|
| `multi_request` | the context | the question of turn k |
| `multi_turn` | the context and the first question | the right answers before turn k, and its later questions |

Each turn is a document. Deliberate differences from that code: a context that is too long loses its middle before the
chat template is applied, not after it, and more of it if later turns would not fit. Under a chat template, each later
question of `mf` has its own instruction, where that code repeats the last one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from kvpolicy.text.common_prefix import common_length
from kvpolicy.text.errors import KVPolicyError
from kvpolicy_lm_eval.data.scbench import MAX_TURNS, SUBSETS, Subset, answers_of
from kvpolicy_lm_eval.scbench_scores import SCORES
from kvpolicy_lm_eval.task_tokenizer import tokenizer_of

DATASET = "microsoft/SCBench"
"""The dataset of the benchmark."""

Mode = Literal["multi_request", "multi_turn"]
Document = dict[str, Any]
Message = dict[str, str]

_REQUEST_MARGIN = 1000
"""Tokens that the benchmark keeps free for the question of a request."""


def documents(
    subset: str,
    mode: Mode,
    length: int,
    dataset: str = DATASET,
    chat: bool = False,
    max_length: int | None = None,
    enable_thinking: bool | None = None,
    chat_template_args: Mapping[str, Any] | None = None,
    **model: Any,
) -> list[Document]:
    """The documents of a task: the turns of each row, one after the other.

    Args:
        subset: A subset of the dataset, without `scbench_`.
        mode: What of a prompt is compressed.
        length: The most tokens of a prompt and its answers.
        dataset: Name of the dataset, or a folder with a copy.
        chat: Whether the turns are messages, in the chat template of the tokenizer.
        max_length: The most tokens of the model, if fewer.
        enable_thinking: Passed on to the chat template, unless it is None.
        chat_template_args: Passed on to the chat template, too.
        **model: Arguments of the model, which say which tokenizer it has; an embedded one by default.

    Raises:
        KVPolicyError: If the mode is unknown, the dataset cannot be read or has other columns, or the tokenizer has no
            chat template.
    """
    if mode not in get_args(Mode):
        raise KVPolicyError(f"mode must be multi_request or multi_turn, got {mode!r}; try multi_turn.")
    known = SUBSETS[subset]
    rows = _rows(dataset, subset)
    room = min(length, max_length or length)
    thinking = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
    prompts = _Prompts(mode, tokenizer_of(model), chat, {**(chat_template_args or {}), **thinking})
    turns = max(len(row["multi_turns"][:MAX_TURNS]) for row in rows)
    return [
        {
            "prompt": prompt,
            "held_back": held_back,
            "beyond": True,
            "answers": answers_of(turn),
            "turn": number,
            "turns": turns,
            "subset": subset,
        }
        for row in rows
        for number, (turn, prompt, held_back) in enumerate(prompts.of_row(known, row, room), 1)
    ]


def score(document: Mapping[str, Any], results: Sequence[str]) -> dict[str, float | None]:
    """The score of an answer, also under the number of its turn; None under those of other turns of the subset.

    Processes that share the documents need the same metrics of each.
    """
    value = SCORES[document["subset"]](results[0], document["answers"])
    turns = range(1, document["turns"] + 1)
    return {"score": value} | {f"turn_{turn}": value if turn == document["turn"] else None for turn in turns}


def mean_of_turn(values: Sequence[float | None]) -> float:
    """The mean over the documents of a turn; NaN if there are none."""
    found = [value for value in values if value is not None]
    return sum(found) / len(found) if found else float("nan")


class _Prompts:
    """Makes the prompts of a row.

    Args:
        mode: What of a prompt is compressed.
        tokenizer: Of the model.
        chat: Whether to apply its chat template.
        options: For the chat template.
    """

    def __init__(self, mode: Mode, tokenizer: Any, chat: bool, options: Mapping[str, Any]) -> None:
        if chat and not getattr(tokenizer, "chat_template", None):
            name = Path(getattr(tokenizer, "name_or_path", "")).name
            raise KVPolicyError(
                f"chat must be false for a tokenizer without a chat template, got true with the tokenizer {name!r}; "
                'try false, or name the tokenizer of the model, as in --metadata \'{"tokenizer": "NAME"}\'.'
            )
        self._of_mode = self._requests if mode == "multi_request" else self._conversation
        self._margin = _REQUEST_MARGIN if mode == "multi_request" else 0
        self._tokenizer = tokenizer
        self._chat = chat
        self._options = dict(options)

    def of_row(self, subset: Subset, row: Mapping[str, Any], room: int) -> list[tuple[Mapping[str, Any], str, str]]:
        """Each turn of a row with its prompt, and with the end of the prompt that is fed later."""
        turns = row["multi_turns"][:MAX_TURNS]
        left = room - subset.new_tokens * len(turns) - self._margin
        while left > 0:
            pairs = self._of_mode(subset, row, turns, left)
            # Of a longer prompt, lm-eval would cut off the begin, with the token that begins a text.
            longest = max((prompt for prompt, _ in pairs), key=len)
            excess = self._tokens(longest, room - subset.new_tokens) + subset.new_tokens - room
            if excess <= 0:
                return [(turn, *pair) for turn, pair in zip(turns, pairs, strict=True)]
            left -= excess
        raise KVPolicyError(
            f"length must be more than the turns of a row and the room for answers take, got {room}; try {2 * room}."
        )

    def _requests(
        self, subset: Subset, row: Mapping[str, Any], turns: Sequence[Mapping[str, Any]], room: int
    ) -> list[tuple[str, str]]:
        shared = self._without_middle(subset.shared_text(row), room)
        found: list[tuple[str, str]] = []
        for turn in turns:
            question = subset.ask(turn)
            prompt = shared + question
            if self._chat:
                prompt = self._render([{"role": "user", "content": prompt}])
                question = prompt[prompt.rindex(question.rstrip()) :]
            found.append((prompt, question))
        return found

    def _conversation(
        self, subset: Subset, row: Mapping[str, Any], turns: Sequence[Mapping[str, Any]], room: int
    ) -> list[tuple[str, str]]:
        opening = self._without_middle(subset.opening(row), room)
        messages: list[Message] = [{"role": "user", "content": opening}]
        found: list[tuple[str, str]] = []
        for before, turn in zip([None, *turns], turns, strict=False):
            if before is not None:
                messages += [
                    {"role": "assistant", "content": str(before["answer"])},
                    {"role": "user", "content": subset.ask_later(turn, self._chat)},
                ]
            found.append(self._divided(messages))
        return found

    def _divided(self, messages: list[Message]) -> tuple[str, str]:
        """A conversation, and what stands in it behind the first message."""
        first, prompt = self._render(messages[:1]), self._render(messages)
        # A chat template may write the begin of an answer otherwise once there is an answer.
        return prompt, prompt[common_length(first, prompt) :]

    def _render(self, messages: list[Message]) -> str:
        if self._chat:
            return self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True, **self._options
            )
        later = zip(messages[1::2], messages[2::2], strict=True)
        return messages[0]["content"] + "".join(
            f"{answer['content']}\n\n{question['content']}" for answer, question in later
        )

    def _without_middle(self, text: str, room: int) -> str:
        """A text of at most `room` tokens: the begin and the end of one that has more."""
        if self._tokens(text, room) <= room:
            return text
        tokens = self._tokenizer(text, add_special_tokens=False, verbose=False).input_ids
        half = room // 2
        return "".join(map(self._tokenizer.decode, (tokens[:half], tokens[len(tokens) - half :])))

    def _tokens(self, text: str, enough: int) -> int:
        """The number of tokens of a text, or of its bytes if these are not more than `enough`."""
        size = len(text.encode())
        return size if size <= enough else len(self._tokenizer(text, verbose=False).input_ids)


def _rows(dataset: str, subset: str) -> Sequence[Mapping[str, Any]]:
    import datasets

    name = f"scbench_{subset}"
    try:
        # The cache of datasets tells folders apart by their names alone: another copy would have the rows of the first.
        found: Any = datasets.load_dataset(dataset, name, split="test", streaming=Path(dataset).is_dir())
        rows = [*found]
    except (OSError, ValueError) as error:  # not reached, not there, or no such subset or split
        reason = str(error).partition("\n")[0]
        raise KVPolicyError(
            f"The dataset {dataset} must have the subset {name} with a split test, got {reason!r}; try a folder with a "
            'copy of it, as in --metadata \'{"dataset": "SCBench"}\'.'
        ) from error
    known = SUBSETS[subset]
    lacking = [column for column in known.columns if not rows or column not in rows[0]]
    if not lacking:
        lacking = [key for turn in rows[0]["multi_turns"] for key in known.turn if key not in turn]
    if lacking:
        raise KVPolicyError(
            f"The subset {name} must have the columns {', '.join(known.columns)}, with {', '.join(known.turn)} of each "
            f"turn, got none named {lacking[0]}; try a folder with a copy that has them."
        )
    return rows
