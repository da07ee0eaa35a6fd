"""Questions from your own JSONL or Parquet files.  A bad row is named by file and line."""

import json
import math
import random
import re
from collections.abc import Collection, Iterator, Sequence
from decimal import Decimal
from itertools import chain, islice
from pathlib import Path
from typing import Any

from conf.data import FileData
from tlt_core.data.question import DataError, Question
from tlt_core.items.store import sha256_of

TASK = "file"  # of all rows
_ROWS_AT_ONCE = 10_000  # that are checked before a run begins: a fraction of a second
DEEPEST = 64  # brackets around a value, far from where Python's own readers and writers give up
_SURROGATE = re.compile("[\ud800-\udfff]")


def check(cfg: FileData) -> None:
    """Are the files there, and the first rows of each as they should be?  Raises DataError naming file and line."""
    for rows in _both(cfg):
        for _ in islice(rows, _ROWS_AT_ONCE):
            pass


def splits(cfg: FileData) -> tuple[list[Question], list[Question]]:
    """Training and validation questions; no question is in both.  Raises DataError."""
    train = _read(Path(cfg.train_path), cfg, setting="data.train_path")
    if cfg.validation_path:
        validation = _read(Path(cfg.validation_path), cfg, setting="data.validation_path")
        held = {i.question for i in validation}
        apart = [i for i in train if i.question not in held]
        if not apart:
            raise DataError(
                f"every prompt of {cfg.train_path} is also in {cfg.validation_path}; give data.validation_path other "
                "prompts, or leave it empty to hold some training rows back"
            )
        return apart, validation
    questions = sorted({i.question for i in train})
    if len(questions) < 2:
        raise DataError(f"{cfg.train_path} has fewer than two distinct prompts: nothing can be held back")
    random.Random(cfg.seed).shuffle(questions)
    held = set(questions[: max(1, round(len(questions) * cfg.validation_fraction))])
    return [i for i in train if i.question not in held], [i for i in train if i.question in held]


def places(cfg: FileData, wanted: Collection[tuple[str, str]]) -> dict[tuple[str, str], str]:
    """File and line of the first row with each of these prompts and answers."""
    found: dict[tuple[str, str], str] = {}
    for where, item in chain.from_iterable(_both(cfg)):
        if (item.question, item.answer) in wanted:
            found.setdefault((item.question, item.answer), where)
    return found


def source(cfg: FileData) -> str:
    """The files with their checksums, so that it changes with their content."""
    paths = [Path(p) for p in (cfg.train_path, cfg.validation_path) if p]
    return ", ".join(f"{p} sha256 {sha256_of(p) if p.is_file() else 'missing'}" for p in paths)


def jsonl_rows(path: Path, *, deepest: int = DEEPEST) -> Iterator[tuple[str, Any]]:
    """(where, value) of each line that is not blank.  Raises DataError naming file and line.  deepest: levels of lists
    and objects in a value."""
    # Read bytes, where only a line feed ends a line: text mode splits at other characters too, which JSON may contain.
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            where = f"{path}, line {number}"
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
                if not text:
                    continue
                value = json.loads(text, object_pairs_hook=_without_twins)
            except json.JSONDecodeError as error:
                raise DataError(
                    f"{where}: not JSON ({error.msg} at column {error.colno}); each line must be one JSON object"
                ) from None
            except _Twins as error:
                raise DataError(f"{where}: the key {error.args[0]!r} stands twice; remove one") from None
            except UnicodeDecodeError as error:
                raise DataError(f"{where}: not UTF-8 ({error.reason}); convert the file to UTF-8") from None
            except (ValueError, RecursionError) as error:  # numbers of thousands of digits, thousands of brackets
                raise DataError(f"{where}: cannot be read as JSON ({error}); remove or mend the line") from None
            _require_writable(where, value, deepest=deepest)
            yield where, value


class _Twins(Exception):
    """A JSON object has this key twice; Python would take the last one silently."""


def _without_twins(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) < len(pairs):
        names = [name for name, _ in pairs]
        raise _Twins(next(name for name in names if names.count(name) > 1))
    return row


def _require_writable(where: str, value: Any, *, deepest: int) -> None:
    """Raises DataError for what could be read, but neither stored nor sent to a scoring process."""
    depth, level = 0, [value]
    while level:
        depth += 1
        if any(isinstance(found, str) and _SURROGATE.search(found) for found in level):
            raise DataError(f"{where}: a text holds half of a surrogate pair; mend or remove the row")
        level = [inner for outer in level for inner in _parts(outer)]
    if depth > deepest + 1:  # the last level is that of plain values
        raise DataError(f"{where}: values are nested {depth - 1} deep; {deepest} are allowed: flatten the row")


