"""The registry, on a sqlite store, and in one test on a real MLflow server."""

import math
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from mlflow import MlflowClient
from safetensors.torch import load_file, save_file

from conf.load import load
from conf.run import RunConfig
from conf.system import TrackingConfig
from tasks.registry import (
    BEFORE,
    CHALLENGER,
    CHAMPION,
    ROLLED_BACK,
    Entry,
    Registry,
    RegistryError,
    Version,
    roll_back,
)
from tasks.retrain import fetch_champion, record_decision, register_drafter, register_policy
from tests.faults.service import Mlflow
from tlt_core.export import lineage
from tlt_core.export.drafter_trial import Trial
from tlt_core.export.promotion import Decision
from tlt_core.items.store import Ref
from tlt_core.machine.file_lock import exclusive
from tlt_core.model.config import ModelError
from tlt_core.run import inputs


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"sqlite:///{tmp_path_factory.mktemp('registry')}/mlflow.db"


def _folder(tmp_path: Path, value: float) -> Path:
    """A drafter of one weight."""
    folder = tmp_path / "drafter-eagle3"
    folder.mkdir(exist_ok=True)
    save_file({"fc.weight": torch.tensor([value])}, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    return folder


def _value(folder: Path) -> float:
    return float(load_file(folder / "model.safetensors")["fc.weight"])


@pytest.fixture(params=["sqlite", pytest.param("server", marks=pytest.mark.slow)])
def store(request: pytest.FixtureRequest, uri: str, tmp_path: Path) -> Iterator[str]:
    if request.param == "sqlite":
        yield uri
        return
    server = Mlflow(tmp_path)
    server.start()
    try:
        server.wait_ready()
        yield server.uri
    finally:
        server.kill()


def test_versions_aliases_and_files(store: str, tmp_path: Path) -> None:
    registry = Registry(TrackingConfig(uri=store))
    registry.require()
    model = "plain-drafter"
    assert registry.by_alias(model, CHAMPION) is None
    run_id = registry.run(name="made", key="once", tags={"note": "x"})
    assert registry.run(name="made", key="once", tags={}) == run_id
    first = registry.register(Entry(model, _folder(tmp_path, 1.0), "d1", {"acceptance": "2.5"}, "# A"), run_id=run_id)
    registry.set_alias(first, CHAMPION)
    second = registry.register(Entry(model, _folder(tmp_path, 2.0), "d2", {}, "# B"), run_id=run_id)
    registry.set_alias(second, CHALLENGER)
    registry.finish(run_id, {"accept_length": 2.5})
    champion, challenger = _aliases(registry, model)
    assert (champion.number, champion.digest, champion.tags["acceptance"]) == ("1", "d1", "2.5")
    assert (challenger.number, challenger.digest) == ("2", "d2")
    # same run, same folder name: the first version's files are still its own
    assert _value(registry.download(champion, tmp_path / "got")) == 1.0
    assert _value(registry.download(challenger, tmp_path / "got")) == 2.0
    run = MlflowClient(store).get_run(run_id)
    assert (run.info.status, run.data.metrics["accept_length"]) == ("FINISHED", 2.5)


def _aliases(registry: Registry, model: str) -> tuple[Version, Version]:
    """Champion and challenger."""
    champion, challenger = registry.by_alias(model, CHAMPION), registry.by_alias(model, CHALLENGER)
    assert champion is not None
    assert challenger is not None
    return champion, challenger


@pytest.fixture
def cfg(uri: str, tmp_path: Path, embedded_model: Path) -> RunConfig:
    settings = [f"output_dir={tmp_path}/runs", f"tracking.uri={uri}", f"name={tmp_path.name}"]
    return load("conf/smoke.yaml", settings)


DATA = Ref("somewhere", 32, "data-digest")


def test_the_better_validated_policy_is_the_champion_and_lineage_is_in_the_tags(cfg: RunConfig) -> None:
    score, name, registry = cfg.checkpoint.best_metric, f"tlt-{cfg.name}-policy", Registry(cfg.tracking)
    policies = [inputs.start_model(cfg.model, seed=seed) for seed in range(4)]
    assert register_policy.fn(cfg, policies[0], DATA, {}, "") == f"{name} version 1"
    assert registry.by_alias(name, CHAMPION) is None, "it was not validated"
    for number, validation, champion in ((2, 0.25, "2"), (3, math.nan, "2"), (4, 0.25, "4")):
        register_policy.fn(cfg, policies[number - 1], DATA, {score: validation}, "")
        found, challenger = _aliases(registry, name)
        assert (found.number, challenger.number) == (champion, str(number)), "an equally good one is newer"
    assert register_policy.fn(cfg, policies[0], DATA, {score: 0.9}, "") == f"{name} version 1"
    assert registry.by_alias(name, CHAMPION) == found, "the same weights again move nothing"
    register_policy.fn(cfg, inputs.start_model(cfg.model, seed=9), DATA, {score: 0.125}, "")
    assert registry.by_alias(name, CHAMPION) == found
    tags = found.tags
    assert tags["policy_digest"] == found.digest
    assert (tags["data_digest"], tags["policy_version"], tags["kind"]) == ("data-digest", "0", "policy")
    assert {"tokenizer_digest", "git_commit", "run_name", "export", "validation"} <= tags.keys()


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
    for kind in ("policy", "drafter"):
        assert Registry(cfg.tracking).by_alias(f"tlt-{cfg.name}-{kind}", CHALLENGER) is None


def test_a_warmed_up_drafter_is_the_challenger_only(cfg: RunConfig, tmp_path: Path) -> None:
    policy = inputs.start_model(cfg.model, seed=0)
    metrics = {"drafter/accept_len_sim": 2.5, "drafter/loss_train": math.nan}
    said = register_drafter.fn(cfg, _folder(tmp_path, 1.0), policy, DATA, metrics, "")
    name = f"tlt-{cfg.name}-drafter"
    assert said == f"{name} version 1"
    registry, client = Registry(cfg.tracking), MlflowClient(cfg.tracking.uri)
    assert registry.by_alias(name, CHAMPION) is None
    challenger = registry.by_alias(name, CHALLENGER)
    assert challenger is not None
    assert challenger.tags["accept_len_sim"] == "2.5"
    assert "loss_train" not in challenger.tags
    assert challenger.tags["policy_digest"] == lineage.policy_tags(cfg, policy, dataset=DATA)["policy_digest"]
    assert client.get_run(challenger.run_id).info.status == "FINISHED", "a run that only holds files is not under way"
    assert "| data_digest | data-digest |" in client.get_model_version(name, "1").description


def test_a_registry_that_is_down_fails_promotion_and_not_training(
    cfg: RunConfig, caplog: pytest.LogCaptureFixture
) -> None:
    down = load("conf/smoke.yaml", [f"output_dir={cfg.output_dir}", "tracking.uri=http://127.0.0.1:9"])
    assert register_policy.fn(down, inputs.start_model(cfg.model, seed=0), DATA, {}, "") == ""
    assert "failed (the files are in the run's folder)" in caplog.text
    with pytest.raises(RegistryError, match="does not answer"):
        Registry(down.tracking).require()


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
    assert f"{model}: from version 1 to version 3 by hand" in (cfg.run_dir / "retrain.jsonl").read_text()


@pytest.mark.parametrize("artifact", ["../../../kept", "{root}/runs/kept"])
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
