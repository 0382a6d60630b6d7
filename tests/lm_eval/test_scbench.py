"""SCBench: turns about one context, of a small hand-made set in the schema of its dataset."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, Features, Value

from kvpolicy import KVPolicyError
from kvpolicy_lm_eval import scbench
from kvpolicy_lm_eval.data.scbench import MAX_TURNS, SUBSETS
from kvpolicy_lm_eval.held_back import find_held_back
from kvpolicy_lm_eval.scbench_scores import SCORES
from tests.lm_eval.helpers import load, manager, simple_evaluate

SCHEMA = json.loads((Path(__file__).parents[1] / "eval/sweep/datasets.json").read_text(encoding="utf-8"))
MODES = ("multi_request", "multi_turn")
GROUP = "kvpolicy_scbench"
CHAT = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content | trim }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def turn(text: str, answer: Any, **more: Any) -> dict[str, Any]:
    return {"input": text, "answer": answer, **more}


ROWS: dict[str, dict[str, Any]] = {
    "kv": {"context": '{"k1": "v1", "k2": "v2"}', "multi_turns": [turn("k1? ", "v1"), turn("k2? ", "v2")]},
    "prefix_suffix": {"context": "abc\nxyz\n", "multi_turns": [turn("a..c? ", "abc"), turn("x..z? ", "xyz")]},
    "vt": {"input": "VAR A = 1\nVAR B = A", "multi_turns": [turn("1? ", ["A", "B"]), turn("2? ", ["C"])]},
    "qa_eng": {"context": "Ann met Bo.", "multi_turns": [turn("Who met Bo?", "Ann"), turn("Whom?", "Bo")]},
    "choice_eng": {
        "context": "Ann met Bo.",
        "multi_turns": [
            turn("Who?", "Ann", options=["Bo", "Ann", "Cy", "Di"]),
            turn("Whom?", "Bo", options=["Bo", "Ann", "Cy", "Di"]),
        ],
    },
    "many_shot": {"context": "Q: one\nA: (A)\n", "multi_turns": [turn("Q: two\nA: ", "(B)"), turn("Q: 3\nA: ", "(C)")]},
    "mf": {
        "context": [3, 1, 2],
        "multi_turns": [turn("The Largest number is: ", 3), turn("The median of all is: ", 2)],
    },
}
"""A row of each subset."""

CHOICES = "\nA. Bo\nB. Ann\nC. Cy\nD. Di\n\nThe"
READ = "Read the book and answer the question."
EXTRACT = "Extract the value corresponding to the specified key in the JSON object below."
PLAIN = {
    ("kv", "multi_request"): (f"{EXTRACT}\n\n" + '{"k1": "v1", "k2": "v2"}', ["k1? ", "k2? "]),
    ("kv", "multi_turn"): (f"{EXTRACT}\n\n" + '{"k1": "v1", "k2": "v2"}\n\nk1? ', ["", "v1\n\nk2? "]),
    ("prefix_suffix", "multi_request"): ("abc\nxyz\n", ["a..c? ", "x..z? "]),
    ("prefix_suffix", "multi_turn"): ("abc\nxyz\n\n\na..c? ", ["", "abc\n\nx..z? "]),
    ("vt", "multi_request"): ("VAR A = 1\nVAR B = A", ["1? ", "2? "]),
    ("vt", "multi_turn"): ("VAR A = 1\nVAR B = A\n\n1? ", ["", "['A', 'B']\n\n2? "]),
    ("qa_eng", "multi_request"): (
        f"{READ} Be very concise in your answer.\n\nAnn met Bo.",
        ["Question: Who met Bo?\nAnswer:", "Question: Whom?\nAnswer:"],
    ),
    ("qa_eng", "multi_turn"): (
        f"{READ} Be very concise in your answer.\n\nAnn met Bo.\n\nQuestion: Who met Bo?\nAnswer:",
        ["", "Ann\n\nQuestion: Whom?\nAnswer:"],
    ),
    ("choice_eng", "multi_request"): (
        f"{READ}\n\nAnn met Bo.",
        [f"Question: Who?{CHOICES} the correct answer is", f"Question: Whom?{CHOICES} the correct answer is"],
    ),
    ("choice_eng", "multi_turn"): (
        f"{READ}\n\nAnn met Bo.\n\nQuestion: Who?{CHOICES} the correct answer is",
        ["", f"Ann\n\nQuestion: Whom?{CHOICES} letter of the correct answer is"],
    ),
    ("many_shot", "multi_request"): ("Q: one\nA: (A)\n", ["Q: two\nA: ", "Q: 3\nA: "]),
    ("many_shot", "multi_turn"): ("Q: one\nA: (A)\n\n\nQ: two\nA: ", ["", "(B)\n\nQ: 3\nA: "]),
    ("mf", "multi_request"): (
        "The Largest number is: \n\n[3, 1, 2]",
        [
            "What is the largest number?\n\nThe Largest number is: ",
            "What is the median of all?\n\nThe median of all is: ",
        ],
    ),
    ("mf", "multi_turn"): (
        "What is the largest number?\n\n[3, 1, 2]\n\nThe Largest number is: ",
        ["", "3\n\nWhat is the median of all?\n\nThe median of all is: "],
    ),
}
"""What is compressed, and what is fed to the compressed cache in each turn."""


def features(recorded: Any) -> Any:
    if isinstance(recorded, list):
        return [features(recorded[0])]
    return {key: features(kind) for key, kind in recorded.items()} if isinstance(recorded, dict) else Value(recorded)


def stub(rows: dict[str, list[dict[str, Any]]]) -> Any:
    """The dataset on the Hub, with what is recorded of its columns."""

    def load(path: str, name: str, split: str, streaming: bool) -> Dataset:
        assert not streaming
        recorded = SCHEMA[path][name][split]
        filled = [dict.fromkeys(recorded) | row for row in rows[name.removeprefix("scbench_")]]
        return Dataset.from_list(filled, features=Features(features(recorded)))

    return load


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.load_dataset", stub({name: [row] for name, row in ROWS.items()}))


@pytest.fixture
def chat(monkeypatch: pytest.MonkeyPatch, tiny: Any) -> Any:
    """The embedded tokenizer with a chat template."""
    tokenizer = copy.deepcopy(tiny[1])
    tokenizer.chat_template = CHAT
    monkeypatch.setattr(scbench, "tokenizer_of", lambda *_: tokenizer)
    return tokenizer


@pytest.mark.usefixtures("hub", "chat")
@pytest.mark.parametrize(
    ("mode", "compressed", "fed"),
    [
        (
            "multi_request",
            f"<user>{READ}\n\nAnn met Bo.",
            [
                f"Question: Who?{CHOICES} the correct answer is<end><assistant>",
                f"Question: Whom?{CHOICES} the correct answer is<end><assistant>",
            ],
        ),
        (
            "multi_turn",
            f"<user>{READ}\n\nAnn met Bo.\n\nQuestion: Who?{CHOICES} the correct answer is<end><assistant>",
            ["", f"Ann<end><user>Question: Whom?{CHOICES} the correct answer is<end><assistant>"],
        ),
    ],
)
def test_turns_are_messages_of_a_chat(mode: Any, compressed: str, fed: list[str]) -> None:
    found = scbench.documents("choice_eng", mode, 131072, chat=True)
    assert [(one["prompt"], one["held_back"]) for one in found] == [(compressed + end, end) for end in fed]


@pytest.mark.parametrize(("mode", "room"), [("multi_request", 1130), ("multi_turn", 130)])
def test_a_long_context_loses_its_middle(mode: Any, room: int, monkeypatch: pytest.MonkeyPatch, tiny: Any) -> None:
    """Two answers of 30 tokens, and in the mode of requests 1,000 tokens, are kept free: 70 tokens remain."""
    lines = [f"VAR V{number} = {number}" for number in range(300)]
    row = ROWS["vt"] | {"input": "\n".join(lines)}
    monkeypatch.setattr("datasets.load_dataset", stub({"vt": [row]}))
    _, second = scbench.documents("vt", mode, 5000, max_length=room)
    kept = second["prompt"].removesuffix(second["held_back"])
    whole = row["input"] if mode == "multi_request" else f"{row['input']}\n\n1? "
    tokens = tiny[1](whole, add_special_tokens=False).input_ids
    assert kept == tiny[1].decode(tokens[:35]) + tiny[1].decode(tokens[-35:])
    assert kept.startswith("VAR V0 = 0\nVAR V1") and kept.rstrip(" 1?\n").endswith("VAR V299 = 299")


@pytest.mark.usefixtures("chat")
@pytest.mark.parametrize("chat_template", [False, True])
def test_later_turns_fit(chat_template: bool, monkeypatch: pytest.MonkeyPatch, tiny: Any) -> None:
    """An opening that would fit is cut if a later question is long."""
    opening = "\n".join(f"VAR V{number} = {number}" for number in range(8))
    row = {"input": opening, "multi_turns": [turn("1? ", ["V1"]), turn("Which are 2? " * 10, ["V2"])]}
    monkeypatch.setattr("datasets.load_dataset", stub({"vt": [row]}))
    lengths: dict[int, int] = {}
    for room in (180, 500):
        _, second = scbench.documents("vt", "multi_turn", room, chat=chat_template)
        lengths[room] = len(tiny[1](second["prompt"]).input_ids)
        assert second["held_back"].removesuffix("<end><assistant>").rstrip().endswith("Which are 2?")
    assert 165 < lengths[180] + 30 <= 180 < lengths[500] + 30
    with pytest.raises(KVPolicyError, match=r"length must be more than .* take, got 120; try 240\."):
        scbench.documents("vt", "multi_turn", 120, chat=chat_template)


def test_no_more_than_five_turns_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    row = ROWS["kv"] | {"multi_turns": [turn(f"k{number}? ", "v") for number in range(6)]}
    monkeypatch.setattr("datasets.load_dataset", stub({"kv": [row, row]}))
    found = scbench.documents("kv", "multi_request", 131072)
    assert [one["turn"] for one in found] == [1, 2, 3, 4, 5] * 2
    assert list(scbench.score(found[0], [""])) == ["score", *(f"turn_{number}" for number in range(1, MAX_TURNS + 1))]


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": "after"}, r"mode must be multi_request or multi_turn, got 'after'; try multi_turn\."),
        (
            {"chat": True, "pretrained": "tiny-4k"},
            r"chat must be false for .* without a chat template, got true with the tokenizer 'tiny-4k'; try .*}'\.",
        ),
        ({"length": 1300}, r"length must be more than the turns of a row .* take, got 1300; try 2600\."),
    ],
)
def test_errors_are_said(arguments: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"subset": "kv", "mode": "multi_request", "length": 131072}
    with pytest.raises(KVPolicyError, match=message):
        scbench.documents(**given | arguments)


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (ConnectionError("no route\nto the host"), r"scbench_kv with a split test, got 'no route'; try a folder"),
        (ValueError("BuilderConfig 'scbench_kv' not found."), r"got \"BuilderConfig 'scbench_kv' not found\.\""),
        ([{"text": "c", "multi_turns": [turn("q", "a")]}], "columns context, multi_turns, .* got none named context"),
        ([], "columns context, multi_turns, .* got none named context"),
        (
            [{"context": "c", "multi_turns": [{"question": "q", "answer": "a"}]}],
            "input, answer of each turn, got none named input",
        ),
    ],
    ids=["unreachable", "moved", "column", "empty", "key"],
)
def test_a_change_of_the_dataset_is_said(found: Any, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: Any, **__: Any) -> Dataset:
        if isinstance(found, Exception):
            raise found
        return Dataset.from_list(found)

    monkeypatch.setattr("datasets.load_dataset", load)
    with pytest.raises(KVPolicyError, match=message):
        scbench.documents("kv", "multi_turn", 131072)


@pytest.mark.parametrize(
    ("subset", "right", "answers"),
    [
        ("kv", ["v1"], {'it is "v1".': 1, "V1": 0, "": 0}),
        ("prefix_suffix", ["abc"], {"xabcx": 1, "ab": 0}),
        ("vt", ["VA", "VB", "VC"], {"va and VB": 0.67, "VC VB VA": 1, "none": 0}),
        ("qa_eng", ["Ann Lee"], {"It was ann lee": 1, "Ann": 0}),
        ("many_shot", ["(B)"], {"(b) because": 1, "B": 0, "(A)": 0}),
        ("many_shot", ["(B) a long text"], {"(B) a long": 1, "(A)": 0}),
        ("many_shot", ["Yes"], {"yes": 1, "no": 0}),
        ("mf", ["12"], {"12.7": 1, "is 12, or 13": 1, "13 or 12": 0, "none": 0}),
        (
            "choice_eng",
            ["Ann Lee", "B"],
            {
                "B. Ann": 1,  # begins with a letter
                "Bo, but Ann Lee": 1,  # begins with a letter, as the benchmark reads it
                "Ann Lee": 0,  # begins with the letter of another option
                "": 0,
                "The answer is: B": 1,
                "the answer is Ann Lee": 1,
                "the answer is C, not B": 0,
                "the answer is": 0,
                "So 'B' it is": 1,
                "So C or B": 0,
                "no idea": 0,
            },
        ),
        ("choice_eng", ["Zoe", "D"], {" Zoe ": 1, "zoe": 0, "I say DB": 0}),
    ],
)
def test_scores_by_hand(subset: str, right: list[str], answers: dict[str, float]) -> None:
    assert {answer: SCORES[subset](answer, right) for answer in answers} == answers


@pytest.mark.usefixtures("hub")
def test_the_group_has_both_modes_of_all_subsets() -> None:
    names = {f"{GROUP}_{mode}_{subset}": (mode, subset) for mode in MODES for subset in SUBSETS}
    found = load(manager(), GROUP)
    assert sorted(found) == sorted(names) and list(SCORES) == list(SUBSETS) == list(ROWS)
    for name, task in found.items():
        mode, subset = names[name]
        assert task.config.generation_kwargs["max_gen_toks"] == SUBSETS[subset].new_tokens
        task.build_all_requests()
        compressed, fed = PLAIN[subset, mode]
        assert [one.args[0] for one in task.instances] == [compressed + end for end in fed]
        first, second = (one.doc for one in task.instances)
        held_back = [(one["held_back"], one["turn"], one["beyond"]) for one in (first, second)]
        assert held_back == [(fed[0], 1, True), (fed[1], 2, True)]
        right = second["answers"][-1]
        scores = task.process_results(second, [right])
        assert scores == {"score": 1, "turn_1": None, "turn_2": 1}
        assert task.doc_to_target(second).endswith(right)


def test_a_turn_that_a_limit_leaves_out_has_no_number() -> None:
    assert math.isnan(scbench.mean_of_turn([None, None])) and scbench.mean_of_turn([None, 1.0, 0.5]) == 0.75


def copy_of(folder: Path, rows: list[dict[str, Any]]) -> str:
    """A folder with a copy of the subset `kv`."""
    (folder / "SCBench").mkdir(parents=True)
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "SCBench/kv.jsonl").write_text(lines, encoding="utf-8")
    files = "data_files:\n  - split: test\n    path: kv.jsonl"
    card = f"---\nconfigs:\n- config_name: scbench_kv\n  {files}\n---\n"
    (folder / "SCBench/README.md").write_text(card, encoding="utf-8")
    return str(folder / "SCBench")


def test_another_folder_of_the_same_name_has_its_own_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    for number, answer in enumerate(("first", "second")):
        folder = copy_of(tmp_path / answer, [{"context": "c", "multi_turns": [turn("q", answer)] * (number + 1)}])
        found = scbench.documents("kv", "multi_request", 5000, dataset=folder)
        assert [(one["answers"], one["turns"]) for one in found] == [([answer], number + 1)] * (number + 1)
    with pytest.raises(KVPolicyError, match="must have the subset scbench_mf with a split test"):
        scbench.documents("mf", "multi_request", 5000, dataset=str(tmp_path / "first/SCBench"))


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize("given", ["tokenizer", "pretrained", "name"])
def test_the_tokenizer_and_its_template_are_those_of_the_model(given: str, tiny: Any, tmp_path: Path) -> None:
    """Objects, names and `chat_template_args`, as in lm-eval's model `hf`."""
    tokenizer = copy.deepcopy(tiny[1])
    tokenizer.chat_template = "{% if thinks %}<think>{% endif %}{% if enable_thinking %}!{% endif %}" + CHAT
    tokenizer.save_pretrained(tmp_path)
    model = type("Model", (), {"name_or_path": str(tmp_path)})()
    options: dict[str, Any] = {
        "tokenizer": {"tokenizer": tokenizer, "pretrained": "tiny"},
        "pretrained": {"pretrained": model},
        "name": {
            "pretrained": str(tmp_path),
            "revision": "main",
            "trust_remote_code": True,
            "use_fast_tokenizer": True,
        },
    }[given]
    found = scbench.documents(
        "kv", "multi_turn", 5000, chat=True, enable_thinking=True, chat_template_args={"thinks": 1}, **options
    )
    assert [one["prompt"].startswith("<think>!<user>") for one in found] == [True, True]


