"""Data sets are deterministic, split by question, and refuse bad rows by name."""

import json
from decimal import Decimal

import pyarrow
import pyarrow.parquet
import pytest
from transformers import AutoTokenizer

from conf.data import FileData, GymData
from conf.run import RunConfig
from tlt_core.data import dataset, file_questions
from tlt_core.data.dataset import DataError


@pytest.fixture(scope="module")
def tokenizer(embedded_model):
    return AutoTokenizer.from_pretrained(embedded_model)


def gym(**changes) -> GymData:
    tasks = [
        {"name": "chain_sum", "weight": 3, "config": {"min_terms": 2, "max_terms": 3, "max_digits": 2}},
        {"name": "spell_backward", "weight": 1, "config": {"min_word_len": 3, "max_word_len": 5}},
    ]
    return GymData(**({"kind": "reasoning_gym", "tasks": tasks, "num_train": 200, "num_validation": 40} | changes))


def prepare(cfg, tokenizer, out_dir, *, max_prompt_tokens=512):
    return dataset.prepare(
        cfg, tokenizer=tokenizer, vocab_size=49_152, max_prompt_tokens=max_prompt_tokens, out_dir=out_dir
    )


def test_same_section_same_bytes(tokenizer, tmp_path):
    first = prepare(gym(), tokenizer, tmp_path / "a")
    second = prepare(gym(), tokenizer, tmp_path / "b")
    other = prepare(gym(seed=1), tokenizer, tmp_path / "c")
    assert first == second
    assert (tmp_path / "a" / "train.jsonl").read_bytes() == (tmp_path / "b" / "train.jsonl").read_bytes()
    assert first.digest != other.digest
    assert first.tasks == {"chain_sum": 150, "spell_backward": 50}


def test_neighbouring_seeds_share_hardly_any_question(tokenizer, tmp_path):
    """reasoning-gym's own seeds 0 and 1 share 499 of 500 items."""
    questions = []
    for seed in (0, 1):
        prepare(gym(seed=seed), tokenizer, tmp_path / str(seed))
        questions.append({p.text for p in dataset.load(tmp_path / str(seed), "train", tokenizer)})
    assert len(questions[0] & questions[1]) < 20


def test_no_validation_question_is_trained_on(tokenizer, tmp_path):
    prepare(gym(), tokenizer, tmp_path / "d")
    train, validation = (dataset.load(tmp_path / "d", split, tokenizer) for split in ("train", "validation"))
    assert len(train) == 200
    assert len(validation) == 40
    assert not {p.text for p in train} & {p.text for p in validation}
    assert len({p.id for p in (*train, *validation)}) == 240


def test_prompts_are_those_of_serving_unless_a_system_message_is_set(tokenizer, tmp_path):
    """What a chat call of transformers or vLLM sends: SmolLM2's template has a system message of its own."""

    def prompt(**changes: object) -> str:
        prepare(gym(**changes), tokenizer, tmp_path / "d")
        return tokenizer.decode(dataset.load(tmp_path / "d", "train", tokenizer)[0].tokens)

    prepare(gym(), tokenizer, tmp_path / "d")
    text = dataset.load(tmp_path / "d", "train", tokenizer)[0].text
    served = tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False
    )
    assert prompt() == served
    assert served.startswith("<|im_start|>system\nYou are a helpful AI assistant")
    assert prompt(system_prompt="").startswith("<|im_start|>system\n<|im_end|>\n<|im_start|>user\n")
    assert prompt(system_prompt="Be brief.").startswith("<|im_start|>system\nBe brief.<|im_end|>\n")


def test_changed_files_are_made_again(tokenizer, tmp_path):
    manifest = prepare(gym(), tokenizer, tmp_path / "d")
    path = tmp_path / "d" / "train.jsonl"
    path.write_text(path.read_text()[:-100])
    assert prepare(gym(), tokenizer, tmp_path / "d") == manifest
    assert len(dataset.load(tmp_path / "d", "train", tokenizer)) == 200


def test_a_small_task_that_runs_out_says_so(tokenizer, tmp_path):
    tasks = [{"name": "chain_sum", "config": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}}]
    with pytest.raises(DataError, match="distinct questions"):
        prepare(gym(tasks=tasks, num_train=500), tokenizer, tmp_path / "d")
    assert not (tmp_path / "d").exists()


