"""Stations before training: the start model and the data set."""

from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from conf.schema import RunConfig
from tlt_core import data, inputs, preflight
from tlt_core.model.load import load_tokenizer
from tlt_core.store import Ref


@task(task_run_name="prepare-model", cache_policy=NO_CACHE)
def prepare_model(cfg: RunConfig) -> Path:
    """Folder of the weights that training starts from, checked."""
    folder = inputs.start_model(cfg.model, seed=cfg.seed)
    preflight.check_model(cfg, folder)
    return folder


@task(task_run_name="prepare-data", cache_policy=NO_CACHE)
def prepare_data(cfg: RunConfig, model_dir: Path) -> Ref:
    """Folder of the data set: count is its training prompts, sha256 its digest."""
    folder = inputs.data_dir(cfg)
    manifest = data.prepare(
        cfg.data,
        tokenizer=load_tokenizer(model_dir),
        max_prompt_tokens=cfg.rollout.max_prompt_tokens,
        out_dir=folder,
    )
    return Ref(str(folder), manifest.counts["train"], manifest.digest)
