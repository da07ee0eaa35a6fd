"""The registry, on a sqlite store and on a real MLflow server."""

import math
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch
from mlflow import MlflowClient
from safetensors.torch import load_file, save_file

from conf.load import load
from conf.run import RunConfig
from conf.system import TrackingConfig
from flows.rollback import roll_back
from tasks.journal import Journal
from tasks.register import register_drafter, register_policy
from tasks.registry import BEFORE, CHALLENGER, CHAMPION, ROLLED_BACK, Entry, Registry, RegistryError
from tasks.retrain import fetch_champion, record_decision
from tlt_core.export import lineage
from tlt_core.export.drafter_trial import Trial
from tlt_core.export.promotion import Decision
from tlt_core.items.store import Ref
from tlt_core.machine.file_lock import exclusive
from tlt_core.model.config import ModelError
from tlt_core.run import inputs


@pytest.fixture(scope="module", params=["sqlite", pytest.param("server", marks=pytest.mark.slow)])
def uri(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "sqlite":
        yield f"sqlite:///{folder}/mlflow.db"
        return
    port = _free_port()
    store = ["--backend-store-uri", f"sqlite:///{folder}/mlflow.db", "--artifacts-destination", f"{folder}/artifacts"]
    command = [sys.executable, "-m", "mlflow", "server", *store, "--host", "127.0.0.1", "--port", str(port)]
    env = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
    with (folder / "log").open("w") as log:
        server = subprocess.Popen([*command, "--workers", "1"], env=env, stdout=log, stderr=log, start_new_session=True)
    try:
        _wait_for(f"http://127.0.0.1:{port}/health", server)
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(server.pid, 15)
        server.wait(20)


def _free_port() -> int:
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_for(url: str, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 120
    while server.poll() is None and time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(url, timeout=2):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise AssertionError("MLflow's server did not start")


def _folder(tmp_path: Path, value: float) -> Path:
    """A drafter of one weight."""
    folder = tmp_path / "drafter-eagle3"
    folder.mkdir(exist_ok=True)
    save_file({"fc.weight": torch.tensor([value])}, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    return folder


def _value(folder: Path) -> float:
    return float(load_file(folder / "model.safetensors")["fc.weight"])


def test_versions_aliases_and_files(uri: str, tmp_path: Path) -> None:
    registry = Registry(TrackingConfig(uri=uri))
    registry.require()
    model = "plain-drafter"
    assert registry.by_alias(model, CHAMPION) is None
    run_id = registry.run(name="made", key="once", tags={"note": "x"})
    assert registry.run(name="made", key="once", tags={}) == run_id
    first = registry.register(Entry(model, _folder(tmp_path, 1.0), "d1", {"acceptance": "2.5"}, "# A"), run_id=run_id)
    assert registry.by_alias(model, CHAMPION) is None
    registry.set_alias(first, CHAMPION)
    second = registry.register(Entry(model, _folder(tmp_path, 2.0), "d2", {}, "# B"), run_id=run_id)
    registry.set_alias(second, CHALLENGER)
    registry.finish(run_id, {"accept_length": 2.5})

    champion, challenger = registry.by_alias(model, CHAMPION), registry.by_alias(model, CHALLENGER)
    assert champion is not None
    assert challenger is not None
    assert (champion.number, champion.digest, champion.tags["acceptance"]) == ("1", "d1", "2.5")
    assert (challenger.number, challenger.digest) == ("2", "d2")
    # same run, same folder name: the first version's files are still its own
    assert _value(registry.download(champion, tmp_path / "got")) == 1.0
    assert _value(registry.download(challenger, tmp_path / "got")) == 2.0
    run = MlflowClient(uri).get_run(run_id)
    assert (run.info.status, run.data.metrics["accept_length"]) == ("FINISHED", 2.5)


@pytest.fixture
def cfg(uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, embedded_model: Path) -> RunConfig:
    monkeypatch.setenv("TLT_HOME", str(tmp_path / "home"))
    (tmp_path / "home" / "models").mkdir(parents=True)
    (tmp_path / "home" / "models" / embedded_model.name).symlink_to(embedded_model)
    settings = [f"output_dir={tmp_path}/runs", f"tracking.uri={uri}", f"name={tmp_path.name}"]
    return load("conf/smoke.yaml", settings)


DATA = Ref("somewhere", 32, "data-digest")


def test_the_better_validated_policy_is_the_champion_and_lineage_is_in_the_tags(cfg: RunConfig) -> None:
    score = cfg.checkpoint.best_metric
    policies = [inputs.start_model(cfg.model, seed=seed) for seed in (0, 1, 2)]
    said = [
        register_policy.fn(cfg, folder, DATA, {score: validation}, "")
        for folder, validation in zip(policies, (0.5, 0.25, 0.5), strict=True)
    ]
    name = f"tlt-{cfg.name}-policy"
    assert said == [f"{name} version {n}" for n in (1, 2, 3)]
    registry = Registry(cfg.tracking)
    champion, challenger = registry.by_alias(name, CHAMPION), registry.by_alias(name, CHALLENGER)
    assert champion is not None
    assert challenger is not None
    assert (champion.number, challenger.number) == ("3", "3"), "an equally good one that is newer is preferred"
    assert register_policy.fn(cfg, policies[0], DATA, {score: 0.9}, "") == f"{name} version 1"
    assert registry.by_alias(name, CHAMPION) == champion, "the same weights again move nothing"
    tags = champion.tags
    assert tags["policy_digest"] == champion.digest
    assert (tags["data_digest"], tags["policy_version"], tags["kind"]) == ("data-digest", "0", "policy")
    assert {"tokenizer_digest", "git_commit", "run_name", "export", "validation"} <= tags.keys()


@pytest.mark.parametrize("figure", [None, math.nan])
def test_a_policy_without_a_validation_figure_is_the_challenger_only(
    cfg: RunConfig, figure: float | None, caplog: pytest.LogCaptureFixture
) -> None:
    score, name = cfg.checkpoint.best_metric, f"tlt-{cfg.name}-policy"
    registry, policies = Registry(cfg.tracking), [inputs.start_model(cfg.model, seed=seed) for seed in (0, 1, 2)]
    metrics = {} if figure is None else {score: figure}
    assert register_policy.fn(cfg, policies[0], DATA, metrics, "") == f"{name} version 1"
    assert registry.by_alias(name, CHAMPION) is None
    assert f"{score} is {'missing' if figure is None else figure}, so the policy cannot become" in caplog.text
    register_policy.fn(cfg, policies[1], DATA, {score: 0.25}, "")
    register_policy.fn(cfg, policies[2], DATA, metrics, "")
    champion, challenger = registry.by_alias(name, CHAMPION), registry.by_alias(name, CHALLENGER)
    assert champion is not None
    assert challenger is not None
    assert (champion.number, challenger.number) == ("2", "3")
    assert "validation" not in challenger.tags


def test_weights_that_are_not_finite_are_not_registered(
    cfg: RunConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sound = inputs.start_model(cfg.model, seed=0)
    policy = shutil.copytree(sound, tmp_path / "policy")
    tensors = load_file(policy / "model.safetensors")
    tensors["model.norm.weight"][3] = math.inf
    save_file(tensors, policy / "model.safetensors")
    assert register_policy.fn(cfg, policy, DATA, {cfg.checkpoint.best_metric: 0.5}, "") == ""
    assert "model.safetensors: model.norm.weight holds NaN or infinite numbers" in caplog.text
    drafter = _folder(tmp_path, math.nan)
    assert register_drafter.fn(cfg, drafter, sound, DATA, {}, "") == ""
    assert "model.safetensors: fc.weight holds NaN or infinite numbers" in caplog.text
    trial = {"candidate": Trial(2.0, 100.0, 0, 0)}
    with pytest.raises(ModelError, match=r"fc\.weight holds NaN"):
        record_decision.fn(cfg, sound, DATA, drafter, Decision("promoted", "better"), trial, "key")
    registry = Registry(cfg.tracking)
    for kind in ("policy", "drafter"):
        assert registry.by_alias(f"tlt-{cfg.name}-{kind}", CHALLENGER) is None
        assert registry.by_alias(f"tlt-{cfg.name}-{kind}", CHAMPION) is None


def test_a_warmed_up_drafter_is_the_challenger_only(
    cfg: RunConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    policy = inputs.start_model(cfg.model, seed=0)
    metrics = {"drafter/accept_len_sim": 2.5, "drafter/loss_train": math.nan}
    said = register_drafter.fn(cfg, _folder(tmp_path, 1.0), policy, DATA, metrics, "")
    name = f"tlt-{cfg.name}-drafter"
    assert said == f"{name} version 1"
    registry = Registry(cfg.tracking)
    challenger = registry.by_alias(name, CHALLENGER)
    assert challenger is not None
    assert challenger.tags["accept_len_sim"] == "2.5"
    assert "loss_train" not in challenger.tags
    assert "not finite, so the drafter's version does not have them as tags: drafter/loss_train" in caplog.text
    assert challenger.tags["policy_digest"] == lineage.policy_tags(cfg, policy, dataset=DATA)["policy_digest"]
    assert registry.by_alias(name, CHAMPION) is None
    client = MlflowClient(cfg.tracking.uri)
    version = client.get_model_version(name, "1")
    assert client.get_run(version.run_id).info.status == "FINISHED", "a run that only holds files is not under way"
    card = version.description
    assert card.startswith(f"# EAGLE-3 drafter of run {cfg.name}")
    assert "| data_digest | data-digest |" in card


def test_a_registry_that_is_down_fails_promotion_and_not_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, embedded_model: Path
) -> None:
    monkeypatch.setenv("TLT_HOME", str(tmp_path / "home"))
    (tmp_path / "home" / "models").mkdir(parents=True)
    (tmp_path / "home" / "models" / embedded_model.name).symlink_to(embedded_model)
    down = f"http://127.0.0.1:{_free_port()}"
    cfg = load("conf/smoke.yaml", [f"output_dir={tmp_path}/runs", f"tracking.uri={down}"])
    policy = inputs.start_model(cfg.model, seed=0)
    assert register_policy.fn(cfg, policy, DATA, {}, "") == ""
    assert "registry at" in caplog.text
    assert "failed (the files are in the run's folder)" in caplog.text
    with pytest.raises(RegistryError, match="does not answer"):
        Registry(cfg.tracking).require()


def test_a_champion_knows_which_one_it_has_replaced_and_a_roll_back_is_remembered(
    cfg: RunConfig, tmp_path: Path
) -> None:
    model, registry = f"tlt-{cfg.name}-drafter", Registry(cfg.tracking)

    def champion() -> tuple[str, dict[str, str]]:
        found = registry.by_alias(model, CHAMPION)
        assert found is not None
        return found.number, {key: found.tags[key] for key in (BEFORE, ROLLED_BACK) if key in found.tags}

    with pytest.raises(RegistryError, match=f"{model} has no champion at"):
        roll_back(cfg, kind="drafter", to=None)
    run_id = registry.run(name="made", key=model, tags={})
    for value in (1.0, 2.0, 3.0):
        version = registry.register(Entry(model, _folder(tmp_path, value), f"d{value:.0f}", {}, ""), run_id=run_id)
        registry.promote(version)
        registry.promote(version)  # a task that is retried
    assert champion() == ("3", {BEFORE: "2"})
    left, now = roll_back(cfg, kind="drafter", to=None)
    assert (left.number, now.number, champion()) == ("3", "2", ("2", {BEFORE: "1"}))
    third = registry.find(model, "d3")
    assert third is not None
    assert third.tags[ROLLED_BACK]
    roll_back(cfg, kind="drafter", to=None)
    with pytest.raises(RegistryError, match=r"version 1 has replaced no champion; .* --to NUMBER"):
        roll_back(cfg, kind="drafter", to=None)
    with pytest.raises(RegistryError, match="has no version 7"):
        roll_back(cfg, kind="drafter", to="7")
    with pytest.raises(RegistryError, match="version 1 is the champion already"):
        roll_back(cfg, kind="drafter", to="1")
    roll_back(cfg, kind="drafter", to="3")
    assert champion() == ("3", {BEFORE: "1", ROLLED_BACK: ""})
    with exclusive(cfg.run_dir / "retrain" / "lock"), pytest.raises(RegistryError, match="end it first, or wait"):
        roll_back(cfg, kind="drafter", to=None)
    said = [row["reason"] for row in Journal(cfg.run_dir / "retrain.jsonl").rows()]
    assert said[-1] == f"{model}: from version 1 to version 3 by hand"


@pytest.mark.parametrize("artifact", ["../../../kept", "{root}/runs/kept", ".."])
def test_a_tag_of_the_registry_leads_to_no_other_folder(cfg: RunConfig, tmp_path: Path, artifact: str) -> None:
    kept = cfg.run_dir / "kept" / "file"
    kept.parent.mkdir(parents=True)
    kept.touch()
    model, registry = f"tlt-{cfg.name}-drafter", Registry(cfg.tracking)
    run_id = registry.run(name="made", key="planted", tags={})
    version = registry.register(Entry(model, _folder(tmp_path, 1.0), "d1", {}, ""), run_id=run_id)
    registry.tag(version, "artifact", artifact.format(root=tmp_path))  # nothing outside, should the protection be gone
    registry.promote(version)
    with pytest.raises(RegistryError, match="no plain name: somebody has changed it"):
        fetch_champion.fn(cfg, tmp_path)
    assert kept.is_file()