ROWS = [{"question": f"{i} + 1 = ?", "label": i + 1, "level": "easy"} for i in range(40)]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_own_files(tokenizer, tmp_path, kind):
    path = tmp_path / f"rows.{kind}"
    if kind == "jsonl":
        path.write_text("".join(json.dumps(r) + "\n" for r in ROWS))
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
    cfg = FileData(
        kind="file", train_path=str(path), prompt_key="question", answer_key="label", validation_fraction=0.2
    )
    manifest = prepare(cfg, tokenizer, tmp_path / "d")
    assert manifest.counts == {"train": 32, "validation": 8}
    prompt = dataset.load(tmp_path / "d", "train", tokenizer)[0]
    assert prompt.answer == str(int(prompt.text.split()[0]) + 1)
    assert prompt.metadata["level"] == "easy"


def test_several_files_are_joined_and_every_prompt_knows_its_row(tokenizer, tmp_path):
    for name in ("a", "b"):
        rows = [{"prompt": f"{name} {i}", "answer": str(i)} for i in range(10)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    cfg = FileData(
        kind="file",
        train_path=str(tmp_path / "a.jsonl"),
        more=[{"path": str(tmp_path / "b.jsonl"), "share": 0.3}],
        validation_fraction=0.2,
    )
    prepare(cfg, tokenizer, tmp_path / "d")
    found = [p for split in ("train", "validation") for p in dataset.load(tmp_path / "d", split, tokenizer)]
    assert sorted(p.text[0] for p in found) == ["a"] * 10 + ["b"] * 3
    for prompt in found:
        name, number = prompt.text.split()
        assert prompt.metadata["tlt_row"] == f"{tmp_path / name}.jsonl, line {int(number) + 1}"
    missing = cfg.model_copy(update={"more": (cfg.more[0].model_copy(update={"path": "none.jsonl"}),)})
    with pytest.raises(DataError, match=r"none\.jsonl does not exist; data\.more wants"):
        file_questions.check(missing)


@pytest.mark.parametrize(
    ("written", "answer"),
    [
        ("2.5e-7", "0.00000025"),
        ("1e16", "10000000000000000"),
        ("72.0", "72"),
        (pyarrow.array([72.0] * 4, pyarrow.float64()), "72"),  # what pandas makes of integers where one is missing
        (pyarrow.array([0.1] * 4, pyarrow.float32()), "0.1"),
        (pyarrow.array([1e-5] * 4, pyarrow.float64()), "0.00001"),
        (pyarrow.array([Decimal("2.50")] * 4, pyarrow.decimal128(10, 2)), "2.50"),
    ],
    ids=["small", "large", "whole", "float64", "float32", "1e-5", "decimal"],
)
def test_a_number_is_an_answer_in_plain_decimals(tokenizer, tmp_path, written, answer):
    path = tmp_path / ("rows.jsonl" if isinstance(written, str) else "rows.parquet")
    if isinstance(written, str):
        path.write_text("".join(f'{{"prompt": "q{i}", "answer": {written}}}\n' for i in range(4)))
    else:
        pyarrow.parquet.write_table(pyarrow.table({"prompt": [f"q{i}" for i in range(4)], "answer": written}), path)
    prepare(FileData(kind="file", train_path=str(path)), tokenizer, tmp_path / "d")
    assert dataset.load(tmp_path / "d", "train", tokenizer)[0].answer == answer


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"question": ', "JSON"),
        ('{"question": "x"}', "'label'"),
        ('["question"]', "each row must be an object"),
        ('{"question": "x", "label": [1]}', "'label' is a list; give a text or a number"),
        ('{"question": "x", "label": true}', "'label' is a bool; give a text or a number"),
        ('{"question": "x", "label": NaN}', "'label' is nan; give a finite number"),
        ('{"question": "x", "label": 1e999}', "'label' is inf; give a finite number"),
        ('{"question": " ", "label": 1}', "'question' is blank"),
        ('{"question": "x", "label": " "}', "'label' is blank"),
        (r'{"question": "x", "label": 1, "note": ["\ud800"]}', "surrogate"),
        ('{"question": "x", "question": "y", "label": 1}', "'question' stands twice; remove one"),
        ('{"question": "x", "label": 1, "m": {"a": 1, "a": 2}}', "'a' stands twice"),
        ('{"question": "x", "label": 1, "m": ' + "[" * 500 + "]" * 500 + "}", "nested 500 deep; 64"),
        ("[" * 100_000, "JSON"),
        ('{"question": "x", "label": ' + "1" * 5000 + "}", "JSON"),
        ('{"question": "caf\udce9", "label": 1}', "UTF-8"),
    ],
    ids=lambda value: value[:30],
)
def test_bad_line_is_named(tokenizer, tmp_path, line, problem):
    path = tmp_path / "rows.jsonl"
    good = json.dumps(ROWS[0])
    path.write_bytes(f"{good}\n{good}\n{line}\n".encode(errors="surrogateescape"))
    cfg = FileData(kind="file", train_path=str(path), prompt_key="question", answer_key="label")
    with pytest.raises(DataError, match=rf"rows\.jsonl, line 3: .*{problem}"):
        prepare(cfg, tokenizer, tmp_path / "d")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["rows.jsonl"]


