"""Processes that run vLLM see no package of ours."""

import tempfile

from tlt_core.rollout.vllm.environment import environment


def test_its_environment_sees_no_packages_of_ours(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    monkeypatch.setenv("VIRTUAL_ENV", "/elsewhere")
    monkeypatch.setenv("VLLM_PLUGINS", "none")
    python = tmp_path / "bin" / "python"
    found = environment(python, threads=3)
    assert not {"PYTHONPATH", "VIRTUAL_ENV", "VLLM_PLUGINS", "LD_PRELOAD"} & found.keys()
    assert found["OMP_NUM_THREADS"] == "3"
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libiomp5.so").touch()
    assert environment(python, threads=3)["LD_PRELOAD"] == str(tmp_path / "lib" / "libiomp5.so")


def test_its_sockets_have_a_short_path(tmp_path, monkeypatch):
    """vLLM puts a socket with a name of 36 characters into the folder."""
    monkeypatch.setattr(tempfile, "tempdir", "/" + "x" * 69)
    assert environment(tmp_path / "python", threads=1)["VLLM_RPC_BASE_PATH"] == tempfile.gettempdir()
    monkeypatch.setattr(tempfile, "tempdir", "/" + "x" * 70)
    assert environment(tmp_path / "python", threads=1)["VLLM_RPC_BASE_PATH"] == "/tmp"