def _parts(value: Any) -> Sequence[Any]:
    """Of a list or an object: what is in it, names included."""
    if isinstance(value, dict):
        return [*value, *value.values()]
    return value if isinstance(value, list | tuple) else ()


def _read(path: Path, cfg: FileData, *, setting: str) -> list[Question]:
    items = [item for _, item in _located(path, cfg, setting=setting)]
    if not items:
        raise DataError(f"data file {path} has no rows")
    return items


def _both(cfg: FileData) -> list[Iterator[tuple[str, Question]]]:
    """Rows of the training file, and of the validation file if there is one."""
    paths = {"data.train_path": cfg.train_path, "data.validation_path": cfg.validation_path}
    return [_located(Path(path), cfg, setting=setting) for setting, path in paths.items() if path]


def _located(path: Path, cfg: FileData, *, setting: str) -> Iterator[tuple[str, Question]]:
    if not path.is_file():
        raise DataError(f"data file {path} does not exist; {setting} wants a .jsonl or .parquet file")
    if path.suffix == ".jsonl":
        rows = jsonl_rows(path)
    elif path.suffix == ".parquet":
        rows = _parquet_rows(path)
    else:
        raise DataError(f"data file {path} is neither .jsonl nor .parquet; convert it")
    for where, row in rows:
        prompt, answer = (_text(where, row, key) for key in (cfg.prompt_key, cfg.answer_key))
        metadata = {k: v for k, v in row.items() if k not in (cfg.prompt_key, cfg.answer_key)}
        yield where, Question(TASK, prompt, answer, metadata)


def _text(where: str, row: Any, key: str) -> str:
    """A row's prompt or answer: a text or a number.  Raises DataError naming the row."""
    value = row.get(key) if isinstance(row, dict) else None
    if value is None or value == "":
        raise DataError(f"{where}: no {key!r}; set data.prompt_key and data.answer_key to its columns")
    if isinstance(value, float) and not math.isfinite(value):
        raise DataError(f"{where}: {key!r} is {value}; give a finite number or a text")
    if isinstance(value, bool) or not isinstance(value, str | int | float | Decimal):
        raise DataError(f"{where}: {key!r} is a {type(value).__name__}; give a text or a number")
    text = _plain(value) if isinstance(value, float | Decimal) else str(value)
    if not text.strip():
        raise DataError(f"{where}: {key!r} is blank; give it a text, or remove the row")
    return text


def _plain(number: float | Decimal) -> str:
    """In plain decimals, as people write it: 1e-05 is 0.00001, and 72.0 (an integer of a column with nulls) is 72."""
    if isinstance(number, float) and number.is_integer():
        return str(int(number))
    return format(Decimal(str(number)), "f")


def _parquet_rows(path: Path) -> Iterator[tuple[str, Any]]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if twins := sorted({name for name in names if names.count(name) > 1}):
                raise DataError(f"{path}: the column {twins[0]!r} stands twice; remove one")
            for batch in file.iter_batches(batch_size=_ROWS_AT_ONCE):
                columns = [
                    _values(column, f"{path}, column {name!r}") for name, column in zip(names, batch, strict=True)
                ]
                for row in zip(*columns, strict=True):
                    number += 1
                    where, value = f"{path}, row {number}", dict(zip(names, row, strict=True))
                    _require_writable(where, value, deepest=DEEPEST)
                    yield where, value
    except (pyarrow.ArrowException, UnicodeDecodeError, OSError) as error:
        why = " ".join(str(error).split())  # Arrow's reasons may have several lines
        raise DataError(f"{path} cannot be read as Parquet after row {number} ({why}); write it again") from None


def _values(column: Any, where: str) -> list[Any]:
    """As Python's own values.  Raises DataError for those that have none, such as a date in the year 10,000."""
    try:
        values: list[Any] = column.to_pylist()
        if column.type in ("float", "halffloat"):  # the shortest number of that type: 0.1, not 0.10000000149011612
            narrow = column.type.to_pandas_dtype()
            values = [None if value is None else float(str(narrow(value))) for value in values]
    except (ValueError, ArithmeticError, LookupError) as error:
        raise DataError(f"{where}: a value cannot be read ({error}); leave the column out, or make it text") from None
    return values
