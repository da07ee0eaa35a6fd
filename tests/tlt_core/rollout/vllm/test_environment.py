"""Processes that run vLLM see no package of ours."""

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
