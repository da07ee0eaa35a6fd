"""Tasks before training: the start model, the data set, and a trial of the rewards."""

from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from conf.run import RunConfig
from tlt_core.data import dataset
from tlt_core.items.store import Ref
from tlt_core.model.load import load_tokenizer
from tlt_core.run import inputs, preflight, reward_probe


@task(task_run_name="prepare-model", cache_policy=NO_CACHE)
def prepare_model(cfg: RunConfig) -> Path:
    """Checked folder of the start model."""
    folder = inputs.start_model(cfg.model, seed=cfg.seed)
    preflight.check_model(cfg, folder)
    return folder


@task(task_run_name="prepare-data", cache_policy=NO_CACHE)
def prepare_data(cfg: RunConfig, model_dir: Path) -> Ref:
    """Folder of the data set; the Ref has the number of training prompts and the digest."""
    folder = inputs.data_dir(cfg)
    manifest = dataset.prepare(
        cfg.data,
        tokenizer=load_tokenizer(model_dir),
        max_prompt_tokens=cfg.rollout.max_prompt_tokens,
        out_dir=folder,
        alone=inputs.making(folder),
    )
    return Ref(str(folder), manifest.counts["train"], manifest.digest)


@task(task_run_name="probe-rewards", cache_policy=NO_CACHE)
def probe_rewards(cfg: RunConfig, model_dir: Path, data: Ref) -> None:
    """Warns of rewards that do not tell right from wrong on this data."""
    reward_probe.probe(cfg, data_dir=Path(data.path), model_dir=model_dir, digest=data.sha256)
