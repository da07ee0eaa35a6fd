"""Training runs that take turns with blocks of steps (each a resumed run), so that other load affects all of them.

The first step of a block warms up and does not count.
"""

import shutil
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file

from conf.load import ConfigError
from conf.rollout import SpeculationConfig, StrategyConfig
from conf.run import RunConfig
from conf.section import MOST_STEPS
from flows._terminal import Terminal
from flows.train import train
from tasks.stages import cold_start, prepare_data, prepare_model, warm_up_drafter
from tlt_core.run.summary import rows_of

_FIXED = StrategyConfig(drafter="eagle3", depth=4, width=1, tokens=4)  # a usual setting of serving engines


def first_drafter(cfg: RunConfig) -> tuple[Path, Path]:
    """Folders of the drafter that all runs start with, and of its policy.  A drafter is made if none is configured."""
    with Terminal() as show:
        policy = prepare_model(cfg)
        dataset = prepare_data(cfg, policy)
        if cfg.coldstart.enabled:
            policy, _ = cold_start(cfg, policy, dataset, show.stage)
        given = cfg.rollout.speculation.drafter_path
        folder = cfg.run_dir.with_name(f"bench-{cfg.name}") / "drafter-eagle3" if given is None else Path(given)
        if not folder.is_dir():
            warm_up_drafter(cfg, policy, dataset, folder, show.stage)
    return folder, policy


def base_drafter(cfg: RunConfig) -> Path:
    """Folder of a drafter that was made for the model as it is before the cold start."""
    folder = cfg.run_dir.with_name(f"bench-{cfg.name}") / "drafter-base"
    if not folder.is_dir():
        with Terminal() as show:
            base = prepare_model(cfg)
            warm_up_drafter(cfg, base, prepare_data(cfg, base), folder, show.stage)
    return folder


def variants(cfg: RunConfig, drafter: Path) -> dict[str, RunConfig]:
    """Configurations that differ only in drafting, and in what idle workers do.

    plain: no speculation; they wait.  fixed: the first drafter, one strategy in every round; they wait.  static: the
    first drafter, adaptive engine; they wait.  streamed: as plain, but they compute parts of the policy update.
    trained: as static, but they train the drafter.  tlt: as static, but they do both.
    """
    kept = {"every_steps": cfg.num_steps, "keep_last": 1, "keep_best": 0, "keep_step_files": MOST_STEPS}
    common = {
        "evaluation": cfg.evaluation.model_copy(update={"every_steps": 0}),
        "checkpoint": cfg.checkpoint.model_copy(update=kept),
        "tracking": cfg.tracking.model_copy(update={"register_models": False}),
    }
    base = cfg.model_copy(update=common).with_drafter(drafter)
    adaptive = base.rollout.speculation
    off = adaptive.model_copy(update={"policy": "off", "drafter_path": None})
    fixed = adaptive.model_copy(update={"policy": "fixed", "strategies": (_FIXED,)})

    def run(name: str, speculation: SpeculationConfig, *, trains: bool = False, streams: bool = False) -> RunConfig:
        idle_training = base.drafter.idle_training.model_copy(update={"enabled": trains})
        changes = {
            "name": f"bench-{cfg.name}-{name}",
            "rollout": base.rollout.model_copy(update={"speculation": speculation}),
            "drafter": base.drafter.model_copy(update={"idle_training": idle_training, "warmup": False}),
            "update": base.update if streams else base.update.model_copy(update={"streamed": "off"}),
        }
        return base.model_copy(update=changes)

    return {
        "plain": run("plain", off),
        "fixed": run("fixed", fixed),
        "static": run("static", adaptive),
        "streamed": run("streamed", off, streams=True),
        "trained": run("trained", adaptive, trains=True),
        "tlt": run("tlt", adaptive, trains=True, streams=True),
    }


def take_turns(runs: Mapping[str, RunConfig], *, num_steps: int, blocks: int) -> Iterator[int]:
    """Train all of them from the start; yields the number of steps done after each block, and deletes the checkpoints,
    which are large, in the end.  Raises ConfigError if a block would have only one step, which would not count."""
    block, order = -(-num_steps // blocks), deque(runs.values())
    if block < 2:
        raise ConfigError(
            f"num_steps={num_steps} in {blocks} repeats: the first step of each does not count; set num_steps to "
            f"{2 * blocks} or more, or --repeats to {max(1, num_steps // 2)} or fewer"
        )
    for run in order:
        shutil.rmtree(run.run_dir, ignore_errors=True)
    for index in range(blocks):
        for run in order:
            train(run.model_copy(update={"num_steps": (index + 1) * block}))
        order.rotate(-1)
        yield (index + 1) * block
    for run in runs.values():
        shutil.rmtree(run.run_dir / "checkpoints", ignore_errors=True)


def steps_of(run: RunConfig, *, with_first: bool = False) -> list[dict[str, float]]:
    """Metrics of each step that counts.  with_first: also those of the first step of each block.  `timing_s/step` is
    without the checkpoint that ends a block: a run writes one every many steps, a block has few."""
    attempts: dict[float, list[dict[str, float]]] = {}
    for row in rows_of(run.run_dir):
        if row["step"] > 0:
            row["timing_s/step"] -= row.get("timing_s/save_checkpoint", 0.0)
            attempts.setdefault(row["training/resume_attempt"], []).append(row)
    return [row for own in attempts.values() for row in (own if with_first else own[1:])]


def ratios(over: Sequence[Mapping[str, float]], under: Sequence[Mapping[str, float]], figure: str) -> list[float]:
    """Ratio of a figure in each step that both have."""
    by_step = {row["step"]: row[figure] for row in under if figure in row}
    return [row[figure] / by_step[row["step"]] for row in over if row["step"] in by_step and figure in row]


def same_steps(run: RunConfig, base: RunConfig) -> float:
    """Share of a run's steps that have the same rollouts and rewards as another run's."""
    pairs = list(zip(steps_of(run, with_first=True), steps_of(base, with_first=True), strict=True))
    same = [all(a[f] == b[f] for f in ("rollout/checksum", "critic/rewards/mean")) for a, b in pairs]
    return sum(same) / len(same)


def same_weights(run: RunConfig, base: RunConfig) -> float:
    """Share of the trained policy's tensors that are equal to another run's to the bit."""
    own, other = (load_file(r.run_dir / "policy" / "model.safetensors") for r in (run, base))
    return sum(torch.equal(own[name], value) for name, value in other.items()) / len(other)
