"""The buffer keeps its bounds, the right sequences, and every bit of them."""

import dataclasses
import json
import os
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.tlt_core.idle_training.stored import TAPS, bytes_of, digest, make
from tlt_core.idle_training.buffer import SequenceBuffer, held_back, write_sequences
from tlt_core.idle_training.curriculum import PeerFiles

ROOMY = {"max_bytes": 10**9, "max_sequences": 10**6}


@pytest.fixture
def writer():
    with ThreadPoolExecutor(max_workers=1) as writer:
        yield writer


def written(writer):
    """Wait until everything has been written."""
    writer.submit(int).result()


MAPS = Path("/proc/self/maps")
needs_maps = pytest.mark.skipif(not MAPS.exists(), reason="needs Linux's map of the process")


def ids(sequences) -> list[str]:
    return [s.id for s in sequences]


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def digests(buffer: SequenceBuffer) -> dict[str, str]:
    return {s.id: digest(s) for s in buffer.sequences()}


def nbytes(buffer: SequenceBuffer) -> int:
    return sum(s.nbytes for s in buffer.sequences())


@pytest.mark.parametrize(("limits", "writes"), [((30_000, 500), True), ((10**6, 25), True), ((8_000, 12), False)])
def test_bounds_hold_after_every_add(tmp_path, writer, limits, writes):
    max_bytes, max_sequences = limits
    buffer = SequenceBuffer(tmp_path, max_bytes=max_bytes, max_sequences=max_sequences, writer=writer)
    lengths, draw = {}, random.Random(0)
    for step in range(5):
        for prompt in range(30):
            length = draw.randint(5, 60)
            sequence = make(step, prompt, length=length)
            lengths[sequence.id] = length
            assert sequence.nbytes == bytes_of(length)
            buffer.add(sequence)
            kept = ids(buffer.sequences())
            assert len(buffer) == len(kept) <= max_sequences
            assert buffer.tokens == sum(lengths[i] for i in kept)
            assert nbytes(buffer) == sum(bytes_of(lengths[i]) for i in kept) <= max_bytes
        if writes:
            buffer.end_step(step)
    assert digests(buffer) == {i: digest(remade(i, lengths[i])) for i in kept}


@needs_maps
def test_only_the_step_that_comes_in_is_in_memory(tmp_path, writer):
    """And the one that is being written."""
    buffer = SequenceBuffer(tmp_path, **ROOMY, writer=writer)
    for step in range(4):
        for prompt in range(5):
            buffer.add(make(step, prompt, length=500))
            assert bytes_in_memory(buffer) == (prompt + 1 + 5 * (step > 0)) * bytes_of(500)
        written(writer)
        buffer.end_step(step)
    written(writer)
    buffer.index()  # takes notice
    assert bytes_in_memory(buffer) == 0


def bytes_in_memory(buffer: SequenceBuffer) -> int:
    """Of the sequences that are not parts of a mapped file, by the operating system's account."""
    lines = [line for line in MAPS.read_text().splitlines() if "seqs_" in line]
    ranges = [tuple(int(end, 16) for end in line.split()[0].split("-")) for line in lines]
    in_file = [any(a <= s.taps_LE.data_ptr() < b for a, b in ranges) for s in buffer.sequences()]
    return sum(s.nbytes for s, mapped in zip(buffer.sequences(), in_file, strict=True) if not mapped)


def remade(name: str, length: int):
    _, step, prompt, sample, _ = map(int, name.split("."))
    return make(step, prompt, sample, length=length)


def test_turns_of_one_episode_are_kept_apart_on_disk_too(tmp_path, writer):
    buffer = SequenceBuffer(tmp_path, **ROOMY, writer=writer)
    turns = make(1, 0, length=20), make(1, 0, length=40, first=26)
    for turn in turns:
        buffer.add(turn)
    buffer.end_step(1)
    assert digests(buffer) == {turn.id: digest(turn) for turn in turns}
    assert len(buffer) == 2


