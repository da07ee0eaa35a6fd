"""Files between the tasks: damage is told with the file and the remedy, and a kill at any moment makes none."""

import errno
import os
from pathlib import Path

import pytest
import torch

from tests.tlt_core.items.killed import killed_before
from tlt_core.items import store
from tlt_core.items.store import StoreError, is_finite, read_json, read_json_lines, write_folder_atomically


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'{"a": 1, "b', "cannot be read as JSON"),
        (b"", "cannot be read as JSON"),
        (b'{"a": "\xff"}', "cannot be read as JSON"),
        (b"[" * 100_000, "cannot be read as JSON"),
        (b"[1]", "must hold a JSON object, found list"),
        (None, "No such file"),
    ],
)
def test_a_damaged_object_is_told_with_the_remedy(tmp_path, content, said):
    path = tmp_path / "x.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(StoreError, match=rf"x\.json.*{said}.*; make it again$"):
        read_json(path, remedy="make it again")


def test_half_a_last_line_is_left_out_and_other_damage_is_told(tmp_path):
    path = tmp_path / "x.jsonl"
    assert read_json_lines(path) == []
    path.write_bytes(b'{"a": 1}\n\n{"a": 2}')
    assert read_json_lines(path) == [{"a": 1}, {"a": 2}]
    path.write_bytes(b'{"a": 1}\n{"a": "\xe2')
    assert read_json_lines(path) == [{"a": 1}]
    for damaged in (b'{"a": \n', b"\xff\n", b"[1]\n", b"[" * 100_000 + b"\n"):
        path.write_bytes(b'{"a": 1}\n' + damaged + b'{"a": 3}\n')
        with pytest.raises(StoreError, match=r"x\.jsonl, line 2: no JSON object .*; remove the line"):
            read_json_lines(path)


def test_a_sum_that_float16_cannot_hold_is_no_damage():
    weights = torch.full((4096,), 30.0, dtype=torch.float16)
    assert is_finite(weights)
    weights[7] = float("inf")
    assert not is_finite(weights)


def write(folder, word):
    for name in ("a.json", "b.json"):
        (folder / name).write_text(word)


def content(folder):
    return {path.name: path.read_text() for path in folder.iterdir()}


@pytest.mark.parametrize("exchanges", [True, False], ids=["exchange", "no exchange"])
def test_a_folder_that_is_replaced_is_there_after_a_kill_at_any_moment(tmp_path, monkeypatch, exchanges):
    """On a file system that cannot exchange names: after the next attempt, even if that fails."""
    if not exchanges:
        monkeypatch.setattr(store, "_exchanged", lambda *_: False)
    out = tmp_path / "policy"
    write_folder_atomically(out, lambda folder: write(folder, "old"))
    old, new = ({**dict.fromkeys(("a.json", "b.json"), word), "kept.dvc": "dvc"} for word in ("old", "new"))
    (out / "kept.dvc").write_text("dvc")
    seen, number = [], 0
    while killed_before(number, lambda: write_folder_atomically(out, lambda f: write(f, "new"), keep=["kept.dvc"])):
        if not exchanges:
            with pytest.raises(StoreError, match="disk is full"):
                write_folder_atomically(out, full_disk)
        seen.append(content(out))
        number += 1
    assert seen[0] == old
    assert seen[-1] == new
    assert all(one in (old, new) for one in seen)
    assert content(out) == new


def test_names_are_on_the_disk_with_the_files(tmp_path, monkeypatch):
    """A power cut keeps what was flushed: content, then names, those of new folders too."""
    flushed = []
    fsync = os.fsync

    def flush(handle):
        flushed.append(Path(f"/proc/self/fd/{handle}").readlink().relative_to(tmp_path).as_posix())
        fsync(handle)

    monkeypatch.setattr(os, "fsync", flush)
    for _ in range(2):
        store.write_atomically(tmp_path / "runs/demo/run.json", lambda partial: partial.write_text("{}"))
    partial = f"runs/demo/.run.json.partial-{os.getpid()}"
    assert flushed == [".", "runs", partial, "runs/demo", partial, "runs/demo"]
    for _ in range(2):
        flushed.clear()
        write_folder_atomically(tmp_path / "exports/demo", lambda folder: write(folder, "x"))
        partial = f"exports/.demo.partial-{os.getpid()}"
        assert set(flushed[:-1]) - {"."} == {partial, f"{partial}/a.json", f"{partial}/b.json"}
        assert flushed[-1] == "exports"


def full_disk(folder):
    raise OSError(errno.ENOSPC, "the disk is full")
