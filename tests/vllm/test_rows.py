"""Seeds, streams and log-probabilities of requests in a real vLLM with the plug-in, on a tiny model."""

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tlt_core.model.config import DecoderConfig
from tlt_core.model.load import random_decoder, save_hf
from tlt_core.rollout.vllm.environment import environment

pytestmark = pytest.mark.vllm
Asked = tuple[dict[str, Any], str]


@pytest.fixture(scope="module")
def model(tiny_config: DecoderConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with heads of 32 numbers: vLLM's attention on CPUs knows no shorter ones."""
    folder: Path = tmp_path_factory.mktemp("rows") / "model"
    config = replace(tiny_config, head_dim=32)
    decoder = random_decoder(config, seed=0, dtype=torch.float32)
    save_hf(decoder.named_parameters(), config, folder, tokenizer_from=folder.parent, dtype=torch.float32)
    return folder


@pytest.fixture(scope="module")
def asked(vllm_python: Path, model: Path) -> list[Asked]:
    """Answers and log of engines with the seeds 1, 1 and 2."""

    def run(seed: int) -> Asked:
        command = [str(vllm_python), "-P", str(Path(__file__).with_name("rows.py")), str(model), str(seed)]
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, env=environment(vllm_python, threads=1)
        )
        (line,) = (line for line in done.stdout.splitlines() if line.startswith("RESULT"))
        return json.loads(line.removeprefix("RESULT")), done.stdout + done.stderr

    return [run(seed) for seed in (1, 1, 2)]


def test_the_engine_s_seed_repeats_requests_without_one(asked: list[Asked]) -> None:
    first, again, other = (answers["unseeded"] for answers, _ in asked)
    assert first == again
    assert len({str(tokens) for ((tokens, _),) in [*first, *other]}) == 6


def test_children_of_one_stream_differ(asked: list[Asked]) -> None:
    answers, _ = asked[0]
    tokens = [tuple(tokens) for tokens, _ in answers["children"]]
    assert len(set(tokens)) == 4
    assert list(tokens[0]) == answers["single"][0][0]


def test_log_probabilities_do_not_depend_on_the_company(asked: list[Asked]) -> None:
    """Of a request that vLLM samples, with a penalty, beside two that we sample."""
    answers, log = asked[0]
    (tokens, alone), (again, together) = answers["alone"], answers["together"]
    assert tokens == again
    assert together == pytest.approx(alone, abs=1e-4)
    assert log.count("it wants repetition_penalty=1.5") == 1