def test_oldest_steps_go_first_and_the_shortest_of_them(tmp_path, writer):
    buffer = SequenceBuffer(tmp_path, max_bytes=10**9, max_sequences=4, writer=writer)
    for sequence in (
        make(3, 0, length=20),
        make(1, 1, length=9),
        make(1, 2, length=30),
        make(1, 3, length=12),
        make(3, 4, length=10),  # evicts the shortest of step 1
    ):
        buffer.add(sequence)
    assert ids(buffer.sequences()) == ["5.1.2.0.4", "5.1.3.0.4", "5.3.0.0.4", "5.3.4.0.4"]
    buffer.add(make(3, 5, length=11))
    assert ids(buffer.sequences()) == ["5.1.2.0.4", "5.3.0.0.4", "5.3.4.0.4", "5.3.5.0.4"]
    # The longest of the step before stays (one in three of four); what is too short for the bounds never comes in.
    buffer.add(make(3, 6, length=8))
    assert ids(buffer.sequences()) == ["5.1.2.0.4", "5.3.0.0.4", "5.3.4.0.4", "5.3.5.0.4"]
    buffer.add(make(4, 7, length=10))  # of step 3 the longest stays; step 1 is now older than the step before
    assert ids(buffer.sequences()) == ["5.3.0.0.4", "5.3.4.0.4", "5.3.5.0.4", "5.4.7.0.4"]


def test_the_same_response_again_replaces_a_mapped_one(tmp_path, writer):
    buffer = SequenceBuffer(tmp_path, **ROOMY, writer=writer)
    buffer.add(make(1, 0, length=40))
    buffer.add(make(1, 1, length=40))
    for length in (5, 6, 7):
        buffer.end_step(1)
        written(writer)
        buffer.index()  # takes notice
        buffer.add(make(1, 0, length=length))
        assert digests(buffer) == {
            "5.1.0.0.4": digest(make(1, 0, length=length)),
            "5.1.1.0.4": digest(remade("5.1.1.0.4", 40)),
        }
    assert files(tmp_path) == ["seqs_000001.safetensors"]


FRESH = """
import json, sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tests.tlt_core.idle_training.stored import digest
from tlt_core.idle_training.buffer import SequenceBuffer
folder, index = Path(sys.argv[1]), json.loads(sys.argv[2])
buffer = SequenceBuffer(folder, index=index, max_bytes=10**9, max_sequences=1000, writer=ThreadPoolExecutor())
print(json.dumps({s.id: digest(s) for s in buffer.sequences()}))
"""


def test_every_bit_survives_the_disk(tmp_path, writer):
    """Mapped, reopened, and in another process; in bfloat16 and float32."""
    buffer = SequenceBuffer(tmp_path, **ROOMY, writer=writer)
    expected = {}
    for step, dtype in ((1, torch.bfloat16), (2, torch.float32)):
        for prompt in range(6):
            sequence = make(step, prompt, length=7 + 5 * prompt, dtype=dtype)
            expected[sequence.id] = digest(sequence)
            buffer.add(sequence)
        buffer.end_step(step)
    index = json.dumps(buffer.index())
    written(writer)
    assert json.dumps(buffer.index()) == index  # takes notice
    assert digests(buffer) == expected
    reopened = SequenceBuffer(tmp_path, index=json.loads(index), **ROOMY, writer=writer)
    assert nbytes(reopened) == sum(bytes_of(7 + 5 * p, itemsize=i) for p in range(6) for i in (2, 4))
    assert digests(reopened) == expected
    fresh = subprocess.run(
        [sys.executable, "-c", FRESH, str(tmp_path), index], capture_output=True, text=True, check=True, cwd=Path.cwd()
    )
    assert json.loads(fresh.stdout) == expected


@pytest.mark.parametrize("waits", [True, False])
def test_files_go_with_their_last_sequence(tmp_path, writer, waits):
    """Also where that goes while the file is written."""
    buffer = SequenceBuffer(tmp_path, max_bytes=10**9, max_sequences=6, writer=writer)
    seen = []
    for step in range(5):
        for prompt in range(4):
            buffer.add(make(step, prompt))
        buffer.end_step(step)
        if waits:
            written(writer)
            seen.append([int(name[5:11]) for name in files(tmp_path)])
    assert seen == ([[0], [0, 1], [1, 2], [2, 3], [3, 4]] if waits else [])
    written(writer)
    assert [entry["name"] for entry in buffer.index()["files"]] == files(tmp_path)
    assert [name[5:11] for name in files(tmp_path)] == ["000003", "000004"]


