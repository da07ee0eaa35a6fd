"""Data sets of prompts with verifiable answers.

    reasoning-gym mixture, or a JSONL/Parquet file  ->  train.jsonl, validation.jsonl, manifest.json

The same `data` section gives the same bytes.  No question is in both splits, and ids are unique over both.
"""

import hashlib
import json
from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from pydantic import TypeAdapter, ValidationError

from conf.data import DataConfig, FileData, GymData
from tlt_core.data import file_questions, gym_questions, row_files
from tlt_core.data.chat import check_variables, encode_question, require_embedded
from tlt_core.data.question import DataError, Question
from tlt_core.data.response_text import opening
from tlt_core.items.store import StoreError, read_json, sha256_of, write_folder_atomically
from tlt_core.items.types import Prompt


@dataclass(frozen=True, slots=True)
class DataManifest:
    """What a data set holds and where it came from: `manifest.json`."""

    digest: str  # sha256 over the configuration section and both files
    config: dict[str, Any]  # the `data` section
    generator: str  # e.g. "reasoning-gym 0.1.25", or the source files with their sha256
    tokenizer: str  # digest of what decides which tokens a text becomes, and whether the model knows them
    max_prompt_tokens: int
    longest_prompt: int  # tokens, over both splits
    counts: dict[str, int]  # per split
    tasks: dict[str, int]  # training prompts per task
    dropped_long: int  # prompts with more than max_prompt_tokens tokens
    sha256: dict[str, str]  # per file


_SHOWN = 60  # characters of a question, in messages
_MANIFEST, _SECTION = TypeAdapter(DataManifest), TypeAdapter[DataConfig](DataConfig)


def prepare(
    cfg: DataConfig,
    *,
    tokenizer: Any,
    vocab_size: int,
    max_prompt_tokens: int,
    out_dir: Path,
    alone: AbstractContextManager[None] | None = None,
) -> DataManifest:
    """Make the data set, unless it is there already.  Raises DataError, and StoreError where the disk refuses.

    vocab_size: tokens that the model's embedding has.  alone: entered to make it, where another process may want the
    same; it waits for that one.
    """
    encoder = _Encoder(tokenizer, vocab_size, cfg)
    existing = _existing(cfg, encoder, max_prompt_tokens, out_dir)
    if existing is not None:
        return existing
    with alone or nullcontext():
        made = _existing(cfg, encoder, max_prompt_tokens, out_dir)  # perhaps by the process that was waited for
        return made or _make(cfg, encoder, max_prompt_tokens=max_prompt_tokens, out_dir=out_dir)


class _Encoder(NamedTuple):
    """How the run's model reads a question."""

    tokenizer: Any
    vocab_size: int
    cfg: DataConfig

    def digest(self) -> str:
        """Changes when a token or the chat template does: a model's folder may be edited in place."""
        known = [sorted(self.tokenizer.get_vocab().items()), self.tokenizer.chat_template, self.vocab_size]
        return hashlib.sha256(json.dumps(known).encode()).hexdigest()

    def length(self, item: Question) -> int:
        tokens = encode_question(self.tokenizer, item.question, self.cfg, item.metadata)
        where = f"the prompt {item.question[:_SHOWN]!r}"
        require_embedded(tokens, self.tokenizer, vocab_size=self.vocab_size, where=where)
        return len(tokens)


