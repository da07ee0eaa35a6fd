"""The card says what was measured, and nothing else; its commands can be run."""

import itertools
import json
import shlex

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
    assert "- temperature 0: `[[1, 4, 2], [5, 8, 0]]`" in card
    assert "| 1 | 10 | 15 | 16 |" in card
    assert "Overlap" not in card
    card = model_card({**RECORD, "measured": None, "serving": {"num_speculative_tokens": 2}})
    assert "Nothing was measured for this export" in card
    assert "Chain length by batch size" not in card
    assert "0.75" not in card


def test_the_commands_can_be_pasted():
    block = model_card(RECORD).split("```")[1].removeprefix("bash").replace("\\\n", " ")
    vllm, sglang = (dict(itertools.pairwise(shlex.split(line))) for line in block.splitlines() if line)
    assert vllm["--host"] == sglang["--host"] == "127.0.0.1"
    assert json.loads(vllm["--speculative-config"]) == RECORD["serving"] | {
        "model": "./drafter-eagle3",
        "method": "eagle3",
    }
    assert (sglang["--speculative-num-steps"], sglang["--speculative-num-draft-tokens"]) == ("2", "3")
    assert (sglang["--speculative-algorithm"], sglang["--speculative-eagle-topk"]) == ("EAGLE3", "1")
