"""Data sets of prompts with verifiable answers: made, checked, written once, read by everyone.

    reasoning-gym mixture, or a JSONL/Parquet file  ->  train.jsonl, validation.jsonl, manifest.json

Deterministic: the same section of the configuration gives the same bytes.  reasoning-gym derives item i from
Random(seed + i), so neighbouring seeds share almost all their items; each task therefore gets one wide index range of
its own, and the validation split is separated from the training split by question text.
"""

import hashlib
import importlib.metadata
import json
import os
import random
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from conf.schema import DataConfig, FileData, GymData
from tlt_core.types import Prompt

_TASK_STRIDE = 100_000_000  # seeds between two tasks of a mixture
_MAX_TRIES = 50  # items looked at for each one wanted, before a task's space counts as exhausted


class DataError(ValueError):
    """Data that cannot be used.  The text names file, line or task, and the remedy."""


class Item(NamedTuple):
    """One question before it has an id."""

    task: str
    question: str
    answer: str
    metadata: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class DataManifest:
    """What a data set is and where it came from; `manifest.json`."""

    digest: str  # sha256 over the configuration section and both files
    config: dict[str, Any]  # the `data` section
    generator: str  # e.g. "reasoning-gym 0.1.25", or the source file with its sha256
    max_prompt_tokens: int
    counts: dict[str, int]  # per split
    tasks: dict[str, int]  # training prompts per task
    dropped_long: int  # prompts with more than max_prompt_tokens tokens
    sha256: dict[str, str]  # per file


