"""A worker sees what others have decoded: finished steps, in whole files, and nothing that may not be trained on."""

import os
from concurrent.futures import ThreadPoolExecutor

from tests.tlt_core.idle_training.stored import digest, make
from tlt_core.idle_training.buffer import SequenceBuffer, held_back
from tlt_core.idle_training.curriculum import PeerFiles
from tlt_core.idle_training.sequence_files import write_sequences


def write(folder, step, prompt):
    folder.mkdir(exist_ok=True)
    write_sequences(folder / f"seqs_{step:06d}.safetensors", [make(step, prompt)])


def look(peers, step):
    peers.look(step)
    return {s.id: s for s in peers.sequences()}


def test_it_reads_what_another_buffer_has_written(tmp_path):
    writer = ThreadPoolExecutor(max_workers=1)
    owner = SequenceBuffer(tmp_path / "a", max_bytes=10**9, max_sequences=100, writer=writer)
    sequences = [make(3, prompt, length=7 + prompt) for prompt in range(12)]
    for sequence in sequences:
        owner.add(sequence)
    peers = PeerFiles([tmp_path / "a", tmp_path / "of another node"])
    assert look(peers, 4) == {}  # the step is not finished
    owner.end_step(3)
    writer.shutdown()
    seen = look(peers, 4)
    assert {name: digest(s) for name, s in seen.items()} == {s.id: digest(s) for s in sequences}
    held = {s.id for s in sequences if held_back(3, s.key.prompt_id)}
    assert held == {s.id for s in owner.held()} != set()
    assert {s.id for s in peers.trainable(4)} == seen.keys() - held
    assert {s.id for s in peers.trainable(5)} == seen.keys()  # measured on no more, so trained on


def test_only_steps_before_this_one_and_not_the_oldest(tmp_path):
    for step in range(1, 12):
        write(tmp_path / "a", step, prompt=0)
    peers = PeerFiles([tmp_path / "a"])
    assert {s.step for s in look(peers, 9).values()} == {3, 4, 5, 6, 7, 8}
    assert {s.step for s in look(peers, 11).values()} == {5, 6, 7, 8, 9, 10}


def test_files_that_go_change_or_are_damaged(tmp_path):
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
    seen = look(peers, 4)
    assert {s.key.prompt_id for s in seen.values()} == {0, 5}
    assert digest(seen[make(1, 0).id]) == digest(make(1, 0))  # mapped before its owner deleted it
