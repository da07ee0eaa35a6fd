"""Rows as verl, TRL, OpenRLHF and GSM8K have them are prepared, and scored as their home framework scores them."""

import csv
import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from transformers import AutoTokenizer

from conf.data import FileData
from tlt_core.data import dataset
from tlt_core.data.file_questions import final_answer, splits
from tlt_core.data.question import DataError
from tlt_core.grpo import verifiers

ASK = "What is {} + {}?"
SYSTEM = {"role": "system", "content": "Answer in one word."}
TALK = [{"role": "user", "content": "Hello."}, {"role": "assistant", "content": "Hello, how can I help?"}]


def _asks(a: int, b: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": ASK.format(a, b)}]


def verl(a: int, b: int) -> dict[str, Any]:
    return {
        "data_source": "openai/gsm8k",
        "prompt": _asks(a, b),
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(a + b)},
        "extra_info": {"split": "train", "index": a},
    }


SHAPES = {
    "verl, gsm8k": (verl, "openai_gsm8k"),
    "verl, system message and a number": (
        lambda a, b: (
            verl(a, b) | {"prompt": [SYSTEM, *_asks(a, b)], "reward_model": {"style": "rule", "ground_truth": a + b}}
        ),
        "openai_gsm8k",
    ),
    "trl, conversation": (lambda a, b: {"prompt": _asks(a, b), "solution": rf"Add: $\boxed{{{a + b}}}$"}, "file"),
    "trl, text": (lambda a, b: {"prompt": ASK.format(a, b), "ground_truth": str(a + b)}, "file"),
    "openrlhf, text": (lambda a, b: {"input": ASK.format(a, b), "label": str(a + b), "datasource": "x"}, "file"),
    "openrlhf, messages": (lambda a, b: {"context_messages": _asks(a, b), "label": str(a + b)}, "file"),
    "gsm8k": (lambda a, b: {"question": ASK.format(a, b), "answer": f"{a} and {b} make it.\n#### {a + b}"}, "file"),
    "math": (
        lambda a, b: {"problem": ASK.format(a, b), "solution": rf"So \boxed{{{a + b}}}.", "level": "Level 1"},
        "file",
    ),
    "turns": (lambda a, b: {"messages": [*TALK, *_asks(a, b)], "answer": str(a + b)}, "file"),
    "turns after a system message": (
        lambda a, b: {"prompt": [SYSTEM, *TALK, *_asks(a, b)], "answer": a + b},
        "file",
    ),
}


@pytest.fixture(scope="module")
def tokenizer(embedded_model):
    return AutoTokenizer.from_pretrained(embedded_model)


def _prepared(rows: list[dict[str, Any]], tokenizer: Any, folder: Path, **settings: Any) -> list[Any]:
    path = folder / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    cfg = FileData(**{"kind": "file", "train_path": str(path), "validation_fraction": 0.2} | settings)
    dataset.prepare(cfg, tokenizer=tokenizer, vocab_size=49_152, max_prompt_tokens=512, out_dir=folder / "data")
    return [p for split in ("train", "validation") for p in dataset.load(folder / "data", split, tokenizer)]


@pytest.mark.parametrize("shape", SHAPES)
def test_rows_become_prompts_with_their_answers(shape, tokenizer, tmp_path):
    make, task = SHAPES[shape]
    prompts = _prepared([make(a, b) for a in range(3) for b in range(4)], tokenizer, tmp_path)
    assert len(prompts) == 12
    assert {p.task for p in prompts} == {task}
    for prompt in prompts:
        a, b = (int(word) for word in prompt.text.removesuffix("?").split() if word.isdigit())
        assert prompt.answer == str(a + b)
        row = make(a, b)
        given = next((value for value in row.values() if isinstance(value, list)), None) or _asks(a, b)
        wanted = tokenizer.apply_chat_template(given, add_generation_prompt=True, return_dict=False)
        assert prompt.tokens.tolist() == wanted, "as the template writes the whole conversation"


def _item(prompt: Any, response: str) -> verifiers.Item:
    return verifiers.Item(prompt.text, response, prompt.answer, prompt.task, prompt.metadata, prompt.opening)