@pytest.mark.parametrize(("name", "problem"), [("rows.jsonl", "has no rows"), ("rows.txt", "of no kind that is read")])
def test_a_file_without_rows_or_of_another_kind_is_refused(tokenizer, tmp_path, name, problem):
    (tmp_path / name).write_text("\n")
    cfg = FileData(kind="file", train_path=str(tmp_path / name))
    with pytest.raises(DataError, match=problem):
        prepare(cfg, tokenizer, tmp_path / "d")


def test_odd_values_beside_prompt_and_answer_are_kept(tokenizer, tmp_path):
    """The deepest nesting that is allowed, NaN, a number of a thousand digits, a whole surrogate pair."""
    deep = "[" * 63 + "1" + "]" * 63
    odd = f'"deep": {deep}, "nan": NaN, "long": {"7" * 1000}, "pair": "\\ud83d\\ude00"'
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f'{{"prompt": "q{i}", "answer": 1, {odd}}}\n' for i in range(4)))
    prepare(FileData(kind="file", train_path=str(path)), tokenizer, tmp_path / "d")
    metadata = dataset.load(tmp_path / "d", "train", tokenizer)[0].metadata
    assert json.dumps(metadata["deep"]) == deep
    assert metadata["nan"] != metadata["nan"]
    assert metadata["long"] == int("7" * 1000)
    assert metadata["pair"] == "\U0001f600"


def test_a_parquet_file_with_a_column_twice_or_without_end_is_refused(tokenizer, tmp_path):
    path = tmp_path / "rows.parquet"
    twice = pyarrow.table([["a", "b"], ["1", "2"], ["3", "4"]], names=["prompt", "answer", "answer"])
    pyarrow.parquet.write_table(twice, path)
    cfg = FileData(kind="file", train_path=str(path))
    with pytest.raises(DataError, match=r"rows\.parquet: the column 'answer' stands twice; remove one"):
        prepare(cfg, tokenizer, tmp_path / "d")
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(DataError, match=r"rows\.parquet cannot be read as Parquet after row 0 .*write it again"):
        prepare(cfg, tokenizer, tmp_path / "d")


@pytest.mark.parametrize(
    ("column", "problem"),
    [
        (pyarrow.array([2**40], pyarrow.timestamp("s")), r"column 'when': a value cannot be read \(date value out"),
        (pyarrow.array([0], pyarrow.timestamp("s", "Nowhere")), "column 'when': a value cannot be read"),
        (pyarrow.array([2**30], pyarrow.date32()), "column 'when': a value cannot be read"),
        (
            pyarrow.StructArray.from_arrays([pyarrow.array([1])] * 2, names=["a", "a"]),
            "column 'when': .*duplicate field names.*; leave the column out, or make it text",
        ),
        (pyarrow.array([json.loads("[" * 70 + "1" + "]" * 70)]), "row 1: values are nested 71 deep"),
    ],
    ids=["far year", "time zone", "far day", "twins", "deep"],
)
def test_a_parquet_value_that_python_or_json_cannot_hold_is_refused(tokenizer, tmp_path, column, problem):
    path = tmp_path / "rows.parquet"
    table = pyarrow.table({"prompt": ["a"], "answer": ["1"], "when": column})
    pyarrow.parquet.write_table(table, path)
    with pytest.raises(DataError, match=rf"rows\.parquet, {problem}"):
        prepare(FileData(kind="file", train_path=str(path)), tokenizer, tmp_path / "d")


