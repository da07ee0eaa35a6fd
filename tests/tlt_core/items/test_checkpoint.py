"""A checkpoint is whole or it is not used."""

import json
import math
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.tlt_core.items.killed import killed_before
from tlt_core.items import checkpoint
from tlt_core.items.checkpoint import CheckpointError, DriverState


def state(step: int, best: float | None = None) -> DriverState:
    return DriverState(
        step=step,
        data_cursor=8 * step,
        policy_version=step,
        tracker_run_id="r",
        resume_attempt=0,
        fingerprint="f",
        best_metric=best,
    )


def write_part(folder):
    (folder / "rank_0").mkdir()
    (folder / "rank_0" / "weights.bin").write_bytes(b"x" * 1000)


def test_everything_is_on_the_disk_before_the_checkpoint_has_its_name(tmp_path, monkeypatch):
    """A power cut keeps what was flushed: the files, their folders, and last the renamed folder's own entry."""
    happened = []
    fsync, rename = os.fsync, Path.rename

    def flush(handle):
        happened.append(Path(f"/proc/self/fd/{handle}").readlink())
        fsync(handle)

    def move(path, target):
        happened.append("renamed")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", flush)
    monkeypatch.setattr(Path, "rename", move)
    checkpoint.save(tmp_path, state(3), write_part)
    partial = tmp_path / ".partial-step_000003"
    at = happened.index("renamed")
    parts = ("state.json", "rank_0", "rank_0/weights.bin", "COMPLETE")
    assert set(happened[:at]) == {partial, *(partial / name for name in parts)}
    assert happened.index(partial / "COMPLETE") > happened.index(partial / "rank_0" / "weights.bin")
    assert happened[at + 1 :] == [tmp_path]


