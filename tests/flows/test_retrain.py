"""Retraining with planted candidates: one that drafts what the policy says, one that cannot.

The policy is a random two-layer model at a low temperature: it says few different tokens.  A drafter whose vocabulary
holds them drafts well untrained; one whose vocabulary does not never hits, and has acceptance length 1 exactly.
"""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from mlflow import MlflowClient

from conf.load import load
from conf.run import RunConfig
from flows import _config
from flows import retrain as flow_module
from flows.retrain import check_drafter, retrain
from tasks.registry import Entry, Registry, RegistryError, roll_back
from tlt_core.drafter.eagle3.files import save_eagle3
from tlt_core.drafter.eagle3.model import eagle3_from_target
from tlt_core.export.promotion import Decision
from tlt_core.export.record import weights_digest
from tlt_core.machine.file_lock import exclusive
from tlt_core.model.load import load_decoder
from tlt_core.run import inputs

pytestmark = pytest.mark.prefect

NEVER_SAID, SAID = range(40_000, 40_064), range(49_152)
MODEL = "tlt-retrained-drafter"


@pytest.fixture(scope="module")
def folder(runs_home: Path) -> Path:
    """A run that has a policy."""
    cfg = config(runs_home)
    shutil.copytree(inputs.start_model(cfg.model, seed=cfg.seed), cfg.run_dir / "policy")
    return runs_home


def config(folder: Path, *more: str) -> RunConfig:
    settings = [
        "name=retrained",
        f"output_dir={folder}/runs",
        f"tracking.uri=sqlite:///{folder}/mlflow.db",
        "coldstart.enabled=false",
        "cluster.num_workers=1",
        "rollout.temperature=0.02",
        "retrain.min_speed=0",  # time is not tested here
        "retrain.repeats=1",
        "retrain.max_new_tokens=12",
    ]
    return load("conf/smoke.yaml", [*settings, *more])


def save_untrained(policy: Path, tokens: range, out_dir: Path, *, seed: int) -> None:
    decoder = load_decoder(policy, dtype=torch.float32)
    drafter = eagle3_from_target(decoder, torch.tensor(tokens), scales=(1.0, 1.0, 1.0), seed=seed)
    save_eagle3(drafter, out_dir, dtype=torch.float32)


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Callable[[range], list[Path]]:
    """`plant(tokens)`: from now on, training yields an untrained drafter with that vocabulary; returns where it was
    asked for."""

    def plant(tokens: range) -> list[Path]:
        asked: list[Path] = []

        def train(cfg: RunConfig, policy: Path, dataset: Any, out_dir: Path, _: Any) -> dict[str, float]:
            asked.append(policy)
            save_untrained(policy, tokens, out_dir, seed=cfg.seed)
            return {"drafter/planted": 1.0}

        monkeypatch.setattr(flow_module, "warm_up_drafter", train)
        return asked

    return plant


def aliases(folder: Path) -> dict[str, str]:
    found = MlflowClient(f"sqlite:///{folder}/mlflow.db").get_registered_model(MODEL).aliases
    return {alias: str(version) for alias, version in found.items()}


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "runs/retrained/retrain.jsonl").read_text().splitlines()]


def test_promotion_refusal_and_no_op(folder: Path, plant: Callable[[range], list[Path]]) -> None:
    asked = plant(NEVER_SAID)
    decision = retrain(config(folder))
    assert decision.outcome == "refused"
    assert "acceptance length 1.000 against 1.000 of plain decoding" in decision.reason
    assert aliases(folder) == {"challenger": "1"}

    decision = retrain(config(folder))
    assert (decision.outcome, len(asked)) == ("unchanged", 1), "nothing has changed: nothing is trained"
    assert len(lines(folder)) == 1

    plant(SAID)
    decision = retrain(config(folder, "seed=1"))
    assert decision.outcome == "promoted", decision.reason
    assert aliases(folder) == {"challenger": "2", "champion": "2"}

    asked = plant(NEVER_SAID)
    decision = retrain(config(folder, "seed=2"))
    assert (decision.outcome, len(asked)) == ("refused", 1)
    assert f"of {MODEL} version 2" in decision.reason
    assert aliases(folder) == {"challenger": "3", "champion": "2"}

    good, bad = lines(folder)[1], lines(folder)[2]
    assert good["trials"]["candidate"]["accept_length"] > 1.5
    assert good["trials"]["candidate"]["changed"] == 0
    assert bad["trials"]["champion"]["accept_length"] == pytest.approx(good["trials"]["candidate"]["accept_length"])
    assert bad["trials"]["candidate"]["accept_length"] == 1.0
    assert bad["rival"] == f"{MODEL} version 2"


