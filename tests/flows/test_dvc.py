"""The stages of dvc.yaml: what they depend on, and (slow) the whole pipeline in git clones, with real DVC."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from conf.drafter import DrafterConfig
from conf.load import apply_override, load
from conf.system import CheckpointConfig
from flows import cli
from tlt_core.export.record import weights_digest

_REPO = Path(__file__).parents[2]
_STAGES = ["prepare", "coldstart", "warmup", "train", "evaluate", "export", "benchmark"]
_DEPEND = {  # a changed value, and the stages that name it; others follow where what they read has changed
    "data.num_train=31": {"prepare"},
    "coldstart.num_examples=15": {"coldstart"},
    "drafter.num_steps=3": {"warmup"},
    "algorithm.clip_low=0.1": {"train"},
    "reward.timeout_s=4.0": {"train", "evaluate"},
    "update.dtype=float32": {"coldstart", "warmup", "train"},
    "rollout.speculation.policy=fixed": {"train", "benchmark"},
    "rollout.temperature=0.9": {"warmup", "train", "evaluate", "export", "benchmark"},
    "name=other": {"export"},
    "retrain.repeats=2": set(),
}


def test_params_are_whole_and_readable_again_and_those_here_are_the_demo_s(tmp_path: Path, quiet_command: None) -> None:
    out = tmp_path / "params.yaml"
    assert cli.main(["params", "conf/smoke.yaml", "rollout.speculation.policy=off", "--out", str(out)]) == 0
    assert load(out) == load("conf/smoke.yaml", ["rollout.speculation.policy=off"])
    assert set(yaml.safe_load(out.read_text())["checkpoint"]) == {*CheckpointConfig.model_fields}
    same = load(_REPO / "params.yaml") == load(_REPO / "conf/demo.yaml")
    assert same, "conf/demo.yaml or a default has changed: tlt params conf/demo.yaml"


def test_the_stages_commands_exist_and_their_params_too() -> None:
    pipeline = yaml.safe_load((_REPO / "dvc.yaml").read_text())
    assert list(pipeline["stages"]) == _STAGES
    params = yaml.safe_load((_REPO / "params.yaml").read_text())
    for stage in pipeline["stages"].values():
        for command in [stage["cmd"]] if isinstance(stage["cmd"], str) else stage["cmd"]:
            first, *words = shlex.split(command)
            if first == "${tlt}":
                args = cli.parse(words)
                load(_REPO / args.config, args.overrides)
        for dotted in stage["params"]:
            node = params
            for key in dotted.split("."):
                node = node[key]
    drafter = {f"drafter.{field}" for field in DrafterConfig.model_fields} - {"drafter.warmup", "drafter.idle_training"}
    assert drafter <= set(pipeline["stages"]["warmup"]["params"]), "the warm-up depends on all of its section"


class Clone:
    """A git clone of this project as it is committed, with the smoke configuration."""

    def __init__(self, folder: Path, *, models: Path) -> None:
        self.folder = folder
        _run(["git", "clone", "--quiet", str(_REPO), str(folder)], cwd=folder.parent)
        (folder / "artifacts" / "models").mkdir(parents=True)
        (folder / "artifacts" / "models" / models.name).symlink_to(models)

    def __call__(self, *command: str) -> str:
        env = os.environ | {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(self.folder),
            "OMP_NUM_THREADS": "1",
            "PREFECT_HOME": str(self.folder / ".prefect"),
            **{f"GIT_{who}_{what}": "test" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")},
        }
        env.pop("TLT_HOME", None)
        return _run(list(command), cwd=self.folder, env=env)

    def dvc(self, *arguments: str) -> str:
        return self(sys.executable, "-m", "dvc", *arguments)

    def repro(self, *arguments: str) -> list[str]:
        """Stages that ran."""
        return re.findall(r"^Running stage '(\w+)'", self.dvc("repro", *arguments), flags=re.MULTILINE)

    def put(self, override: str) -> None:
        """One value of params.yaml."""
        path = self.folder / "params.yaml"
        tree = yaml.safe_load(path.read_text())
        apply_override(tree, override)
        path.write_text(yaml.safe_dump(tree, sort_keys=False))

    def changed(self) -> set[str]:
        """Stages whose own parameters or files differ from those of their last run."""
        return {name for name in json.loads(self.dvc("status", "--json")) if name in _STAGES}


def _run(command: list[str], *, cwd: Path, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def project(embedded_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Clone:
    """All stages have run, are committed and pushed."""
    if not (_REPO / ".git").exists():
        pytest.skip("this is no git checkout, so there is nothing to clone")
    clone = Clone(tmp_path_factory.mktemp("dvc") / "project", models=embedded_model)
    pipeline = clone.folder / "dvc.yaml"
    pipeline.write_text(pipeline.read_text().replace("--repeats 3", "--repeats 1"))
    small = ["rollout.max_new_tokens=8", "rollout.num_prompts=2", "rollout.num_samples=2"]
    small.append("rollout.speculation.strategies=[{depth: 2, tokens: 2}]")  # fewer configurations in the benchmark
    clone(sys.executable, "-m", "flows.cli", "params", "conf/smoke.yaml", *small)
    assert clone.repro() == _STAGES
    clone("git", "add", "dvc.lock", "dvc.yaml", "params.yaml", "pipeline")
    clone("git", "commit", "--quiet", "--no-verify", "--message", "smoke")
    clone.dvc("push", "--quiet")
    return clone


@pytest.mark.slow
@pytest.mark.prefect
def test_nothing_runs_twice(project: Clone) -> None:
    assert project.repro() == []
    assert project("git", "status", "--porcelain") == ""
    assert not list((project.folder / "runs" / "dvc" / "train").glob("*/")), "checkpoints outlive their stage"


@pytest.mark.slow
@pytest.mark.prefect
def test_a_changed_value_concerns_exactly_its_stages(project: Clone) -> None:
    before = (project.folder / "params.yaml").read_text()
    for override, stages in _DEPEND.items():
        project.put(override)
        assert project.changed() == stages, override
        (project.folder / "params.yaml").write_text(before)
    assert project.changed() == set()


@pytest.mark.slow
@pytest.mark.prefect
def test_figures(project: Clone) -> None:
    metrics = project.dvc("metrics", "show", "--md")
    for name in ("coldstart/loss_last", "drafter/accept_len_sim", "last.accept_length", "val-core/all/reward/greedy"):
        assert name in metrics
    project.dvc("plots", "show", "--out", "dvc_plots")
    assert "Responses of the last step by length" in (project.folder / "dvc_plots" / "index.html").read_text()
    assert [row.split(",")[0] for row in _csv(project.folder, "curves")] == ["1", "2"]


@pytest.mark.slow
@pytest.mark.prefect
def test_another_clone_pulls_the_same_drafter(project: Clone, embedded_model: Path) -> None:
    other = project.folder.with_name("other")  # beside the first one, as its remote is
    _run(["git", "clone", "--quiet", str(project.folder), str(other)], cwd=other.parent)
    pulled = other / "exports" / "pipeline" / "drafter-eagle3"
    assert not pulled.exists()
    _run([sys.executable, "-m", "dvc", "pull", "--quiet", "exports/pipeline"], cwd=other)
    assert weights_digest(pulled) == weights_digest(project.folder / "exports" / "pipeline" / "drafter-eagle3")


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.prefect
def test_an_experiment_runs_other_settings_and_the_old_results_come_back(project: Clone) -> None:
    output = project.dvc("exp", "run", "--name", "plain", "--set-param", "rollout.speculation.policy=off", "train")
    assert re.findall(r"^Running stage '(\w+)'", output, flags=re.MULTILINE) == ["train"]
    config = yaml.safe_load((project.folder / "pipeline" / "train" / "config.yaml").read_text())
    assert config["rollout"]["speculation"]["policy"] == "off"
    assert not any(row.split(",")[1] for row in _csv(project.folder, "curves")), "plain decoding speculates"
    project("git", "checkout", "--quiet", "HEAD", "--", ".")
    shutil.rmtree(project.folder / "pipeline" / "train")
    project.dvc("checkout", "--quiet")
    assert project.repro() == []  # all of it comes from DVC's cache


def _csv(folder: Path, name: str) -> list[str]:
    return (folder / "pipeline" / "metrics" / f"{name}.csv").read_text().splitlines()[1:]
