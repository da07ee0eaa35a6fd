"""vLLM as rollout engine: what is refused before anything starts.  tests/vllm starts it."""

import sys
from pathlib import Path

import pytest

from conf.load import ConfigError, load
from conf.schema import RolloutConfig, SpeculationConfig
from tlt_core import preflight
from tlt_core.engine_agreement import DisagreementError, require_agreement
from tlt_core.serving.vllm_rollout import VllmUnusable, vllm_speculation
from tlt_core.speculation import Strategy

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
