"""Cold start: a short supervised fine-tuning on worked solutions, before RL.

A small base model earns almost no reward at temperature 1, so RL has nothing to select from.  As in R1's recipe, it is
first trained for a few minutes on worked solutions of the training tasks.  In: model folder and data set (questions of
the validation set are excluded).  Out: a Hugging Face folder with `coldstart.json`.
"""

import json
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from conf.data import GymData
from conf.rollout import RolloutConfig, SpeculationConfig
from conf.run import RunConfig
from conf.system import ClusterConfig
from conf.update import AlgorithmConfig, UpdateConfig
from tlt_core.cluster.group import WorkerGroup
from tlt_core.cluster.messages import TrainerSpec, WorkerSpec
from tlt_core.data import dataset, solutions
from tlt_core.grpo.batch import TrainBatch, make_supervised_batches
from tlt_core.items.store import read_json, write_atomically
from tlt_core.model.load import load_config, load_tokenizer
from tlt_core.run.inputs import made_dir, making, short_digest

log = logging.getLogger(__name__)

_LOG_EVERY = 10  # optimizer steps

OnProgress = Callable[[str, int, int, float | None], None]  # phase, done, total, loss


class ColdStartError(ValueError):
    """The cold start cannot be done for this configuration."""


def output_dir(cfg: RunConfig) -> Path:
    """Folder of the trained model: named by everything that it depends on, so runs with equal inputs share it."""
    inputs = cfg.model_dump(mode="json", include={"seed", "model", "data", "coldstart"})
    assert cfg.coldstart.dtype != "auto", "settle() comes first: precision is decided before the folder is named"
    inputs |= {"solutions": solutions.version(), "backend": cfg.update.backend.model_dump(mode="json")}
    return made_dir() / "coldstart" / short_digest(inputs)


def run(cfg: RunConfig, *, model_dir: Path, data_dir: Path, out_dir: Path, on_progress: OnProgress) -> dict[str, float]:
    """Train and write the folder; does nothing when it is already there, and waits for another run that makes it.

    Returns the stage's metrics.  Raises ColdStartError when the data set has no worked solutions, StoreError where
    `coldstart.json` is damaged.
    """
    report_path = out_dir / "coldstart.json"
    if not report_path.exists():
        with making(out_dir):
            if not report_path.exists():
                _make(cfg, model_dir=model_dir, data_dir=data_dir, out_dir=out_dir, on_progress=on_progress)
    metrics: dict[str, float] = read_json(report_path, remedy=f"remove {out_dir}, which is then made again")["metrics"]
    return metrics


def _make(cfg: RunConfig, *, model_dir: Path, data_dir: Path, out_dir: Path, on_progress: OnProgress) -> None:
    if not isinstance(cfg.data, GymData):
        raise ColdStartError(
            f"coldstart.enabled=true with data.kind={cfg.data.kind!r}: worked solutions exist for reasoning_gym tasks "
            "only; set coldstart.enabled=false and start from a model that already reasons"
        )
    on_progress("worked solutions", 0, 1, None)
    tokenizer = load_tokenizer(model_dir)
    held_out = {p.text for p in dataset.load(data_dir, "validation", tokenizer)}
    examples = solutions.examples(
        cfg.data,
        num_examples=cfg.coldstart.num_examples,
        tokenizer=tokenizer,
        vocab_size=load_config(model_dir).vocab_size,
        exclude=held_out,
        seed=cfg.seed,
    )
    cluster = _cluster(cfg)
    steps = [
        step
        for epoch in range(cfg.coldstart.num_epochs)
        for step in make_supervised_batches(
            examples,
            tokens_per_step=cfg.coldstart.tokens_per_step,
            num_workers=cluster.num_workers,
            seed=cfg.seed + epoch,
        )
    ]
    started_s = time.time()
    on_progress("starting workers", 0, 1, None)
    with WorkerGroup(cluster, _spec(cfg, cluster, model_dir, len(steps)), shared=out_dir.parent) as group:
        on_progress("loading the model", 0, 1, None)
        group.load(None, 0)
        losses = _train(group, steps, on_progress)
        metrics = {"coldstart/loss_first": losses[0], "coldstart/loss_last": sum(losses[-10:]) / len(losses[-10:])}
        on_progress("writing the model", 0, 1, None)
        group.export(out_dir.resolve(), tokenizer_from=model_dir.resolve(), dtype=cfg.coldstart.dtype)
    metrics["timing_s/coldstart"] = time.time() - started_s
    # Written last: its presence says that the folder is complete.
    report = json.dumps({"dtype": cfg.coldstart.dtype, "metrics": metrics, "losses": losses}, indent=1)
    write_atomically(out_dir / "coldstart.json", lambda partial: partial.write_text(report))


def _train(group: WorkerGroup, steps: Sequence[Sequence[TrainBatch]], on_progress: OnProgress) -> list[float]:
    losses: list[float] = []
    on_progress("cold start", 0, len(steps), None)
    for done, shares in enumerate(steps, start=1):
        losses.append(group.supervised_step(shares)["coldstart/loss"])
        on_progress("cold start", done, len(steps), losses[-1])
        if done % _LOG_EVERY == 0 or done == len(steps):
            log.info("cold start %4d/%d  loss %.3f", done, len(steps), losses[-1])
    return losses


def _cluster(cfg: RunConfig) -> ClusterConfig:
    """On the CPU of one machine a single worker with all threads: one copy of weights, sums and optimizer state."""
    given = cfg.cluster
    if given.device != "cpu" or given.address != "local" or cfg.update.backend.kind != "torch":
        return given
    return given.model_copy(
        update={"num_workers": 1, "threads_per_worker": given.num_workers * given.threads_per_worker}
    )


def _spec(cfg: RunConfig, cluster: ClusterConfig, model_dir: Path, num_steps: int) -> WorkerSpec:
    update = UpdateConfig(
        optimizer=cfg.coldstart.optimizer,
        tokens_per_micro_batch=cfg.update.tokens_per_micro_batch,
        activation_checkpointing=cfg.update.activation_checkpointing,
        backend=cfg.update.backend,
        dtype=cfg.coldstart.dtype,
    )
    return WorkerSpec(
        model_dir=model_dir.resolve(),
        rollout=RolloutConfig(
            dtype=cfg.coldstart.dtype, max_live_requests=1, speculation=SpeculationConfig(policy="off")
        ),
        max_len=1,
        trainer=TrainerSpec(update, AlgorithmConfig(), num_steps, max_new_tokens=1, temperature=1.0),
        threads=cluster.threads_per_worker,
        device=cluster.device,
        workers_per_gpu=cluster.workers_per_gpu,
        decodes=False,
    )
