"""Rows of files as they are: JSONL, JSON, CSV, Parquet, Arrow.  What cannot be read is named by file and line."""

import csv
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tlt_core.data.question import DataError

ROWS_AT_ONCE = 10_000  # that are checked before a run begins: a fraction of a second
DEEPEST = 64  # brackets around a value, far from where Python's own readers and writers give up
_SURROGATE = re.compile("[\ud800-\udfff]")


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


def _json_rows(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        rows = json.loads(path.read_text("utf-8-sig"), object_pairs_hook=_without_twins)
    except _Twins as error:
        raise DataError(f"{path}: the key {error.args[0]!r} stands twice in a row; remove one") from None
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError and JSONDecodeError are such
        raise DataError(f"{path}: cannot be read as JSON ({error}); write a list of objects") from None
    if not isinstance(rows, list):
        raise DataError(f"{path}: a {type(rows).__name__}; write a list of objects, or .jsonl with one in each line")
    for number, row in enumerate(rows, start=1):
        _require_writable(f"{path}, row {number}", row, deepest=DEEPEST)
        yield f"{path}, row {number}", row


def _csv_rows(path: Path) -> Iterator[tuple[str, Any]]:
    csv.field_size_limit(1 << 30)
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, strict=True)
            names = reader.fieldnames or []
            if twins := sorted({name for name in names if names.count(name) > 1}):
                raise DataError(f"{path}: the column {twins[0]!r} stands twice; remove one")
            for row in reader:
                where = f"{path}, line {reader.line_num}"
                if None in row or None in row.values():
                    raise DataError(f"{where}: it has not as many values as there are columns ({len(names)})")
                yield where, dict(row)
    except (csv.Error, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read as CSV ({error}); write it again in UTF-8, texts in quotes") from None


def _table_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """Of Parquet, or of Arrow's stream format, which the library `datasets` writes."""
    import pyarrow
    import pyarrow.parquet

    number, kind = 0, "Parquet" if path.suffix == ".parquet" else "Arrow"
    try:
        with (
            pyarrow.parquet.ParquetFile(path) if kind == "Parquet" else pyarrow.ipc.open_stream(path.read_bytes())
        ) as file:
            names = (file.schema_arrow if kind == "Parquet" else file.schema).names
            if twins := sorted({name for name in names if names.count(name) > 1}):
                raise DataError(f"{path}: the column {twins[0]!r} stands twice; remove one")
            for batch in file.iter_batches(batch_size=ROWS_AT_ONCE) if kind == "Parquet" else file:
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
        raise DataError(f"{path} cannot be read as {kind} after row {number} ({why}); write it again") from None


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


READERS = {
    ".jsonl": jsonl_rows,
    ".json": _json_rows,
    ".csv": _csv_rows,
    ".parquet": _table_rows,
    ".arrow": _table_rows,
}