def _make(cfg: DataConfig, encoder: _Encoder, *, max_prompt_tokens: int, out_dir: Path) -> DataManifest:
    check_variables(encoder.tokenizer, cfg.chat_template_kwargs, setting="data.chat_template_kwargs")
    train, validation = gym_questions.splits(cfg) if isinstance(cfg, GymData) else file_questions.splits(cfg)
    measured = [[(item, encoder.length(item)) for item in split] for split in (validation, train)]
    fitting = [[(item, length) for item, length in split if length <= max_prompt_tokens] for split in measured]
    kept = [[item for item, _ in split] for split in fitting]
    if not all(kept):
        raise DataError(
            f"all prompts of a split are longer than rollout.max_prompt_tokens={max_prompt_tokens}; raise it or use "
            "shorter prompts"
        )

    def write(folder: Path) -> None:
        _write_rows(folder / "validation.jsonl", kept[0], first_id=0)
        _write_rows(folder / "train.jsonl", kept[1], first_id=len(kept[0]))
        sha256 = {p.name: sha256_of(p) for p in sorted(folder.iterdir())}
        config = cfg.model_dump(mode="json")
        manifest = DataManifest(
            digest=hashlib.sha256(json.dumps([config, sha256], sort_keys=True).encode()).hexdigest(),
            config=config,
            generator=gym_questions.generator() if isinstance(cfg, GymData) else file_questions.source(cfg),
            tokenizer=encoder.digest(),
            max_prompt_tokens=max_prompt_tokens,
            longest_prompt=max(length for split in fitting for _, length in split),
            counts={"train": len(kept[1]), "validation": len(kept[0])},
            tasks=dict(sorted(Counter(i.task for i in kept[1]).items())),
            dropped_long=sum(map(len, measured)) - sum(map(len, kept)),
            sha256=sha256,
        )
        (folder / "manifest.json").write_text(json.dumps(asdict(manifest), indent=1, sort_keys=True))

    write_folder_atomically(out_dir, write)
    return read_manifest(out_dir)


def load(out_dir: Path, split: Literal["train", "validation"], tokenizer: Any) -> list[Prompt]:
    """Read one split, tokenised with the chat template.  Raises DataError."""
    manifest, path = read_manifest(out_dir), out_dir / f"{split}.jsonl"
    if not path.is_file():
        raise DataError(f"{out_dir} holds no {split} prompts; 'tlt prepare CONFIG' makes them")
    if sha256_of(path) != manifest.sha256.get(path.name):
        raise DataError(f"{path} has changed since it was made; 'tlt prepare CONFIG' makes it again")
    cfg, prompts = _SECTION.validate_python(manifest.config), []
    for _, row in row_files.jsonl_rows(path, deepest=1 + row_files.DEEPEST):  # metadata is a level
        tokens = encode_question(tokenizer, row["prompt"], cfg, row["metadata"])
        tokens_P, asked = torch.tensor(tokens, dtype=torch.int32), (row["prompt"], row["answer"], row["task"])
        prompts.append(Prompt(row["id"], tokens_P, *asked, row["metadata"], opening(tokenizer, tokens)))
    return prompts


def _write_rows(path: Path, items: list[Question], *, first_id: int) -> None:
    with path.open("w", encoding="utf-8") as file:
        for number, item in enumerate(items, start=first_id):
            row = {"id": number, "task": item.task, "prompt": item.question, "answer": item.answer}
            file.write(json.dumps(row | {"metadata": item.metadata}, ensure_ascii=False, default=str) + "\n")


def read_manifest(out_dir: Path) -> DataManifest:
    """What the data set says of itself.  Raises DataError where there is none, or a damaged one."""
    remedy = "'tlt prepare CONFIG' makes the data set"
    try:
        manifest = _MANIFEST.validate_python(read_json(out_dir / "manifest.json", remedy=remedy))
        _SECTION.validate_python(manifest.config)
    except StoreError as error:
        raise DataError(f"{out_dir} holds no data set: {error}") from None
    except ValidationError as error:
        where, why = error.errors()[0]["loc"], error.errors()[0]["msg"]
        key = ascii(".".join(map(str, where)))[1:-1] or "config"  # a key may hold a line break
        raise DataError(f"{out_dir} holds no data set: manifest.json, {key}: {why}; {remedy}") from None
    return manifest


def _existing(cfg: DataConfig, encoder: _Encoder, max_prompt_tokens: int, out_dir: Path) -> DataManifest | None:
    """The data set that is there, if it was made from this configuration and has not changed since."""
    try:
        manifest = read_manifest(out_dir)
    except DataError:  # missing or damaged: it is made
        return None
    if manifest.config != cfg.model_dump(mode="json") or manifest.max_prompt_tokens != max_prompt_tokens:
        return None
    if manifest.tokenizer != encoder.digest():
        return None
    if isinstance(cfg, FileData) and manifest.generator != file_questions.source(cfg):
        return None
    paths = {out_dir / name: digest for name, digest in manifest.sha256.items()}
    same = all(path.is_file() and sha256_of(path) == digest for path, digest in paths.items())
    return manifest if same else None
