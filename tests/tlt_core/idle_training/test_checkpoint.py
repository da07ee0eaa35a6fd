"""The checkpoint of idle training is whole or absent, written in the background, and its failures are not lost."""

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tlt_core.idle_training.checkpoint import IdleTrainingCheckpointError, TrainingCheckpoint, load_checkpoint

NAME = "training.safetensors"


@pytest.fixture
def checkpoint(tmp_path):
    checkpoint = TrainingCheckpoint(tmp_path, ThreadPoolExecutor(max_workers=1))
    yield checkpoint
    checkpoint.close()


def test_it_holds_what_it_was_given(tmp_path, checkpoint):
    model = torch.nn.Linear(7, 3, bias=True).requires_grad_(True)
    tensors = {
        "transposed": model.weight.detach().clone().T,  # not contiguous
        "half": model.bias.detach().to(torch.bfloat16),
        "steps": torch.tensor(12),
    }
    values = {"step": 12, "sampler": {"now": 0.1 + 0.2, "flows": {"0.1.2.3": [5, 1, 1e-300, 0]}}}
    checkpoint.save(values, trainer=tensors, heads={})
    values["step"] = 13  # taken when it was submitted
    checkpoint.close()
    saved = checkpoint.load()
    assert saved.values == {**values, "step": 12}
    found = saved.part("trainer")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)
    assert [p.name for p in tmp_path.iterdir()] == [NAME]


def test_of_several_that_wait_the_newest_alone_is_written(tmp_path, checkpoint, monkeypatch):
    gate, written = threading.Event(), []
    writer = ThreadPoolExecutor(max_workers=1)
    writer.submit(gate.wait, 30)
    saving = TrainingCheckpoint(tmp_path, writer)
    monkeypatch.setattr(
        "tlt_core.idle_training.checkpoint.save_file", lambda *a, metadata: (written.append(metadata), save_file(*a))
    )
    for step in (1, 2, 3):
        saving.save({"step": step}, trainer={"w": torch.zeros(3)})
    assert not (tmp_path / NAME).exists(), "nobody waits for the disk"
    gate.set()
    saving.close()
    assert written == [{"values": '{"step": 3}'}]


def test_a_state_that_cannot_be_saved_is_said(tmp_path, caplog):
    (tmp_path / "idle_training").write_text("in the way of the folder")
    checkpoint = TrainingCheckpoint(tmp_path / "idle_training", ThreadPoolExecutor(max_workers=1))
    checkpoint.save({}, trainer={"w": torch.zeros(3)})
    checkpoint.close()
    assert str(tmp_path / "idle_training" / NAME) in caplog.text


KILLED = """
import os, sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
import torch
from safetensors.torch import save
from tlt_core.idle_training import checkpoint

writer = ThreadPoolExecutor(max_workers=1)
saving = checkpoint.TrainingCheckpoint(Path(sys.argv[1]), writer)
saving.save({"generation": 1}, trainer={"w": torch.full((1000,), 1.0)})
writer.submit(int).result()

def die_half_way(tensors, path, metadata):
    data = save(tensors)
    with path.open("wb") as file:
        file.write(data[: len(data) // 2])
        file.flush()
        os.fsync(file.fileno())
        os._exit(9)

checkpoint.save_file = die_half_way
saving.save({"generation": 2}, trainer={"w": torch.full((1000,), 2.0)})
saving.close()
"""


def test_a_kill_in_the_middle_leaves_the_previous_file(tmp_path):
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], cwd=Path.cwd(), check=False)
    assert killed.returncode == 9
    tensors, values = load_checkpoint(tmp_path / NAME)
    assert values == {"generation": 1}
    assert torch.equal(tensors["trainer/w"], torch.full((1000,), 1.0))
    (partial,) = (p for p in tmp_path.iterdir() if p.name.startswith("."))  # what the kill left: the buffer clears it
    assert 1000 < partial.stat().st_size < 4000


@pytest.mark.parametrize("damage", ["missing", "truncated", "foreign"])
def test_a_damaged_checkpoint_is_named(tmp_path, checkpoint, damage):
    path = tmp_path / NAME
    checkpoint.save({}, trainer={"w": torch.zeros(9)})
    checkpoint.close()
    if damage == "missing":
        path.unlink()
    elif damage == "truncated":
        path.write_bytes(path.read_bytes()[:-1])
    else:
        save_file({"w": torch.zeros(9)}, path)
    with pytest.raises(IdleTrainingCheckpointError, match=rf"{NAME} cannot be read .*; remove it"):
        load_checkpoint(path)
    assert checkpoint.load() is None, "training starts anew"