def test_four_documents(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of what is compressed is held, and all of what is fed later."""
    kv = ROWS["kv"] | {"context": ROWS["kv"]["context"] * 20}
    kv["multi_turns"] = [turn("k1? " * 9, "v1"), turn("k2? " * 40, "v2")]
    monkeypatch.setattr("datasets.load_dataset", stub({"kv": [kv, kv]}))
    lm = make("random@0.5")
    names = [f"{GROUP}_{mode}_kv" for mode in MODES]
    found = simple_evaluate(
        model=lm, tasks=names, task_manager=manager(), limit=4, gen_kwargs={"max_gen_toks": 2}, bootstrap_iters=0
    )
    for name in names:
        result = found["results"][name]
        assert result["score,none"] == pytest.approx((result["turn_1,none"] + result["turn_2,none"]) / 2)
        assert "turn_3,none" not in result, "no row of the subset has a third turn"
        counts = [held_tokens(lm, sample["doc"]) for sample in found["samples"][name]]
        cost = found["config"]["kvpolicy"]["tasks"][f"{name}/generate_until"]
        assert cost["requests"] == len(counts) == 4
        spare = sum(cost["kv_share"] * tokens - held for held, tokens in counts) / 4
        assert -0.1 < spare < 8  # slots are allocated some at a time


def held_tokens(lm: Any, document: dict[str, Any]) -> tuple[float, int]:
    """How many tokens are held, and how many there are: of the answer's two, the last one is not fed."""
    prompt = lm.tok_encode(document["prompt"])
    request = type("Request", (), {"doc": document, "args": (document["prompt"],)})
    later = find_held_back("generate_until", request, lm.tok_encode).tokens
    return later + (len(prompt) - later) / 2, len(prompt) + 1