def flip_a_byte(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def leave_out_of_marker(folder, name):
    marker = json.loads((folder / "COMPLETE").read_text())
    del marker["files"][name]
    (folder / "COMPLETE").write_text(json.dumps(marker))


DAMAGE = {
    "no marker": lambda folder: (folder / "COMPLETE").unlink(),
    "empty marker": lambda folder: (folder / "COMPLETE").write_text("{}"),
    "marker of another kind": lambda folder: (folder / "COMPLETE").write_text('{"files": [1]}'),
    "marker without the state": lambda folder: leave_out_of_marker(folder, "state.json"),
    "marker not UTF-8": lambda folder: (folder / "COMPLETE").write_bytes(b"\xff\xfe{}"),
    "truncated": lambda folder: (folder / "rank_0" / "weights.bin").write_bytes(b"x" * 10),
    "missing": lambda folder: (folder / "rank_0" / "weights.bin").unlink(),
    "flipped byte": lambda folder: flip_a_byte(folder / "rank_0" / "weights.bin"),
    "flipped byte of the state": lambda folder: flip_a_byte(folder / "state.json"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_checkpoints_are_skipped(tmp_path, damage, caplog):
    older = checkpoint.save(tmp_path, state(1), write_part)
    newer = checkpoint.save(tmp_path, state(2), write_part)
    DAMAGE[damage](newer)
    assert checkpoint.newest_valid(tmp_path) == older
    assert str(newer) in caplog.text


def test_a_killed_save_leaves_the_older_one(tmp_path):
    """What a kill -9 leaves is a partial folder: never picked up, and cleaned by the next save."""
    older = checkpoint.save(tmp_path, state(1), write_part)
    shutil.copytree(older, tmp_path / ".partial-step_000002")
    assert checkpoint.newest_valid(tmp_path) == older
    assert checkpoint.load_state(checkpoint.save(tmp_path, state(2, best=0.5), write_part)) == state(2, best=0.5)
    assert not list(tmp_path.glob(".partial*"))


def test_a_checkpoint_that_is_written_again_is_there_after_a_kill_at_any_moment(tmp_path):
    """It may be the only one."""
    checkpoint.save(tmp_path, state(2, best=0.0), write_part)
    seen, number = [], 0
    while killed_before(number, lambda: checkpoint.save(tmp_path, state(2, best=1.0), write_part)):
        seen.append(checkpoint.load_state(checkpoint.newest_valid(tmp_path)).best_metric)
        number += 1
    assert {0.0, 1.0} == set(seen)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_000002"]


def test_full_disk_leaves_nothing_behind(tmp_path):
    checkpoint.save(tmp_path, state(1), write_part)

    def full_disk(folder):
        write_part(folder)
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        checkpoint.save(tmp_path, state(2), full_disk)
    assert [p.name for p in tmp_path.iterdir()] == ["step_000001"]


@pytest.mark.parametrize(
    ("metrics", "keep_last", "keep_best", "kept"),
    [
        ({1: 0.1, 2: 0.9, 3: None, 4: 0.3, 5: 0.2}, 2, 1, [2, 4, 5]),
        ({1: None, 2: 0.9, 3: 0.3, 4: 0.5, 5: None, 6: None, 7: 0.1, 8: 0.2}, 1, 3, [2, 3, 4, 8]),
        ({1: None, 2: 0.9, 3: 0.3, 4: 0.5, 5: None, 6: None, 7: None, 8: None}, 1, 3, [2, 3, 4, 8]),
        ({1: 0.1, 2: 0.2, 3: None, 4: None}, 1, 3, [1, 2, 4]),  # fewer are ranked than are kept
        ({1: 0.1, 2: math.nan, 3: None}, 1, 1, [1, 3]),
        ({1: 0.1, 2: 0.2, 3: None}, 1, 0, [3]),
    ],
)
def test_prune_keeps_newest_and_best(tmp_path, metrics, keep_last, keep_best, kept):
    for each_time in (True, False):  # a run prunes after every step; a longer `keep_last` may have left many
        root = tmp_path / str(each_time)
        for step, best in metrics.items():
            checkpoint.save(root, state(step, best), write_part)
            if each_time or step == len(metrics):
                checkpoint.prune(root, keep_last=keep_last, keep_best=keep_best)
        assert sorted(p.name for p in root.glob("step_*")) == [f"step_{step:06d}" for step in kept]


READ = """
import sys, time
from pathlib import Path
from tlt_core.items import checkpoint
with checkpoint.newest(Path(sys.argv[1])) as found:
    print(found.state.step, flush=True)
    time.sleep(60)
"""


def test_what_another_process_reads_is_not_pruned_until_it_ends(tmp_path):
    """Two readers at once; one ends by itself, the other is killed."""

    def steps():
        return sorted(int(p.name.removeprefix("step_")) for p in tmp_path.glob("step_*"))

    def go_on(step):
        checkpoint.save(tmp_path, state(step), write_part)
        checkpoint.prune(tmp_path, keep_last=1, keep_best=0)

    go_on(1)
    command = [sys.executable, "-c", READ, str(tmp_path)]
    readers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    try:
        assert [reader.stdout.readline() for reader in readers] == ["1\n", "1\n"]
        go_on(2)
        go_on(3)
        assert steps() == [1, 3]
        readers[0].terminate()
        readers[0].wait()
        go_on(4)
        assert steps() == [1, 4]
    finally:
        for reader in readers:
            reader.kill()
            reader.wait()
    go_on(5)
    assert steps() == [5]


def test_a_reader_that_comes_too_late_for_one_takes_the_newer_one(tmp_path, monkeypatch):
    """Between its look at the folder and its lock a run may have written and pruned."""
    shutil.rmtree(checkpoint.save(tmp_path, state(1), write_part) / "rank_0")
    monkeypatch.setattr(checkpoint.log, "warning", lambda *_: checkpoint.save(tmp_path, state(2), write_part))
    with checkpoint.newest(tmp_path) as found:
        assert found is not None
        assert found.state.step == 2


def test_unreadable_state_names_the_folder(tmp_path):
    folder = checkpoint.save(tmp_path, state(1), write_part)
    (folder / "state.json").write_text(json.dumps({"step": 1}))
    with pytest.raises(CheckpointError, match="step_000001"):
        checkpoint.load_state(folder)


def test_a_nan_written_into_a_weight_is_found(tmp_path):
    def write_weights(folder):
        save_file({"w": torch.ones(1000)}, folder / "trainer.safetensors")

    older = checkpoint.save(tmp_path, state(1), write_weights)
    newer = checkpoint.save(tmp_path, state(2), write_weights)
    assert checkpoint.newest_valid(tmp_path) == newer
    with (newer / "trainer.safetensors").open("r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(struct.pack("<f", math.nan))
    assert checkpoint.newest_valid(tmp_path) == older