@pytest.mark.parametrize("damage", ["missing", "truncated", "other", "size", "garbage", "sequence"])
def test_damaged_files_are_left_out_by_name(tmp_path, writer, caplog, damage):
    buffer = SequenceBuffer(tmp_path, **ROOMY, writer=writer)
    for step in (1, 2, 3):
        for prompt in range(3):
            buffer.add(make(step, prompt, length=30))
        buffer.end_step(step)
    index = json.loads(json.dumps(buffer.index()))
    written(writer)
    broken = tmp_path / "seqs_000002.safetensors"
    if damage == "missing":
        broken.unlink()
    elif damage == "truncated":
        broken.write_bytes(broken.read_bytes()[:-1])
    elif damage == "other":
        broken.write_bytes((tmp_path / "seqs_000003.safetensors").read_bytes())
    elif damage == "size":
        index["files"][1]["bytes"] += 1
    elif damage == "garbage":
        broken.write_bytes(b"\x05" * 3000)
    else:
        index["files"][1]["sequences"].append("5.2.99.0")
    reopened = SequenceBuffer(tmp_path, index=index, **ROOMY, writer=writer)
    assert {s.step for s in reopened.sequences()} == {1, 3}
    assert len(reopened) == 6
    assert str(broken) in caplog.text
    assert "3 sequences" in caplog.text or "4 sequences" in caplog.text


def test_open_clears_what_later_steps_left(tmp_path, writer):
    buffer = SequenceBuffer(tmp_path, **ROOMY, writer=writer)
    buffer.add(make(1, 0))
    buffer.end_step(1)
    index = buffer.index()
    buffer.add(make(2, 0))
    buffer.end_step(2)
    written(writer)
    (tmp_path / ".seqs_000003.safetensors.partial-77").write_bytes(b"half")
    (tmp_path / "canary.json").write_text("{}")
    reopened = SequenceBuffer(tmp_path, index=index, **ROOMY, writer=writer)
    assert ids(reopened.sequences()) == ["5.1.0.0.4"]
    assert files(tmp_path) == ["canary.json", "seqs_000001.safetensors"]


def test_without_a_disk_rollout_goes_on(tmp_path, writer, caplog):
    """A file stands where the folder should be.  Memory stays bounded, and writing begins once the folder works."""
    folder = tmp_path / "idle_training"
    folder.write_text("in the way")
    limit = 10 * bytes_of(20)
    buffer = SequenceBuffer(folder, max_bytes=limit, max_sequences=1000, writer=writer)
    for step in range(4):
        for prompt in range(8):
            buffer.add(make(step, prompt, length=20))
            assert nbytes(buffer) <= limit
        buffer.end_step(step)
    written(writer)
    assert buffer.index() == {"files": []}
    assert "seqs_000000.safetensors" in caplog.text
    kept = ids(buffer.sequences())
    assert len(kept) == 10
    folder.unlink()
    buffer.end_step(9)
    written(writer)
    assert [name for entry in buffer.index()["files"] for name in entry["sequences"]] == kept


def test_held_back_prompts():
    """Fixed for ever: a changed hash would mix training and canary across a restart."""
    assert [p for p in range(40) if held_back(7, p)] == [1, 11, 22, 28, 32, 36]
    assert held_back(8, 1) != held_back(7, 1), "others in each step"
    pairs = [(step, prompt) for step in range(200) for prompt in range(200)]
    assert sum(held_back(*pair) for pair in pairs) == pytest.approx(10_000, rel=0.03)


