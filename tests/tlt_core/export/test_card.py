"""The card says what was measured, and nothing else; its commands can be run."""

import itertools
import json
import shlex

import pytest

from tlt_core.export.card import model_card

RECORD = {
    "created": "2026-11-21T12:00:00+00:00",
    "commit": "abc",
    "command": ["tlt", "export", "conf/x.yaml"],
    "machine": {"gpus": [], "cpu": "EPYC", "threads": 2},
    "run": {"name": "x", "step": 12, "mlflow_run_id": "f00"},
    "dataset": {"digest": "0123456789abcdef", "generator": "reasoning-gym 0.1.25", "tasks": ["chain_sum"]},
    "target": {"name": "/exports/x/policy", "vocab_size": 64},
    "drafter": {"taps": [0, 1, 2], "draft_vocab_size": 8, "dtype": "bfloat16"},
    "training": None,
    "measured": {
        "context": 60,
        "top_p": 0.9,
        "top_k": 0,
        "acceptance": [
            {
                "temperature": 0.0,
                "responses": 4,
                "tokens": 90,
                "offered": [40, 38],
                "accepted": [30, 10],
                "survival": [0.75, 0.2632],
                "accept_length": 2.0132,
            }
        ],
        "schedules": [{"temperature": 0.0, "table": [[1, 4, 2], [5, 8, 0]], "tokens_per_s": {"1": [10.0, 15.0, 16.4]}}],
    },
    "serving": {"num_speculative_tokens": 2, "num_speculative_tokens_per_batch_size": [[1, 4, 2], [5, 8, 0]]},
}


def test_what_was_measured_is_there():
    card = model_card(RECORD)
    assert "| 0 | 0.750 | 0.263 | 2.01 | 90 | 40 |" in card
    assert "on 4 held-out prompts of chain_sum (reasoning-gym 0.1.25) (digest `0123456789ab`)" in card
    assert "Above temperature 0 with top_p=0.9, top_k=0." in card
    assert "- temperature 0: `[[1, 4, 2], [5, 8, 0]]`" in card
    assert "| 1 | 10 | 15 | 16 |" in card
    assert "Overlap" not in card
    assert "serve the target without" not in card


def test_what_was_not_measured_is_not():
    card = model_card({**RECORD, "measured": None, "serving": {"num_speculative_tokens": 2}})
    assert "Nothing was measured for this export" in card
    assert "Chain length by batch size" not in card
    assert "0.75" not in card


@pytest.mark.parametrize("first", ["vllm serve ./policy", "python -m sglang.launch_server"])
def test_the_commands_can_be_pasted(first):
    block = model_card(RECORD).split("```")[1].replace("\\\n", " ")
    (line,) = [line for line in block.splitlines() if line.startswith(first)]
    words = shlex.split(line)
    options = dict(itertools.pairwise(words))
    assert options["--host"] == "127.0.0.1"
    if "vllm" in first:
        assert options["--generation-config"] == "vllm"
        assert json.loads(options["--speculative-config"]) == {
            "model": "./drafter-eagle3",
            "method": "eagle3",
            "num_speculative_tokens": 2,
            "num_speculative_tokens_per_batch_size": [[1, 4, 2], [5, 8, 0]],
        }
    else:
        assert (options["--speculative-num-steps"], options["--speculative-num-draft-tokens"]) == ("2", "3")
        assert (options["--speculative-algorithm"], options["--speculative-eagle-topk"]) == ("EAGLE3", "1")