def test_functions_of_verl_and_trl_are_called_as_there(tokenizer, tmp_path, monkeypatch):
    (tmp_path / "theirs.py").write_text(
        """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert data_source == "openai/gsm8k" and isinstance(extra_info["index"], int)
    return {"score": float(ground_truth in solution_str), "acc": 1}

def accuracy_reward(completions, solution, **kwargs):
    assert kwargs["prompts"][0][0]["role"] == "user" and "completion_ids" in kwargs
    return [float(s[-4:-2] in c[0]["content"]) if "none" not in c[0]["content"] else None
            for c, s in zip(completions, solution, strict=True)]

def no_more_than_it_takes(completions, prompts):
    return [float(len(c)) for c in completions]
"""
    )
    monkeypatch.syspath_prepend(tmp_path)
    (first, *_) = _prepared([verl(20, n) for n in range(10, 15)], tokenizer, tmp_path)
    path = "theirs:compute_score"
    assert verifiers.score_response([("python", path)], _item(first, f"It is {first.answer}.")).components == (1.0,)
    assert verifiers.score_response([("python", path)], _item(first, "It is none.")).components == (0.0,)
    assert verifiers.first_unusable([("python", path, False)]) is None
    assert "leave batch out" in str(verifiers.first_unusable([("python", path, True)]))

    make, _ = SHAPES["trl, conversation"]
    (first, *rest) = _prepared([make(20, n) for n in range(10, 15)], tokenizer, tmp_path)
    path = "theirs:accuracy_reward"
    items = [_item(first, f"It is {first.answer}."), _item(first, "none"), _item(rest[0], "0")]
    assert verifiers.first_unusable([("python", path, True)]) is None
    assert [o.components for o in verifiers.score_batch([("python", path)], items)] == [(1.0,), (0.0,), (0.0,)]
    assert [verifiers.score_response([("python", path)], i).components for i in items] == [(1.0,), (0.0,), (0.0,)]
    found = verifiers.score_batch([("python", "theirs:no_more_than_it_takes")], items)
    assert [o.components for o in found] == [(1.0,)] * 3, "a conversation's completion is one message"


def test_prompts_with_the_same_question_after_other_turns_are_others(tmp_path):
    rows = [{"prompt": [{"role": "user", "content": word}, TALK[1], *_asks(1, 1)], "answer": "2"} for word in "abcdef"]
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(rows))
    train, held = splits(FileData(kind="file", train_path=str(path), validation_fraction=0.34))
    assert (len(train), len(held)) == (4, 2)


def test_files_of_other_kinds_and_folders(tmp_path):
    rows = [{"question": f"q{n}", "answer": str(n), "level": "1"} for n in range(6)]
    with (tmp_path / "a.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["question", "answer", "level"])
        writer.writeheader()
        writer.writerows(rows)
    (tmp_path / "a.json").write_text(json.dumps(rows))
    table = pyarrow.Table.from_pylist(rows)
    for number in range(2):
        (tmp_path / "shards").mkdir(exist_ok=True)
        pyarrow.parquet.write_table(table.slice(3 * number, 3), tmp_path / "shards" / f"part-{number}.parquet")
    saved = tmp_path / "saved" / "train"  # as the library `datasets` saves a dictionary of splits
    saved.mkdir(parents=True)
    (saved.parent / "dataset_dict.json").write_text('{"splits": ["train"]}')
    with pyarrow.ipc.new_stream(saved / "data-00000-of-00001.arrow", table.schema) as out:
        out.write_table(table)
    found = {}
    for name in ("a.csv", "a.json", "shards", "saved"):
        train, held = splits(FileData(kind="file", train_path=str(tmp_path / name)))
        found[name] = sorted((i.question, i.answer, i.metadata["level"]) for i in (*train, *held))
    assert found["a.csv"] == found["a.json"] == found["shards"] == found["saved"]
    assert found["a.csv"][0] == ("q0", "0", "1")


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"prompt": [{"role": "user"}], "answer": "1"}], "each needs a text as role and as content"),
        ([{"prompt": [{"role": "user", "content": ["a"]}], "answer": "1"}], "each needs a text as role and as content"),
        ([{"prompt": TALK, "answer": "1"}], "is 'assistant'; end it with the user's"),
        ([{"prompt": [], "answer": "1"}], "is 'none'; end it with the user's"),
        ([{"prompt": [{"role": "user", "content": " "}], "answer": "1"}], "is blank"),
        ([{"text": "a", "answer": "1"}], r"no 'prompt'; set data.prompt_key .* \(text, answer\)"),
        (["a"], "each row must be an object"),
    ],
)
def test_what_cannot_be_asked_is_refused_by_row(rows, message, tmp_path):
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(rows))
    with pytest.raises(DataError, match=message) as found:
        splits(FileData(kind="file", train_path=str(path)))
    assert "row 1" in str(found.value)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("6 x 7 = 42\n#### 42", "42"),
        ("#### 1,234 \n", "1,234"),
        ("#### a heading\nand a text", "#### a heading\nand a text"),
        (r"first \boxed{1}, then \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed{7", r"\boxed{7"),
        ("42", "42"),
    ],
)
def test_the_end_of_a_worked_solution_is_the_answer(text, answer):
    assert final_answer(text) == answer
