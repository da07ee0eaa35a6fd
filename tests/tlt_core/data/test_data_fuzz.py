"""Whatever stands in a data file, it is read, or refused with file, row and remedy."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from conf.data import FileData
from tests.fuzz import cases, fuzz
from tests.tlt_core.export.conftest import write_tokenizer
from tlt_core.data import dataset, file_questions
from tlt_core.data.dataset import DataError

TEXTS = st.text(max_size=8) | st.sampled_from(["", " ", "\u2028", "\x85", "\ud800", "1e999", "NaN"])
NUMBERS = st.integers() | st.floats() | st.sampled_from([0, -0.0, 10**400, 1e308])
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS,
    lambda inside: st.lists(inside, max_size=3) | st.dictionaries(st.text(max_size=4), inside, max_size=3),
    max_leaves=6,
)
KEYS = st.sampled_from(["prompt", "answer"])
ROWS = VALUES | st.fixed_dictionaries({"prompt": VALUES, "answer": VALUES}) | st.dictionaries(KEYS | TEXTS, VALUES)
GOOD = [{"prompt": f"w{i} w{i + 1}", "answer": i} for i in range(3)]

# Values of Arrow's types, many of which Python's own types cannot hold.
FAR = st.integers(-(2**63), 2**63 - 1)
SHORT = st.integers(-(2**31), 2**31 - 1)
ARRAYS = st.one_of(
    st.builds(lambda n, unit, zone: pyarrow.array([n] * 3, pyarrow.timestamp(unit, zone)), FAR | SHORT,
              st.sampled_from(["s", "ms", "us", "ns"]), st.sampled_from([None, "UTC", "+25:99", "Nowhere"])),
    st.builds(lambda n, unit: pyarrow.array([n] * 3, pyarrow.duration(unit)), FAR, st.sampled_from(["s", "ns"])),
    st.builds(lambda n: pyarrow.array([n] * 3, pyarrow.date32()), SHORT),
    st.builds(lambda n: pyarrow.array([None, n, None], pyarrow.float64()), st.floats()),
    st.builds(lambda content: pyarrow.array([content] * 3, pyarrow.binary()), st.binary(max_size=4)),
    st.builds(lambda text: pyarrow.array([text, "a", None]).dictionary_encode(), st.text(max_size=3)),
    st.builds(lambda name: pyarrow.StructArray.from_arrays([pyarrow.array([1] * 3)] * 2, names=[name, "a"]),
              st.sampled_from(["a", "b"])),
    st.builds(lambda depth: _nested(depth), st.integers(0, 90)),
    st.builds(lambda key: pyarrow.array([[(key, 1), (key, 2)]] * 3, pyarrow.map_(pyarrow.string(), pyarrow.int8())),
              st.text(max_size=2)),
)  # fmt: skip


def _nested(depth: int) -> pyarrow.Array:
    array = pyarrow.array([1] * 3)
    for _ in range(depth):
        array = pyarrow.ListArray.from_arrays(pyarrow.array([0, 1, 2, 3], pyarrow.int32()), array)
    return array


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    folder = tmp_path_factory.mktemp("words")
    write_tokenizer(folder)
    return PreTrainedTokenizerFast.from_pretrained(folder)


def _tried(call: Callable[[], Any], path: Path) -> Any:
    """What a call returns, or None if it refuses `path` in one paragraph.  Any other error fails the test."""
    try:
        return call()
    except DataError as error:
        said = str(error)
        assert str(path) in said
        assert "\n" not in said
        assert "; " in said or "fewer than two" in said, f"no remedy: {said}"
        return None


def _read_and_written(path: Path, tokenizer: PreTrainedTokenizerFast, out_dir: Path) -> None:
    """A file that is accepted becomes a data set, which is read back as it was."""
    cfg = FileData(kind="file", train_path=str(path), validation_fraction=0.5)
    (out_dir / "manifest.json").unlink(missing_ok=True)
    found = _tried(lambda: file_questions.splits(cfg), path)
    made = _tried(
        lambda: dataset.prepare(cfg, tokenizer=tokenizer, vocab_size=49_152, max_prompt_tokens=512, out_dir=out_dir),
        path,
    )
    assert (found is None) == (made is None)
    if found is None:
        return
    for split, items in zip(("train", "validation"), found, strict=True):
        prompts = dataset.load(out_dir, split, tokenizer)
        assert [(p.text, p.answer) for p in prompts] == [(i.question, i.answer) for i in items]
        assert all(p.text.strip() and p.answer.strip() for p in prompts)


@cases(few=40, many=2500)
def test_any_rows_of_a_jsonl_file(count: int, tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    @fuzz(count)
    @given(st.lists(ROWS, max_size=3), st.booleans())
    def check(rows: list[Any], escaped: bool) -> None:
        lines = [json.dumps(row, ensure_ascii=escaped) for row in [*GOOD, *rows]]
        path = tmp_path / "rows.jsonl"
        path.write_bytes("\n".join(lines).encode("utf-8", "surrogatepass"))
        _read_and_written(path, tokenizer, tmp_path / "d")

    check()


@cases(few=40, many=2500)
def test_any_bytes_in_a_jsonl_file(count: int, tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    whole = "\n".join(json.dumps(row | {"more": [1.5, None, {"a": "\u20ac"}]}) for row in GOOD).encode()

    @fuzz(count)
    @given(st.binary(max_size=4), st.integers(0, len(whole)), st.integers(0, 20))
    def check(content: bytes, start: int, cut: int) -> None:
        path = tmp_path / "rows.jsonl"
        path.write_bytes(whole[:start] + content + whole[start + cut :])
        _read_and_written(path, tokenizer, tmp_path / "d")

    check()


@cases(few=30, many=1200)
def test_any_column_of_a_parquet_file(count: int, tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    good = pyarrow.Table.from_pylist(GOOD)

    @fuzz(count)
    @given(ARRAYS, st.sampled_from(["prompt", "answer", "more"]))
    def check(array: pyarrow.Array, name: str) -> None:
        path = tmp_path / "rows.parquet"
        table = good.drop_columns(name) if name in good.column_names else good
        try:
            pyarrow.parquet.write_table(table.append_column(name, array), path)
        except (pyarrow.ArrowException, OSError):  # not everything can be written
            return
        _read_and_written(path, tokenizer, tmp_path / "d")

    check()


@cases(few=30, many=1200)
def test_any_bytes_in_a_parquet_file(count: int, tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(GOOD), path)
    whole = path.read_bytes()

    @fuzz(count)
    @given(st.binary(max_size=4), st.integers(0, len(whole)), st.integers(0, 6))
    def check(content: bytes, start: int, cut: int) -> None:
        path.write_bytes(whole[:start] + content + whole[start + cut :])
        _read_and_written(path, tokenizer, tmp_path / "d")

    check()


@cases(few=40, many=600)
def test_any_change_to_a_data_set(count: int, tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    """Of one value of the manifest, or of some bytes of a split."""
    rows, folder = tmp_path / "rows.jsonl", tmp_path / "d"
    rows.write_text("\n".join(map(json.dumps, GOOD)))
    cfg = FileData(kind="file", train_path=str(rows))
    dataset.prepare(cfg, tokenizer=tokenizer, vocab_size=49_152, max_prompt_tokens=512, out_dir=folder)
    manifest = json.loads((folder / "manifest.json").read_bytes())
    train = (folder / "train.jsonl").read_bytes()

    @fuzz(count)
    @example("counts", {"\n": None}, b"", 0)
    @given(st.sampled_from(sorted(manifest)), VALUES, st.binary(max_size=4), st.integers(0, len(train)))
    def check(key: str, value: Any, content: bytes, start: int) -> None:
        (folder / "manifest.json").write_text(json.dumps(manifest | {key: value}), encoding="utf-8")
        found = _tried(lambda: dataset.load(folder, "train", tokenizer), folder)
        assert found is None or len(found) == len(GOOD) - 1
        (folder / "manifest.json").write_text(json.dumps(manifest))
        (folder / "train.jsonl").write_bytes(changed := train[:start] + content + train[start:])
        found = _tried(lambda: dataset.load(folder, "train", tokenizer), folder)
        assert (found is None) == (changed != train)
        (folder / "train.jsonl").write_bytes(train)

    check()
