"""What can be told without vLLM: its counters' text, its environment, and a server that does not start."""

import sys
from pathlib import Path

import pytest

from tlt_core.serving.vllm_server import ServerError, SpecCounters, VllmServer, environment, parse_counters

METRICS = """\
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
vllm:spec_decode_num_drafts_total{engine="0",model_name="policy"} 491.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="policy"} 1.7e+09
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="policy"} 1473.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="policy"} 546.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="policy",position="1"} 197.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="policy",position="0"} 349.0
vllm:num_requests_running{engine="0",model_name="policy"} 0.0
"""


def test_counters_are_read_by_position():
    assert parse_counters(METRICS) == SpecCounters(491, 1473, 546, (349, 197))


def test_without_speculation_there_are_none():
    nothing = parse_counters("vllm:num_requests_running 0.0\n")
    assert nothing == SpecCounters(0, 0, 0, ())
    assert parse_counters(METRICS) - nothing == parse_counters(METRICS)


def test_counters_since():
    earlier = SpecCounters(400, 1200, 500, (310, 190))
    assert parse_counters(METRICS) - earlier == SpecCounters(91, 273, 46, (39, 7))


def test_a_server_that_does_not_start_says_why(tmp_path):
    """This environment has no vLLM."""
    log = tmp_path / "logs" / "vllm.log"
    with (
        pytest.raises(ServerError, match=r"did not start.*\n.*vllm"),
        VllmServer(Path(sys.executable), tmp_path, log=log),
    ):
        pass
    assert "vllm" in log.read_text()


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
