"""Tasks before training: the start model, the data set, and a trial of the rewards."""

import logging
from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from conf.run import RunConfig
from tlt_core.data import dataset
from tlt_core.items.store import Ref
from tlt_core.model.load import load_config, load_tokenizer
from tlt_core.run import inputs, preflight, reward_probe

log = logging.getLogger(__name__)


@task(task_run_name="prepare-model", cache_policy=NO_CACHE)
def prepare_model(cfg: RunConfig) -> Path:
    """Checked folder of the start model."""
    folder = inputs.start_model(cfg.model, seed=cfg.seed)
    preflight.check_model(cfg, folder)
    return folder


@task(task_run_name="prepare-data", cache_policy=NO_CACHE)
def prepare_data(cfg: RunConfig, model_dir: Path) -> Ref:
    """Folder of the data set; the Ref has the number of training prompts and the digest."""
    folder, model = inputs.data_dir(cfg), load_config(model_dir)
    manifest = dataset.prepare(
        cfg.data,
        tokenizer=load_tokenizer(model_dir),
        vocab_size=model.vocab_size,
        max_prompt_tokens=cfg.rollout.max_prompt_tokens,
        out_dir=folder,
        alone=inputs.making(folder),
    )
    if manifest.dropped_long:
        kept = manifest.counts
        log.warning(
            "%d of %d prompts are longer than rollout.max_prompt_tokens=%d tokens and were dropped; %d training and %d "
            "validation prompts are left",
            manifest.dropped_long,
            manifest.dropped_long + sum(kept.values()),
            cfg.rollout.max_prompt_tokens,
            kept["train"],
            kept["validation"],
        )
    preflight.check_context(cfg, model, longest_prompt=manifest.longest_prompt)
    return Ref(str(folder), manifest.counts["train"], manifest.digest)


@task(task_run_name="probe-rewards", cache_policy=NO_CACHE)
def probe_rewards(cfg: RunConfig, model_dir: Path, data: Ref) -> None:
    """Warns of rewards that do not tell right from wrong on this data."""
    reward_probe.probe(cfg, data_dir=Path(data.path), model_dir=model_dir, digest=data.sha256)
