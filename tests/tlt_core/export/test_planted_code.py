"""Code that a stranger plants in any file that is read does not run: pickles, and Python files that a folder names."""

import io
import json
import pickle
import shutil
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from conf.data import FileData
from tests.tasks.scored_batches import scored_batch
from tests.tlt_core.export.conftest import Tiny
from tlt_core.data import dataset, file_questions
from tlt_core.drafter.eagle3.files import load_eagle3
from tlt_core.export.record import weights_digest
from tlt_core.export.verify import verify
from tlt_core.grpo import trainer_files
from tlt_core.idle_training import buffer
from tlt_core.idle_training import checkpoint as idle_training_checkpoint
from tlt_core.items import checkpoint, store
from tlt_core.items.checkpoint import DriverState
from tlt_core.items.train_sequence import TrainSequence
from tlt_core.items.types import NoiseKey
from tlt_core.model.load import check_finite, load_config, load_decoder, load_tokenizer


class Mine:
    """Whoever unpickles it runs the code: it makes a file."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self._mark,)


FORMATS: dict[str, tuple[Callable[[Mine, IO[bytes]], None], Callable[[IO[bytes]], object]]] = {
    "pickle": (pickle.dump, pickle.load),
    "torch": (torch.save, lambda file: torch.load(file, weights_only=False)),
    "numpy": (
        lambda mine, file: np.save(file, np.array([mine], dtype=object), allow_pickle=True),
        lambda file: np.load(file, allow_pickle=True),
    ),
}


def make_checkpoint(tiny: Tiny, exported: Path, out: Path) -> None:
    state = DriverState(1, 8, 1, "r", 0, "f", None)
    checkpoint.save(out, state, lambda partial: trainer_files.write(partial, 0, {"w": torch.ones(3)}))


def read_checkpoint(folder: Path) -> None:
    """Also where an attacker has made the digests anew."""
    checkpoint.newest_valid(folder)
    with suppress(ValueError):  # it may refuse; it may not execute
        checkpoint.load_state(folder / "step_000001")
    dict(trainer_files.SavedState(folder / "step_000001"))


def make_idle_training(tiny: Tiny, exported: Path, out: Path) -> None:
    tensors = {"tokens_L": torch.arange(5, dtype=torch.int32), "taps_LE": torch.zeros(4, 6)}
    tensors |= {"last_PD": torch.zeros(2, 4), "lognorms_P": torch.zeros(2)}
    buffer.write_sequences(out / "sequences", [TrainSequence(NoiseKey(0, 1, 2, 3), 0, 0, 3, **tensors)])
    save_file({"w": torch.ones(2)}, out / "training", metadata={"values": "{}"})


def make_data(tiny: Tiny, exported: Path, out: Path) -> None:
    (out / "rows.jsonl").write_text('{"prompt": "w3", "answer": "w4"}\n' * 8)
    (out / "rows.parquet").write_bytes(b"PAR1")


def read_rows(name: str) -> Callable[[Path], object]:
    return lambda folder: file_questions.splits(FileData(kind="file", train_path=str(folder / name)))


def copy(source: Path | None, out: Path) -> None:
    shutil.copytree(str(source), out, dirs_exist_ok=True)


Make = Callable[[Tiny, Path, Path], object]  # fills a folder; given what is there already: a run, an export
INPUTS: dict[str, tuple[Make, list[Callable[[Path], object]]]] = {  # and how the project reads the folder
    "model": (
        lambda tiny, _, out: copy(tiny.source.policy, out),
        [load_tokenizer, partial(load_decoder, dtype=torch.float32), load_config, check_finite, weights_digest],
    ),
    "drafter": (
        lambda tiny, _, out: copy(tiny.source.drafter, out),
        [lambda folder: load_eagle3(folder, load_config(folder)), check_finite, weights_digest],
    ),
    "export": (lambda _, exported, out: copy(exported, out), [partial(verify, target=None)]),
    "checkpoint": (make_checkpoint, [read_checkpoint]),
    "steps": (
        lambda tiny, _, out: store.save_scored(scored_batch(), out / "scored"),
        [lambda folder: store.load_scored(folder / "scored")],
    ),
    "idle_training": (
        make_idle_training,
        [
            lambda folder: buffer.map_file(folder / "sequences"),
            lambda folder: idle_training_checkpoint.load_checkpoint(folder / "training"),
        ],
    ),
    "data set": (
        lambda tiny, _, out: copy(tiny.source.data_dir, out),
        [lambda folder: dataset.load(folder, "train", None), dataset.read_manifest],
    ),
    "data files": (make_data, [read_rows("rows.jsonl"), read_rows("rows.parquet")]),
}
BESIDE = ("pytorch_model.bin", "optimizer.pt", "training_args.bin", "adapter_model.bin", "tokenizer.pkl", "model.npy")


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("name", INPUTS)
def test_no_pickle_is_read(name: str, kind: str, tiny: Tiny, exported: Path, tmp_path: Path) -> None:
    mark, (make, reads) = tmp_path / "the code has run", INPUTS[name]
    dump, load = FORMATS[kind]
    file = io.BytesIO()
    dump(Mine(mark), file)
    content = file.getvalue()
    sound = tmp_path / "sound"
    sound.mkdir()
    make(tiny, exported, sound)
    names = [path.relative_to(sound) for path in sound.rglob("*") if path.is_file()]
    for number, spoilt in enumerate([*names, None]):
        planted = tmp_path / f"planted-{number}"
        shutil.copytree(sound, planted)
        if spoilt is not None:
            (planted / spoilt).write_bytes(content)
        else:  # beside the others, in place of the weights
            for weights in planted.rglob("*.safetensors"):
                weights.unlink()
            for folder in {planted, *(path.parent for path in planted.rglob("*"))}:
                for other in BESIDE:
                    (folder / other).write_bytes(content)
        for read in reads:
            with suppress(Exception):  # every refusal will do
                read(planted)
            assert not mark.exists(), spoilt
    load(io.BytesIO(content))
    assert mark.exists(), "a reader that unpickles would have been noticed"


@pytest.mark.parametrize("name", ["model", "drafter", "export"])
def test_no_code_of_a_folder_runs(name: str, tiny: Tiny, exported: Path, tmp_path: Path) -> None:
    mark, (make, reads) = tmp_path / "the code has run", INPUTS[name]
    folder = tmp_path / "planted"
    folder.mkdir()
    make(tiny, exported, folder)
    for file in [*folder.rglob("config.json"), *folder.rglob("tokenizer_config.json")]:
        (file.parent / "own_code.py").write_text(f"import pathlib\npathlib.Path({str(mark)!r}).touch()\n")
        classes: dict[str, Any] = {"AutoConfig": "own_code.Config", "AutoModelForCausalLM": "own_code.Model"}
        classes["AutoTokenizer"] = ["own_code.Tokenizer", "own_code.Tokenizer"]
        content = json.loads(file.read_text()) | {"auto_map": classes, "tokenizer_class": "Tokenizer"}
        file.write_text(json.dumps(content))
    for read in reads:
        with suppress(Exception):  # every refusal will do
            read(folder)
        assert not mark.exists()
