"""Questions from your own files, as teams have them.  A bad row is named by file and line.

verl        prompt: messages, reward_model.ground_truth, data_source (the task)
TRL         prompt: a text or messages, solution or another column for the rewards
OpenRLHF    input, label
GSM8K       question, answer: a worked solution that ends with `#### 72`
"""

import json
import logging
import math
import random
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from decimal import Decimal
from itertools import chain, islice
from pathlib import Path
from typing import Any

from conf.data import FileData
from conf.reward import task_of
from tlt_core.data import hub
from tlt_core.data.chat import MESSAGES
from tlt_core.data.question import DataError, Question
from tlt_core.data.row_files import READERS, ROWS_AT_ONCE
from tlt_core.items.store import sha256_of

log = logging.getLogger(__name__)

ROW = "tlt_row"  # in a question's metadata: its file and line
TASK = "file"  # of rows without a data source
# Names of columns, the likeliest first.
_PROMPTS = ("prompt", "question", "problem", "input", "context_messages", "messages", "instruction", "query")
_ANSWERS = ("answer", "reward_model.ground_truth", "ground_truth", "label", "solution", "target", "final_answer")
_KINDS = (
    ".jsonl, .json, .csv or .parquet file, a folder of .parquet or .arrow files, or "
    f"{hub.START}OWNER/NAME/FILES of the Hugging Face hub"
)
_MARKED = re.compile(r"####[ \t]*(\S[^\n]*?)\s*\Z")


def check(cfg: FileData) -> None:
    """Are the files there, and the first rows of each as they should be?  Raises DataError naming file and line."""
    for rows in _both(cfg):
        for _ in islice(rows, ROWS_AT_ONCE):
            pass


def splits(cfg: FileData) -> tuple[list[Question], list[Question]]:
    """Training and validation questions; no question is in both.  Raises DataError."""
    train = _read(cfg.train_path, cfg, setting="data.train_path")
    for further in cfg.more:
        items = _read(further.path, cfg, setting="data.more")
        taken = random.Random(f"{cfg.seed} {further.path}").sample(range(len(items)), round(further.share * len(items)))
        train += [items[index] for index in sorted(taken)]
    if cfg.validation_path:
        validation = _read(cfg.validation_path, cfg, setting="data.validation_path")
        held = {asked(i) for i in validation}
        apart = [i for i in train if asked(i) not in held]
        if not apart:
            raise DataError(
                f"every prompt of {cfg.train_path} is also in {cfg.validation_path}; give data.validation_path other "
                "prompts, or leave it empty to hold some training rows back"
            )
        return apart, validation
    questions = sorted({asked(i) for i in train})
    if len(questions) < 2:
        raise DataError(f"{cfg.train_path} has fewer than two distinct prompts: nothing can be held back")
    random.Random(cfg.seed).shuffle(questions)
    held = set(questions[: max(1, round(len(questions) * cfg.validation_fraction))])
    return [i for i in train if asked(i) not in held], [i for i in train if asked(i) in held]


def asked(item: Question) -> str:
    """What tells prompts apart: the question, and the conversation before it."""
    before = item.metadata.get(MESSAGES, ())[:-1]
    return json.dumps([*before, item.question]) if before else item.question


def places(cfg: FileData, wanted: Collection[tuple[str, str]]) -> dict[tuple[str, str], str]:
    """File and line of the first row with each of these prompts and answers."""
    found: dict[tuple[str, str], str] = {}
    for where, item in chain.from_iterable(_both(cfg)):
        if (item.question, item.answer) in wanted:
            found.setdefault((item.question, item.answer), where)
    return found


def source(cfg: FileData) -> str:
    """The files with their checksums, so that it changes with their content."""
    given = [p for p in (cfg.train_path, *(further.path for further in cfg.more), cfg.validation_path) if p]
    paths = [file for path in given for file in _all_files(path)]
    return ", ".join(f"{p} sha256 {sha256_of(p) if p.is_file() else 'missing'}" for p in paths)


def _all_files(path: str) -> list[Path]:
    """What a checksum is taken of."""
    if path.startswith(hub.START):
        return hub.files(path)
    given = Path(path)
    return [file for file in sorted(given.rglob("*")) if not file.is_dir()] if given.is_dir() else [given]


def _read(path: str, cfg: FileData, *, setting: str) -> list[Question]:
    items = [item for _, item in _located(path, cfg, setting=setting, says=True)]
    if not items:
        raise DataError(f"data file {path} has no rows")
    return items


def _both(cfg: FileData) -> list[Iterator[tuple[str, Question]]]:
    """Rows of each training file, and of the validation file if there is one."""
    paths = [("data.train_path", cfg.train_path), *(("data.more", further.path) for further in cfg.more)]
    paths += [("data.validation_path", cfg.validation_path)]
    return [_located(path, cfg, setting=setting) for setting, path in paths if path]


def _located(path: str, cfg: FileData, *, setting: str, says: bool = False) -> Iterator[tuple[str, Question]]:
    """says: tell in the log what was chosen."""
    prompt_key, answer_key, shortened = "", "", 0
    for where, row in _rows(path, setting=setting):
        if not isinstance(row, dict):
            raise DataError(f"{where}: a {type(row).__name__}; each row must be an object with a prompt and an answer")
        if not prompt_key:
            prompt_key, answer_key = (
                _column(row, key, usual) for key, usual in ((cfg.prompt_key, _PROMPTS), (cfg.answer_key, _ANSWERS))
            )
            if says:
                log.info("%s: prompts are %r, answers are %r", path, prompt_key, answer_key)
        # TRL's functions get the answer's column by its own name.
        metadata = {name: value for name, value in row.items() if name not in (prompt_key, "answer")}
        metadata[ROW] = where
        prompt, answer = _at(row, prompt_key), _text(where, row, answer_key)
        if isinstance(prompt, list | tuple):
            metadata[MESSAGES] = _messages(where, prompt, prompt_key)
            prompt = metadata[MESSAGES][-1]["content"]
        else:
            prompt = _text(where, row, prompt_key)
        if (short := final_answer(answer)) != answer:
            metadata.setdefault("solution", answer)
            shortened += 1
        task = row.get("data_source")
        yield where, Question(task_of(task) if isinstance(task, str) and task else TASK, prompt, short, metadata)
    if says and shortened:
        log.info("%s: of %d answers the end is the reference (after '####', or in the last box)", path, shortened)


