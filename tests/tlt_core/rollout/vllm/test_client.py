"""vLLM as rollout engine: what is refused before anything starts, and what a worker hears of the process.

`answering` stands in for the process; tests/vllm starts the real one.
"""

import sys
from pathlib import Path

import pytest
import torch

from conf.load import ConfigError, load
from conf.rollout import RolloutConfig, SpeculationConfig
from tlt_core.items.speculation import Strategy
from tlt_core.items.types import FinishReason, GenerationRequest, NoiseKey, Rollout, SamplingParams
from tlt_core.rollout.replica import SpecCounters
from tlt_core.rollout.vllm import client
from tlt_core.rollout.vllm.client import VllmError, VllmRollout, VllmUnusable, vllm_speculation
from tlt_core.run import preflight
from tlt_core.run.engine_agreement import DisagreementError, require_agreement

VLLM = ["rollout.engine=vllm", "rollout.speculation.policy=off", "drafter.spot.enabled=false"]
CHAIN = Strategy("ngram", 3, 1, 3)


def test_a_missing_environment_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("VLLM_PYTHON", str(tmp_path / "no-python"))
    with pytest.raises(VllmUnusable, match="no-python does not exist: run 'make vllm-env', or set VLLM_PYTHON"):
        preflight.check_run(load("conf/smoke.yaml", VLLM))


def test_an_interpreter_without_vllm_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PYTHON", sys.executable)
    with pytest.raises(VllmUnusable, match="has no package vllm: run 'make vllm-env'"):
        preflight.check_run(load("conf/smoke.yaml", VLLM))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ("rollout.speculation.policy=cost_model", "set rollout.speculation.policy to threshold"),
        ("rollout.speculation.policy=beg_mab", "set rollout.speculation.policy to threshold"),
        ("drafter.spot.enabled=true", "set drafter.spot.enabled to false"),
        (
            "rollout.speculation={policy: fixed, menu: [{drafter: ngram, depth: 3, width: 2, tokens: 6}]}",
            "vLLM drafts chains; set its width to 1",
        ),
    ],
)
def test_what_vllm_cannot_do_is_refused_with_the_remedy(changed: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load("conf/smoke.yaml", [*VLLM, changed])


def test_our_engine_is_the_default() -> None:
    assert load("conf/smoke.yaml").rollout.engine == "own"


def test_off_drafts_nothing() -> None:
    assert vllm_speculation(SpeculationConfig(policy="off"), CHAIN, max_live=8) is None


def test_threshold_is_a_table_of_live_requests() -> None:
    cfg = SpeculationConfig(policy="threshold", max_live=2)
    settings = vllm_speculation(cfg, CHAIN, max_live=8)
    assert settings == {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "prompt_lookup_min": 1,
        "prompt_lookup_max": 3,
        "num_speculative_tokens_per_batch_size": [[1, 2, 3], [3, 8, 0]],
    }
    never_above = vllm_speculation(cfg, CHAIN, max_live=2)
    assert never_above is not None
    assert "num_speculative_tokens_per_batch_size" not in never_above


def test_a_trained_drafter_is_named_by_its_folder(tmp_path: Path) -> None:
    cfg = SpeculationConfig(policy="fixed", drafter_path=str(tmp_path / "d-eagle3"))
    assert vllm_speculation(cfg, Strategy("eagle3", 2, 1, 2), max_live=8) == {
        "method": "eagle3",
        "num_speculative_tokens": 2,
        "model": str(tmp_path / "d-eagle3"),
    }


def test_engines_that_disagree_end_the_run() -> None:
    cfg = RolloutConfig(engine="vllm", speculation=SpeculationConfig(policy="off"))
    name = "training/rollout_probs_diff_mean"
    require_agreement({name: 0.05}, cfg)
    require_agreement({}, cfg)  # no update was made
    for wrong in (0.051, float("nan")):
        with pytest.raises(DisagreementError, match=r"rollout\.vllm\.max_probs_diff allows 0\.05"):
            require_agreement({name: wrong}, cfg)
    require_agreement({name: 0.3}, RolloutConfig())  # ours is checked by tests
    require_agreement({name: 0.3}, cfg.model_copy(update={"top_p": 0.9}))


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """A replica whose process is `answering`."""
    monkeypatch.setattr(client, "_SCRIPT", Path(__file__).with_name("answering.py"))
    monkeypatch.setattr(client, "require_vllm", lambda _: None)

    def write(weights, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        (folder / "model.safetensors").write_text("")

    def started(seed: int) -> VllmRollout:
        sizes = {"dtype": "float32", "max_len": 16, "max_live": 2, "threads": 1}
        python = Path(sys.executable)
        return VllmRollout(python, tmp_path, folder=tmp_path / "vllm", write_policy=write, seed=seed, **sizes)

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
            assert replica.report().chains == SpecCounters(3, 9, 3, (3, 0, 0)), "since the last report"
    replica.close()  # again


def test_a_process_that_missed_an_update_ends_the_phase(start) -> None:
    with start(seed=1) as replica:
        replica.load_weights([], policy_version=1)
        with pytest.raises(VllmError, match="decoded with policy 0, 1 was published"):
            decode(replica)


def test_a_process_that_died_ends_the_phase_with_the_end_of_its_log(start) -> None:
    with start(seed=2) as replica, pytest.raises(VllmError, match=r"vLLM has ended; the end of .*\nsomething broke"):
        decode(replica)


def test_memory_that_is_not_ours_cannot_be_released(start) -> None:
    with start(seed=0) as replica, pytest.raises(VllmError, match=r"set cluster\.release_rollout_memory to false"):
        replica.release_memory()
