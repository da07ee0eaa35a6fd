"""A worker sees what others have decoded: finished steps, in whole files, and nothing that may not be trained on."""

import os

from tests.tlt_core.idle_training.stored import digest, make
from tlt_core.idle_training.buffer import SequenceBuffer, held_back
from tlt_core.idle_training.peers import PeerFiles
from tlt_core.idle_training.sequence_files import write_sequences
from tlt_core.idle_training.writer import BackgroundWriter


def write(folder, step, *, prompts=range(8), length=10, part=""):
    folder.mkdir(exist_ok=True)
    sequences = [make(step, prompt, length=length) for prompt in prompts]
    write_sequences(folder / f"seqs_{step:06d}{part}.safetensors", sequences)
    return sequences


def look(peers, step):
    while peers.look(step):
        pass
    return {s.id: s for s in peers.sequences()}


def test_it_reads_what_another_buffer_has_written(tmp_path):
    writer = BackgroundWriter()
    owner = SequenceBuffer(tmp_path / "a", max_bytes=10**9, max_sequences=100, writer=writer)
    (tmp_path / "a").mkdir()
    sequences = [make(3, prompt, length=7 + prompt) for prompt in range(12)]
    for sequence in sequences:
        owner.add(sequence)
    peers = PeerFiles([tmp_path / "a", tmp_path / "of another node"])
    assert look(peers, 4) == {}  # the step is not finished
    owner.end_step(3)
    writer.close()
    seen = look(peers, 4)
    assert {name: digest(s) for name, s in seen.items()} == {s.id: digest(s) for s in sequences}
    held = {s.id for s in sequences if held_back(3, s.key.prompt_id)}
    assert held == {s.id for s in owner.held()} != set()
    assert {s.id for s in peers.trainable(4)} == seen.keys() - held
    assert {s.id for s in peers.trainable(5)} == seen.keys()  # measured on no more, so trained on


def test_only_steps_before_this_one_and_not_the_oldest(tmp_path):
    for step in range(1, 12):
        write(tmp_path / "a", step, prompts=[0])
    peers = PeerFiles([tmp_path / "a"])
    assert {s.step for s in look(peers, 9).values()} == {3, 4, 5, 6, 7, 8}
    assert {s.step for s in look(peers, 11).values()} == {5, 6, 7, 8, 9, 10}


def test_few_files_at_once_the_newest_first(tmp_path):
    for worker in range(3):
        for step in (1, 2, 3):
            write(tmp_path / f"w{worker}", step, prompts=[worker])
    peers = PeerFiles([tmp_path / f"w{worker}" for worker in range(3)])
    assert peers.look(4)
    assert [s.step for s in peers.sequences()].count(3) == 3
    assert len(peers.sequences()) == 4
    assert peers.look(4)
    assert not peers.look(4)
    assert len(peers.sequences()) == 9


def test_files_that_go_change_or_are_damaged(tmp_path):
    folder = tmp_path / "a"
    kept = write(folder, 1, prompts=[0])
    write(folder, 2, prompts=[1])
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
    assert digest(seen[kept[0].id]) == digest(kept[0])  # mapped before its owner deleted it
