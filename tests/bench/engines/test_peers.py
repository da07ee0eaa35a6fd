"""Which peers are started, in which precision, and what is said of the others."""

from pathlib import Path

import pytest

from bench.engines import environment
from bench.engines import peers as engines
from bench.engines.environment import PeerError
from bench.engines.peers import chosen_peers, peers_of
from tlt_core.model.config import ModelError


@pytest.fixture
def made(monkeypatch):
    """Environments and converted models that are only noted down."""
    found = []
    monkeypatch.setattr(environment, "interpreter", lambda peer, under: under / peer.name / "bin/python")
    monkeypatch.setattr(environment, "run", lambda command, *, purpose: found.append(command[2:]))
    monkeypatch.setattr(engines, "write_gguf", lambda folder, out, *, dtype: found.append([folder, out.name, dtype]))
    return found


def found_for(tmp_path, names, dtype="bfloat16"):
    common = {"model": "/policy", "dtype": dtype, "threads": 2, "max_live": 4}
    return peers_of(names, common, environments=tmp_path / "environments", work_dir=tmp_path / "work")


@pytest.mark.parametrize(
    ("text", "names"),
    [("all", ("llama.cpp", "openvino")), ("none", ()), ("openvino", ("openvino",)), ("openvino, llama.cpp", None)],
)
def test_peers_are_chosen_by_name(text, names):
    assert chosen_peers(text) == (names if names is not None else ("openvino", "llama.cpp"))


def test_an_unknown_peer_is_refused():
    with pytest.raises(ValueError, match=r"'vulkan'; say all, none, or of llama\.cpp, openvino"):
        chosen_peers("openvino,vulkan")


def test_every_peer_gets_the_model_in_the_same_precision(tmp_path, made):
    found = found_for(tmp_path, ("llama.cpp", "openvino"))
    assert found.reasons == {}
    assert [(s.name, s.settings["dtype"], s.optional) for s in found.specs] == [
        ("llama.cpp", "bfloat16", True),
        ("llama.cpp fp16", "float16", True),
        ("openvino", "bfloat16", True),
    ]
    assert [row[1] for row in made[:2]] == ["model-bfloat16.gguf", "model-float16.gguf"]
    assert made[2][0].endswith("openvino_export.py")
    assert made[2][1:] == ["/policy", found.specs[2].settings["weights"], "bfloat16"]
    assert all(s.file.is_file() and s.settings["max_live"] == 4 for s in found.specs)
    assert all(s.environment["OMP_NUM_THREADS"] == "2" for s in found.specs)


def test_float32_has_no_half_precision_variant(tmp_path, made):
    assert [s.name for s in found_for(tmp_path, ("llama.cpp",), "float32").specs] == ["llama.cpp"]


def test_a_peer_that_cannot_be_had_is_a_reason_and_the_other_one_stays(tmp_path, made, monkeypatch):
    def refuse(folder: Path, out: Path, *, dtype: object) -> None:
        raise ModelError("no tokenizer")

    monkeypatch.setattr(engines, "write_gguf", refuse)
    found = found_for(tmp_path, ("llama.cpp", "openvino"))
    assert found.reasons == {"llama.cpp": "left out: no tokenizer"}
    assert [s.name for s in found.specs] == ["openvino"]

    def fail(command: list[str], *, purpose: str) -> None:
        raise PeerError("no index")

    monkeypatch.setattr(environment, "run", fail)
    assert found_for(tmp_path, ("openvino",)).reasons == {"openvino": "left out: no index"}