def test_two_steps_are_held_back_and_what_is_older_is_trained_on(tmp_path, writer):
    buffer = SequenceBuffer(tmp_path, **ROOMY, writer=writer)
    for step in (1, 2, 3):
        for prompt in range(16):
            for sample in range(2):
                buffer.add(make(step, prompt, sample, length=10))
        held, trainable = buffer.held(), buffer.trainable()
        assert sorted(ids(held + trainable)) == sorted(ids(buffer.sequences()))
        assert list(dict.fromkeys(s.step for s in held)) == ([step, step - 1] if step > 1 else [1])
        assert all(held_back(s.step, s.key.prompt_id) for s in held)
        assert not any(held_back(s.step, s.key.prompt_id) for s in trainable if s.step > step - 2)
    groups = {(s.step, s.key.prompt_id) for s in buffer.held()}
    assert len(buffer.held()) == 2 * len(groups), "all samples of a prompt, or none"
    assert sum(s.step == 1 for s in buffer.trainable()) == 32, "nothing is lost"


@pytest.mark.parametrize(
    "change",
    [
        {"tokens_L": torch.zeros(10, dtype=torch.int64)},
        {"first": 10},
        {"first": 5},
        {"taps_LE": torch.zeros(8, TAPS)},
        {"taps_LE": torch.zeros(9, TAPS, dtype=torch.int32)},
        {"lognorms_P": torch.zeros(6, dtype=torch.float64)},
        {"tokens_L": torch.zeros(10, dtype=torch.int32, device="meta")},
    ],
)
def test_a_sequence_that_makes_no_sense_is_refused(change):
    with pytest.raises(ValueError):
        dataclasses.replace(make(length=10), **change)


def write(folder, step, prompt):
    folder.mkdir(exist_ok=True)
    write_sequences(folder / f"seqs_{step:06d}.safetensors", [make(step, prompt)])


def look(peers, step):
    peers.look(step)
    return {s.id: s for s in peers.sequences()}


def test_peers_read_what_another_buffer_has_written(tmp_path, writer):
    owner = SequenceBuffer(tmp_path / "a", **ROOMY, writer=writer)
    sequences = [make(3, prompt, length=7 + prompt) for prompt in range(12)]
    for sequence in sequences:
        owner.add(sequence)
    peers = PeerFiles([tmp_path / "a", tmp_path / "of another node"])
    assert look(peers, 4) == {}  # the step is not finished
    owner.end_step(3)
    written(writer)
    seen = look(peers, 4)
    assert {name: digest(s) for name, s in seen.items()} == {s.id: digest(s) for s in sequences}
    held = {s.id for s in sequences if held_back(3, s.key.prompt_id)}
    assert held == {s.id for s in owner.held()} != set()
    assert {s.id for s in peers.trainable(4)} == seen.keys() - held
    assert {s.id for s in peers.trainable(5)} == seen.keys()  # measured on no more, so trained on


def test_peers_read_only_steps_before_this_one_and_not_the_oldest(tmp_path):
    for step in range(1, 12):
        write(tmp_path / "a", step, prompt=0)
    peers = PeerFiles([tmp_path / "a"])
    assert {s.step for s in look(peers, 9).values()} == {3, 4, 5, 6, 7, 8}
    assert {s.step for s in look(peers, 11).values()} == {5, 6, 7, 8, 9, 10}


def test_peers_files_that_go_change_or_are_damaged(tmp_path):
    folder = tmp_path / "a"
    write(folder, 1, prompt=0)
    write(folder, 2, prompt=1)
    (folder / "seqs_000003.safetensors").write_bytes(b"cut off")
    (folder / "seqs_000002.1.safetensors").symlink_to(folder / "nowhere")
    peers = PeerFiles([folder])
    assert {s.key.prompt_id for s in look(peers, 4).values()} == {0, 1}
    (folder / "seqs_000001.safetensors").unlink()
    again = folder / "seqs_000002.safetensors.new"
    write_sequences(again, [make(2, 5, length=9)])
    again.rename(folder / "seqs_000002.safetensors")  # the step was repeated
    os.utime(folder / "seqs_000002.safetensors", ns=(1, 1))
    assert {s.key.prompt_id for s in look(peers, 4).values()} == {5}
