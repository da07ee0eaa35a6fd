"""Background writes are whole or absent, in order, and their failures are not lost."""

import subprocess
import sys
import threading
import weakref
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tlt_core.idle_training.checkpoint import (
    IdleTrainingCheckpointError,
    TrainingCheckpoint,
    async_checkpoint,
    load_checkpoint,
)
from tlt_core.idle_training.writer import BackgroundWriter


@pytest.fixture
def writer():
    writer = BackgroundWriter()
    yield writer
    writer.close()


def text(content: str):
    return lambda path: path.write_text(content)


class Gate:
    """A write that holds the thread until it is opened."""

    def __init__(self) -> None:
        self.entered, self.opened = threading.Event(), threading.Event()

    def __call__(self, path: Path) -> None:
        self.entered.set()
        assert self.opened.wait(30)
        path.write_text("gate")


def test_submit_returns_before_the_file_is_there(tmp_path, writer):
    gate, target = Gate(), tmp_path / "new" / "a"
    job = writer.submit(target, gate)
    assert gate.entered.wait(30)
    assert not job.done
    assert not target.exists()
    gate.opened.set()
    writer.wait()
    assert job.done
    assert job.error is None
    assert [p.name for p in target.parent.iterdir()] == ["a"]


def test_jobs_run_in_order_and_a_waiting_one_gives_way(tmp_path, writer):
    """Of one target, the newest snapshot alone waits; it comes after all that were submitted before it."""
    gate, written = Gate(), []

    def note(name):
        def write(path):
            written.append(name)
            path.write_text(name)

        return write

    first = writer.submit(tmp_path / "a", gate)
    assert gate.entered.wait(30)
    stale = writer.submit(tmp_path / "a", note("a, stale"))
    writer.submit(tmp_path / "b", note("b"))
    newest = writer.submit(tmp_path / "a", note("a, newest"))
    assert stale.done
    assert not first.done
    assert not newest.done
    gate.opened.set()
    writer.wait()
    assert written == ["b", "a, newest"]
    assert (tmp_path / "a").read_text() == "a, newest"


def test_snapshots_are_freed_when_written(tmp_path, writer):
    class Snapshot:
        def __call__(self, path):
            path.write_text("x")

    snapshot = Snapshot()
    gone = weakref.ref(snapshot)
    job = writer.submit(tmp_path / "a", snapshot)
    del snapshot
    writer.wait()
    job.wait()
    assert gone() is None


def fail(path: Path) -> None:
    path.write_text("half")
    raise OSError(28, "No space left on device")


def test_a_failure_is_the_jobs_and_the_file_before_stays(tmp_path, writer):
    target = tmp_path / "a"
    target.write_text("previous")
    job = writer.submit(target, fail)
    writer.wait()
    assert "No space left" in str(job.error)
    assert target.read_text() == "previous"
    assert [p.name for p in tmp_path.iterdir()] == ["a"]
    writer.submit(target, text("next"))
    writer.wait()
    assert target.read_text() == "next"


def test_a_state_that_cannot_be_saved_is_said(tmp_path, caplog):
    (tmp_path / "idle_training").write_text("in the way of the folder")
    checkpoint = TrainingCheckpoint(tmp_path / "idle_training", BackgroundWriter())
    checkpoint.save({}, trainer={"w": torch.zeros(3)})
    checkpoint.close()
    assert str(tmp_path / "idle_training" / "training.safetensors") in caplog.text
    assert "Free disk space" in caplog.text


KILLED = """
import os, sys
from pathlib import Path
import torch
from safetensors.torch import save
from tlt_core.idle_training.checkpoint import async_checkpoint
from tlt_core.idle_training.writer import BackgroundWriter

folder, writer = Path(sys.argv[1]), BackgroundWriter()
async_checkpoint(writer, folder / "state", {"w": torch.full((1000,), 1.0)}, {"generation": 1})
writer.wait()

def die_half_way(path):
    data = save({"w": torch.full((1000,), 2.0)})
    with path.open("wb") as file:
        file.write(data[: len(data) // 2])
        file.flush()
        os.fsync(file.fileno())
        os._exit(9)

writer.submit(folder / "first", die_half_way if sys.argv[2] == "first" else lambda path: path.write_text("1"))
writer.submit(folder / "state", die_half_way)
writer.wait()
"""


@pytest.mark.parametrize("dies_in", ["state", "first"])
def test_a_kill_in_the_middle_leaves_the_previous_file(tmp_path, dies_in):
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), dies_in], cwd=Path.cwd(), check=False)
    assert killed.returncode == 9
    final = {p.name for p in tmp_path.iterdir() if not p.name.startswith(".")}
    assert final == ({"state"} if dies_in == "first" else {"state", "first"})
    tensors, values = load_checkpoint(tmp_path / "state")
    assert values == {"generation": 1}
    assert torch.equal(tensors["w"], torch.full((1000,), 1.0))
    (partial,) = (p for p in tmp_path.iterdir() if p.name.startswith("."))  # what the kill left
    assert 1000 < partial.stat().st_size < 4000
    after = BackgroundWriter()
    async_checkpoint(after, tmp_path / dies_in, {"w": torch.full((1000,), 3.0)}, {"generation": 3})
    after.close()
    assert load_checkpoint(tmp_path / dies_in).values == {"generation": 3}
    assert {p.name for p in tmp_path.iterdir()} == final | {dies_in}  # the partial file went


def test_checkpoint_holds_what_it_was_given(tmp_path, writer):
    model = torch.nn.Linear(7, 3, bias=True).requires_grad_(True)
    tensors = {
        "weight": model.weight.detach().clone(),
        "transposed": model.weight.detach().clone().T,  # not contiguous
        "half": model.bias.detach().to(torch.bfloat16),
        "steps": torch.tensor(12),
    }
    values = {
        "step": 12,
        "sampler": {"now": 0.1 + 0.2, "flows": {"0.1.2.3": [5, 1, 1e-300, 0]}},
        "buffer": {"files": []},
    }
    async_checkpoint(writer, tmp_path / "idle_training.safetensors", tensors, values)
    values["step"] = 13  # taken when it was submitted
    writer.wait()
    saved = load_checkpoint(tmp_path / "idle_training.safetensors")
    assert saved.values == {**values, "step": 12}
    assert saved.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert saved.tensors[name].dtype == tensor.dtype
        assert torch.equal(saved.tensors[name], tensor)


@pytest.mark.parametrize("damage", ["missing", "truncated", "foreign"])
def test_a_damaged_checkpoint_is_named(tmp_path, writer, damage):
    path = tmp_path / "idle_training.safetensors"
    async_checkpoint(writer, path, {"w": torch.zeros(9)}, {})
    writer.wait()
    if damage == "missing":
        path.unlink()
    elif damage == "truncated":
        path.write_bytes(path.read_bytes()[:-1])
    else:
        save_file({"w": torch.zeros(9)}, path)
    with pytest.raises(IdleTrainingCheckpointError, match=r"idle_training.safetensors cannot be read .*; remove it"):
        load_checkpoint(path)