def prepare(cfg: DataConfig, *, tokenizer: Any, max_prompt_tokens: int, out_dir: Path) -> DataManifest:
    """Make the data set, or do nothing when it is there already.  Raises DataError."""
    existing = _read_manifest(out_dir)
    if existing is not None and _matches(existing, cfg, max_prompt_tokens, out_dir):
        return existing
    train, validation, generator = _gym_splits(cfg) if isinstance(cfg, GymData) else _file_splits(cfg)
    kept, dropped = [], 0
    for split in (validation, train):
        rows = [i for i in split if len(_encode(tokenizer, i, cfg)) <= max_prompt_tokens]
        dropped += len(split) - len(rows)
        kept.append(rows)
    validation, train = kept
    if not train or not validation:
        raise DataError(
            f"all prompts of a split are longer than rollout.max_prompt_tokens={max_prompt_tokens}; raise it or use "
            "shorter prompts"
        )
    partial = out_dir.with_name(f".{out_dir.name}.partial-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        _write_rows(partial / "validation.jsonl", validation, first_id=0)
        _write_rows(partial / "train.jsonl", train, first_id=len(validation))
        sha256 = {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(partial.iterdir())}
        config = cfg.model_dump(mode="json")
        manifest = DataManifest(
            digest=hashlib.sha256(json.dumps([config, sha256], sort_keys=True).encode()).hexdigest(),
            config=config,
            generator=generator,
            max_prompt_tokens=max_prompt_tokens,
            counts={"train": len(train), "validation": len(validation)},
            tasks=dict(sorted(Counter(i.task for i in train).items())),
            dropped_long=dropped,
            sha256=sha256,
        )
        (partial / "manifest.json").write_text(json.dumps(asdict(manifest), indent=1, sort_keys=True))
        shutil.rmtree(out_dir, ignore_errors=True)
        partial.rename(out_dir)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return manifest


def load(out_dir: Path, split: Literal["train", "validation"], tokenizer: Any) -> list[Prompt]:
    """Read one split, tokenised with the chat template.  Raises DataError."""
    manifest = _read_manifest(out_dir)
    path = out_dir / f"{split}.jsonl"
    if manifest is None or not path.is_file():
        raise DataError(f"{out_dir} holds no data set; run 'tlt prepare CONFIG' first")
    prompts = []
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        text = row["prompt"] + manifest.config["instruction"]
        tokens = encode_prompt(tokenizer, text, system_prompt=manifest.config["system_prompt"])
        prompts.append(
            Prompt(
                id=row["id"],
                tokens=torch.tensor(tokens, dtype=torch.int32),
                text=row["prompt"],
                answer=row["answer"],
                task=row["task"],
                metadata=row["metadata"],
            )
        )
    return prompts


def encode_prompt(tokenizer: Any, text: str, *, system_prompt: str) -> list[int]:
    """Token ids of one user message, ready for the answer.

    The system message is always given, empty or not: some chat templates would put a default of their own there.
    A tokenizer without a chat template gets the bare text.
    """
    if not tokenizer.chat_template:
        return tokenizer.encode(f"{system_prompt}\n{text}\n" if system_prompt else f"{text}\n")
    messages = [{"role": "system", "content": system_prompt}, {"role": "user", "content": text}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


def gym_items(cfg: GymData, *, count: int, first_index: int, exclude: set[str]) -> list[Item]:
    """`count` distinct questions of the mixture, none of them in `exclude`, from items first_index onwards."""
    total_weight = sum(t.weight for t in cfg.tasks)
    shares = [int(count * t.weight / total_weight) for t in cfg.tasks]
    for position in range(count - sum(shares)):
        shares[position % len(shares)] += 1
    seen, items = set(exclude), []
    for number, share in enumerate(shares):
        found = 0
        for item in _gym_stream(cfg, number, first_index=first_index, limit=max(share, 1) * _MAX_TRIES):
            if found == share:
                break
            if item.question not in seen:
                seen.add(item.question)
                items.append(item)
                found += 1
        if found < share:
            task = cfg.tasks[number]
            raise DataError(
                f"task {task.name!r} with config={task.config} has only {found} distinct questions where {share} are "
                "wanted; widen its settings, lower its weight, or lower the number of prompts"
            )
    return items


def _gym_stream(cfg: GymData, number: int, *, first_index: int, limit: int) -> Iterator[Item]:
    import reasoning_gym

    task = cfg.tasks[number]
    seed = (cfg.seed * len(cfg.tasks) + number) * _TASK_STRIDE % 2**31 + first_index
    try:
        dataset = reasoning_gym.create_dataset(task.name, seed=seed, size=limit, **task.config)
    except (ValueError, TypeError, AssertionError, KeyError) as error:
        raise DataError(
            f"reasoning-gym cannot make task {task.name!r} with config={task.config}: {error}; see its documentation "
            "for names and settings"
        ) from None
    for index in range(limit):
        entry = dataset[index]
        if entry["answer"] is not None:
            metadata = {**entry["metadata"], "mixture": number}
            yield Item(task.name, entry["question"], str(entry["answer"]), metadata)


def _gym_splits(cfg: GymData) -> tuple[list[Item], list[Item], str]:
    order = random.Random(cfg.seed)
    validation = gym_items(cfg, count=cfg.num_validation, first_index=0, exclude=set())
    train = gym_items(cfg, count=cfg.num_train, first_index=1_000_000, exclude={i.question for i in validation})
    order.shuffle(validation)
    order.shuffle(train)
    return train, validation, f"reasoning-gym {importlib.metadata.version('reasoning-gym')}"


def _file_splits(cfg: FileData) -> tuple[list[Item], list[Item], str]:
    train = _read_file(Path(cfg.train_path), cfg)
    generator = f"{cfg.train_path} sha256 {hashlib.sha256(Path(cfg.train_path).read_bytes()).hexdigest()}"
    if cfg.validation_path:
        validation = _read_file(Path(cfg.validation_path), cfg)
        held = {i.question for i in validation}
        return [i for i in train if i.question not in held], validation, generator
    questions = sorted({i.question for i in train})
    if len(questions) < 2:
        raise DataError(f"{cfg.train_path} has fewer than two distinct prompts: nothing can be held back")
    random.Random(cfg.seed).shuffle(questions)
    held = set(questions[: max(1, round(len(questions) * cfg.validation_fraction))])
    return [i for i in train if i.question not in held], [i for i in train if i.question in held], generator


def _read_file(path: Path, cfg: FileData) -> list[Item]:
    if not path.is_file():
        raise DataError(f"data file {path} does not exist; data.train_path wants a .jsonl or .parquet file")
    if path.suffix == ".jsonl":
        rows = _jsonl_rows(path)
    elif path.suffix == ".parquet":
        rows = _parquet_rows(path)
    else:
        raise DataError(f"data file {path} is neither .jsonl nor .parquet; convert it")
    items = []
    for where, row in rows:
        for key in (cfg.prompt_key, cfg.answer_key):
            if not isinstance(row, dict) or row.get(key) in (None, ""):
                raise DataError(f"{where}: no {key!r}; set data.prompt_key and data.answer_key to its columns")
        metadata = {k: v for k, v in row.items() if k not in (cfg.prompt_key, cfg.answer_key)}
        items.append(Item("file", str(row[cfg.prompt_key]), str(row[cfg.answer_key]), metadata))
    if not items:
        raise DataError(f"data file {path} has no rows")
    return items


def _jsonl_rows(path: Path) -> Iterator[tuple[str, Any]]:
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                yield f"{path}, line {number}", json.loads(line)
            except json.JSONDecodeError as error:
                raise DataError(
                    f"{path}, line {number}: not JSON ({error.msg} at column {error.colno}); each line must be one "
                    "JSON object"
                ) from None


def _parquet_rows(path: Path) -> Iterator[tuple[str, Any]]:
    import pyarrow
    import pyarrow.parquet

    try:
        rows = pyarrow.parquet.read_table(path).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path} cannot be read as Parquet ({error})") from None
    return ((f"{path}, row {number}", row) for number, row in enumerate(rows, start=1))


def _encode(tokenizer: Any, item: Item, cfg: DataConfig) -> list[int]:
    return encode_prompt(tokenizer, item.question + cfg.instruction, system_prompt=cfg.system_prompt)


def _write_rows(path: Path, items: list[Item], *, first_id: int) -> None:
    with path.open("w", encoding="utf-8") as file:
        for number, item in enumerate(items, start=first_id):
            row = {"id": number, "task": item.task, "prompt": item.question, "answer": item.answer}
            file.write(json.dumps(row | {"metadata": item.metadata}, ensure_ascii=False, default=str) + "\n")


def _read_manifest(out_dir: Path) -> DataManifest | None:
    try:
        return DataManifest(**json.loads((out_dir / "manifest.json").read_text()))
    except (OSError, json.JSONDecodeError, TypeError):
        return None


def _matches(manifest: DataManifest, cfg: DataConfig, max_prompt_tokens: int, out_dir: Path) -> bool:
    """Made from this configuration, and not touched since?"""
    if manifest.config != cfg.model_dump(mode="json") or manifest.max_prompt_tokens != max_prompt_tokens:
        return False
    if isinstance(cfg, FileData) and not manifest.generator.endswith(_digest(Path(cfg.train_path))):
        return False
    return all(_digest(out_dir / name) == digest for name, digest in manifest.sha256.items())


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
