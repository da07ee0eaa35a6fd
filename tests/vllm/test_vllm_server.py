"""What the server does without vLLM: it reads counters, and says why it did not start."""

import sys
from pathlib import Path

import pytest

from tests.vllm.counters import SpecCounters
from tests.vllm.vllm_server import ServerError, VllmServer, parse_counters

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


def test_counters_since():
    earlier, now = SpecCounters(400, 1200, 500, (310, 190)), SpecCounters(491, 1473, 546, (349, 197))
    assert now - earlier == SpecCounters(91, 273, 46, (39, 7))
    assert now - SpecCounters(0, 0, 0, ()) == now


def test_without_speculation_there_are_none():
    nothing = parse_counters("vllm:num_requests_running 0.0\n")
    assert nothing == SpecCounters(0, 0, 0, ())
    assert parse_counters(METRICS) - nothing == parse_counters(METRICS)


def test_a_server_that_does_not_start_says_why(tmp_path):
    """This environment has no vLLM."""
    log = tmp_path / "logs" / "vllm.log"
    with (
        pytest.raises(ServerError, match=r"did not start.*\n.*vllm"),
        VllmServer(Path(sys.executable), tmp_path, log=log),
    ):
        pass
    assert "vllm" in log.read_text()