def _rows(path: str, *, setting: str) -> Iterator[tuple[str, Any]]:
    """(where, row) of whatever the path is."""
    if path.startswith(hub.START):
        tables = hub.files(path)
    elif Path(path).is_dir():
        tables = _tables(Path(path), setting=setting)
    elif Path(path).is_file():
        tables = [Path(path)]
    else:
        raise DataError(f"data file {path} does not exist; {setting} wants a {_KINDS}")
    for table in tables:
        if table.suffix not in READERS:
            raise DataError(f"data file {table} is of no kind that is read; {setting} wants a {_KINDS}")
        yield from READERS[table.suffix](table)


def _tables(folder: Path, *, setting: str) -> list[Path]:
    """Files of a folder: of the library `datasets`, or simply Parquet."""
    split = "validation" if setting == "data.validation_path" else "train"
    if (folder / "dataset_dict.json").is_file():  # several splits
        wanted = [folder / split, *([folder / "test"] if split == "validation" else [])]
        folder = next((path for path in wanted if path.is_dir()), folder)
    tables = sorted(folder.glob("*.arrow")) or sorted(folder.glob("*.parquet"))
    if not tables:
        names = ", ".join(sorted(path.name for path in folder.iterdir())[:5])
        raise DataError(f"{folder} holds neither .arrow nor .parquet files ({names}); {setting} wants a {_KINDS}")
    return tables


def _column(row: Mapping[str, Any], key: str, usual: Sequence[str]) -> str:
    """The key, or the first usual name that the row has."""
    return next((name for name in (key, *usual) if _at(row, name) is not None), key) if key == usual[0] else key


def _at(row: Any, key: str) -> Any:
    """row["reward_model"]["ground_truth"] for "reward_model.ground_truth"; None where there is none."""
    if isinstance(row, Mapping) and key in row:
        return row[key]
    first, dot, rest = key.partition(".")
    return _at(row[first], rest) if dot and isinstance(row, Mapping) and first in row else None


def _messages(where: str, given: Sequence[Any], key: str) -> list[dict[str, str]]:
    """A conversation, as it is.  Raises DataError for what no chat template takes, or nobody could answer."""
    messages = []
    for message in given:
        role, content = (message.get(name) if isinstance(message, Mapping) else None for name in ("role", "content"))
        if not isinstance(role, str) or not isinstance(content, str):
            raise DataError(
                f"{where}: {key!r} has the message {str(message)[:80]!r}; each needs a text as role and as content"
            )
        messages.append({"role": role, "content": content})
    if not messages or messages[-1]["role"] != "user":
        last = messages[-1]["role"] if messages else "none"
        raise DataError(
            f"{where}: the last message of {key!r} is {last!r}; end it with the user's, which the policy answers"
        )
    if not messages[-1]["content"].strip():
        raise DataError(f"{where}: the last message of {key!r} is blank; give it a text, or remove the row")
    return messages


def final_answer(text: str) -> str:
    """What a worked solution ends with: final_answer("6 x 7 = 42\n#### 42") == "42"; any other text as it is."""
    if marked := _MARKED.search(text):
        return marked[1].strip()
    start = text.rfind("\\boxed{")
    if start < 0:
        return text
    depth = 0
    for end in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if text[end] == "}" and not depth:
            inside = text[start + len("\\boxed{") : end].strip()
            return inside or text
    return text


def _text(where: str, row: Any, key: str) -> str:
    """A row's prompt or answer: a text or a number; of a list or object (references of verl, tests of code) its JSON.
    Raises DataError naming the row."""
    value = _at(row, key)
    if value is None or value == "":
        raise DataError(f"{where}: no {key!r}; set data.prompt_key and data.answer_key to its columns ({_names(row)})")
    if isinstance(value, float) and not math.isfinite(value):
        raise DataError(f"{where}: {key!r} is {value}; give a finite number or a text")
    asserts = isinstance(value, list) and value and all(str(line).startswith("assert ") for line in value)
    program = isinstance(value, dict) and {"inputs", "outputs"} <= value.keys()
    if asserts or program or (isinstance(value, list | dict) and key not in row):
        return json.dumps(value, ensure_ascii=False, default=str)
    if isinstance(value, bool) or not isinstance(value, str | int | float | Decimal):
        raise DataError(f"{where}: {key!r} is a {type(value).__name__}; give a text or a number")
    text = _plain(value) if isinstance(value, float | Decimal) else str(value)
    if not text.strip():
        raise DataError(f"{where}: {key!r} is blank; give it a text, or remove the row")
    return text


def _names(row: Mapping[str, Any]) -> str:
    return ", ".join(map(str, list(row)[:12]))


def _plain(number: float | Decimal) -> str:
    """In plain decimals, as people write it: 1e-05 is 0.00001, and 72.0 (an integer of a column with nulls) is 72."""
    if isinstance(number, float) and number.is_integer():
        return str(int(number))
    return format(Decimal(str(number)), "f")
