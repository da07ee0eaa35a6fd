"""A checkpoint is whole or it is not used."""

import json
import shutil

import pytest

from tlt_core import checkpoint
from tlt_core.checkpoint import CheckpointError, DriverState


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


def test_round_trip(tmp_path):
    folder = checkpoint.save(tmp_path, state(3), write_part)
    assert checkpoint.newest_valid(tmp_path) == folder
    assert checkpoint.load_state(folder) == state(3)
    assert (folder / "rank_0" / "weights.bin").stat().st_size == 1000


@pytest.mark.parametrize("damage", ["marker", "truncated", "missing"])
def test_damaged_checkpoints_are_skipped(tmp_path, damage, caplog):
    older = checkpoint.save(tmp_path, state(1), write_part)
    newer = checkpoint.save(tmp_path, state(2), write_part)
    part = newer / "rank_0" / "weights.bin"
    if damage == "marker":
        (newer / "COMPLETE").unlink()
    elif damage == "truncated":
        part.write_bytes(b"x" * 10)
    else:
        part.unlink()
    assert checkpoint.newest_valid(tmp_path) == older
    assert str(newer) in caplog.text


def test_a_killed_save_leaves_the_older_one(tmp_path):
    """What a kill -9 leaves is a partial folder: never picked up, and cleaned by the next save."""
    older = checkpoint.save(tmp_path, state(1), write_part)
    shutil.copytree(older, tmp_path / ".partial-step_000002")
    assert checkpoint.newest_valid(tmp_path) == older
    assert checkpoint.load_state(checkpoint.save(tmp_path, state(2), write_part)).step == 2
    assert not list(tmp_path.glob(".partial*"))


def test_full_disk_leaves_nothing_behind(tmp_path):
    checkpoint.save(tmp_path, state(1), write_part)

    def full_disk(folder):
        write_part(folder)
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        checkpoint.save(tmp_path, state(2), full_disk)
    assert [p.name for p in tmp_path.iterdir()] == ["step_000001"]


def test_prune_keeps_newest_and_best(tmp_path):
    for step, best in [(1, 0.1), (2, 0.9), (3, None), (4, 0.3), (5, 0.2)]:
        checkpoint.save(tmp_path, state(step, best), write_part)
    checkpoint.prune(tmp_path, keep_last=2, keep_best=1)
    assert sorted(p.name for p in tmp_path.glob("step_*")) == ["step_000002", "step_000004", "step_000005"]


def test_unreadable_state_names_the_folder(tmp_path):
    folder = checkpoint.save(tmp_path, state(1), write_part)
    (folder / "state.json").write_text(json.dumps({"step": 1}))
    with pytest.raises(CheckpointError, match="step_000001"):
        checkpoint.load_state(folder)