def test_a_new_policy_is_a_reason_to_train_and_a_champion_of_another_shape_is_no_rival(
    folder: Path, plant: Callable[[range], list[Path]]
) -> None:
    cfg = config(folder, "seed=3", "model.hidden_size=32")
    shutil.rmtree(cfg.run_dir / "policy")
    shutil.copytree(inputs.start_model(cfg.model, seed=cfg.seed), cfg.run_dir / "policy")
    asked = plant(SAID)
    decision = retrain(cfg)
    assert asked
    assert decision.outcome == "promoted", decision.reason
    assert "no champion for this policy" in decision.reason
    tags = MlflowClient(cfg.tracking.uri).get_model_version_by_alias(MODEL, "champion").tags
    assert (tags["decision"], tags["reason"]) == ("promoted", decision.reason)
    assert retrain(cfg).outcome == "unchanged"


def test_beside_another_one_and_without_a_registry_nothing_is_trained(
    folder: Path, plant: Callable[[range], list[Path]]
) -> None:
    asked = plant(SAID)
    cfg = config(folder, "seed=4")
    with exclusive(cfg.run_dir / "retrain" / "lock"):
        decision = retrain(cfg)
    assert decision.outcome == "busy"
    assert f"process {os.getpid()}" in decision.reason
    with pytest.raises(RegistryError, match=r"registry at http://127.0.0.1:9 does not answer"):
        retrain(config(folder, "seed=5", "tracking.uri=http://127.0.0.1:9"))
    assert lines(folder)[-1]["outcome"] == "failed"
    assert not asked


def test_a_run_that_was_started_too_often_gives_up(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_config, "MOST_STARTS", 1)
    assert retrain(config(folder, "name=fresh")).outcome == "nothing", "no policy; the first start is allowed"
    monkeypatch.setattr(_config, "MOST_STARTS", 0)
    with pytest.raises(_config.GaveUp, match="was started 1 times, 0 are allowed"):
        retrain(config(folder, "name=fresh"))


def test_a_champion_is_checked_and_what_was_rolled_back_is_not_promoted_again(
    folder: Path, plant: Callable[[range], list[Path]]
) -> None:
    cfg = config(folder, "name=watched")
    assert check_drafter(cfg).outcome == "nothing", "no policy"
    shutil.copytree(inputs.start_model(cfg.model, seed=cfg.seed), cfg.run_dir / "policy")
    assert "has no champion" in check_drafter(cfg).reason
    plant(SAID)
    assert retrain(cfg).outcome == "promoted"
    assert check_drafter(cfg).outcome == "ok"
    save_untrained(cfg.run_dir / "policy", NEVER_SAID, folder / "bad-eagle3", seed=0)
    registry, model = Registry(cfg.tracking), "tlt-watched-drafter"
    run_id = registry.run(name="by hand", key="by hand", tags={})
    entry = Entry(model, folder / "bad-eagle3", weights_digest(folder / "bad-eagle3"), {"acceptance_length": "2"}, "")
    registry.promote(registry.register(entry, run_id=run_id))
    dropped = check_drafter(cfg)
    assert dropped.outcome == "dropped"
    assert "acceptance length 1.000 of tlt-watched-drafter version 2, 2.000 when it was promoted" in dropped.reason
    assert check_drafter(config(folder, "name=watched", "retrain.alert_below=0")).outcome == "ok"
    assert retrain(cfg).outcome == "unchanged"
    roll_back(cfg, kind="drafter", to=None)
    assert check_drafter(cfg).outcome == "ok"
    plant(NEVER_SAID)  # the same weights as those by hand
    again = retrain(config(folder, "name=watched", "retrain.min_gain=0.01"))
    assert again == Decision("refused", again.reason)
    assert f"the candidate is {model} version 2, which was rolled back" in again.reason
