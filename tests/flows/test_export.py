"""`tlt export` and `tlt verify-export` on a run of the smoke configuration."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from conf.load import ConfigError, load
from conf.run import RunConfig
from flows import cli
from flows.stages import _drafter_folder, export
from flows.train import train
from tlt_core.drafter.eagle3.files import save_eagle3
from tlt_core.drafter.eagle3.model import Eagle3Config, random_eagle3
from tlt_core.items.store import sha256_of
from tlt_core.model.load import load_config


def _config(folder: Path) -> RunConfig:
    settings = [
        f"output_dir={folder}/runs",
        f"tracking.uri=sqlite:///{folder}/mlflow.db",
        "num_steps=1",
        "coldstart.enabled=false",
        "evaluation.every_steps=0",
        "cluster.num_workers=1",
    ]
    return load("conf/smoke.yaml", settings)


@pytest.fixture(scope="module")
def cfg(runs_home: Path) -> RunConfig:
    """A run of one step, with a drafter that knows nothing."""
    cfg = _config(runs_home)
    policy = train(cfg)
    ids_J = torch.arange(0, 4096, 16)
    drafter = random_eagle3(Eagle3Config.for_target(load_config(policy), len(ids_J)), ids_J, seed=0)
    save_eagle3(drafter, cfg.run_dir / "drafter-eagle3", dtype=torch.float32)
    return cfg


@pytest.mark.slow
@pytest.mark.prefect
def test_export_and_verify(
    cfg: RunConfig, tmp_path: Path, quiet_command: None, capsys: pytest.CaptureFixture[str]
) -> None:
    out = export(cfg, out=str(tmp_path / "out"), num_prompts=2)
    assert sha256_of(out / "policy" / "model.safetensors") == sha256_of(cfg.run_dir / "policy" / "model.safetensors")
    record = json.loads((out / "drafter-eagle3" / "provenance.json").read_text())
    assert record["run"]["step"] == 1
    assert [row["temperature"] for row in record["measured"]["acceptance"]] == [0.0, 1.0]

    assert cli.main(["verify-export", str(out)]) == 0
    assert f"{out}: fit to be served" in capsys.readouterr().out
    (out / "drafter-eagle3" / "model.safetensors").write_bytes(b"tampered")
    assert cli.main(["verify-export", str(out)]) == 1
    assert "REFUSED  drafter digests" in capsys.readouterr().out
    assert cli.main(["verify-export", str(out), "--target", str(tmp_path / "nowhere")]) == 2


@pytest.mark.slow
@pytest.mark.prefect
def test_a_run_without_its_last_policy_is_exported_from_its_checkpoint(cfg: RunConfig, tmp_path: Path) -> None:
    weights = cfg.run_dir / "policy" / "model.safetensors"
    expected = sha256_of(weights)
    shutil.rmtree(weights.parent)
    out = export(cfg, out=str(tmp_path / "out"), drafter="none")
    assert sha256_of(out / "policy" / "model.safetensors") == sha256_of(weights) == expected
    assert [p.name for p in out.iterdir()] == ["policy"]


def test_which_drafter_is_exported(tmp_path: Path) -> None:
    cfg = _config(tmp_path)
    with pytest.raises(ConfigError, match=r"no drafter at .*smoke/drafter-eagle3: make one with 'tlt warmup"):
        _drafter_folder(cfg, None)
    assert _drafter_folder(cfg, "none") is None
    (tmp_path / "other").mkdir()
    assert _drafter_folder(cfg.with_drafter(tmp_path / "other"), None) == tmp_path / "other"
    own = cfg.run_dir / "drafter-eagle3"
    own.mkdir(parents=True)
    assert _drafter_folder(cfg.with_drafter(tmp_path / "other"), None) == own
    assert _drafter_folder(cfg, str(tmp_path / "other")) == tmp_path / "other"