def test_a_prepared_data_set_that_has_changed_is_not_read(tokenizer, tmp_path):
    prepare(gym(), tokenizer, tmp_path / "d")
    path, manifest = tmp_path / "d" / "train.jsonl", tmp_path / "d" / "manifest.json"
    whole, good = path.read_text(), json.loads(manifest.read_text())
    path.write_text('{"id": 1}\n')
    with pytest.raises(DataError, match=r"train\.jsonl has changed .*; 'tlt prepare CONFIG' makes it again"):
        dataset.load(tmp_path / "d", "train", tokenizer)
    path.write_text(whole)
    for change, problem in (
        ({"sha256": 3}, "manifest.json, sha256: Input should be a valid dictionary; 'tlt prepare"),
        ({"config": {"kind": "reasoning_gym"}}, "manifest.json, reasoning_gym.tasks: Field required"),
    ):
        manifest.write_text(json.dumps(good | change))
        with pytest.raises(DataError, match=problem):
            dataset.load(tmp_path / "d", "train", tokenizer)


@pytest.mark.parametrize("task", ["graph_color", "arc_agi"])  # no reference answer; a scorer that compares tuples
def test_a_task_whose_reference_scores_nothing_is_refused(tokenizer, tmp_path, task):
    with pytest.raises(DataError, match=f"{task}.*choose another task"):
        prepare(gym(tasks=[{"name": task}]), tokenizer, tmp_path / "d")


def write_jsonl(path, questions, *, encoding="utf-8"):
    rows = (json.dumps({"prompt": q, "answer": "1"}, ensure_ascii=False) for q in questions)
    path.write_bytes("\n".join(rows).encode(encoding))
    return str(path)


def test_only_a_line_feed_ends_a_line(tokenizer, tmp_path):
    """U+2028 and U+0085 are legal inside JSON strings; a byte order mark is not content."""
    questions = {f"first\u2028second\x85third {i}" for i in range(10)}
    path = write_jsonl(tmp_path / "rows.jsonl", sorted(questions), encoding="utf-8-sig")
    prepare(FileData(kind="file", train_path=path), tokenizer, tmp_path / "d")
    loaded = {p.text for split in ("train", "validation") for p in dataset.load(tmp_path / "d", split, tokenizer)}
    assert loaded == questions


def test_file_rows_with_a_scorer_that_does_not_know_them_fail_at_load():
    rows = {"kind": "file", "train_path": "rows.jsonl"}
    with pytest.raises(ValueError, match=r"reasoning_gym.*math_verify"):
        RunConfig(data=rows)
    assert RunConfig(data=rows, reward={"functions": [{"kind": "exact"}]}).data.kind == "file"


def test_own_validation_file(tokenizer, tmp_path):
    train = write_jsonl(tmp_path / "train.jsonl", [f"q{i}" for i in range(10)])
    held = tmp_path / "held.jsonl"
    cfg = FileData(kind="file", train_path=train, validation_path=str(held))
    with pytest.raises(DataError, match=r"held\.jsonl does not exist; data\.validation_path"):
        prepare(cfg, tokenizer, tmp_path / "d")
    write_jsonl(held, ["q0", "v0", "v1"])
    assert prepare(cfg, tokenizer, tmp_path / "d").counts == {"train": 9, "validation": 3}
    write_jsonl(held, ["q0", "q1", "v0", "v1"])  # the prepared data set is stale now
    assert prepare(cfg, tokenizer, tmp_path / "d").counts == {"train": 8, "validation": 4}
    write_jsonl(held, [f"q{i}" for i in range(10)])
    with pytest.raises(DataError, match="every prompt of"):
        prepare(cfg, tokenizer, tmp_path / "d")


def test_long_prompts_are_dropped_and_counted(tokenizer, tmp_path):
    tasks = [{"name": "chain_sum", "config": {"min_terms": 2, "max_terms": 30}}]
    manifest = prepare(gym(tasks=tasks), tokenizer, tmp_path / "d", max_prompt_tokens=80)
    assert manifest.dropped_long > 0
    assert max(len(p.tokens) for p in dataset.load(tmp_path / "d", "train", tokenizer)) <= 80
