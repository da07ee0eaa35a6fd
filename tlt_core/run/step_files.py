"""The scored responses of the RL steps, `runs/NAME/steps/000012/`: which are kept, and the room they take."""

import shutil
from pathlib import Path

from conf.run import RunConfig

_TOKEN_BYTES = 8  # id and log-probability
_RESPONSE_BYTES = 128  # what the file says of a response besides
_HEADER_BYTES = 2048


def step_dir(run_dir: Path, step: int) -> Path:
    return run_dir / "steps" / f"{step:06d}"


def prune(run_dir: Path, *, step: int, keep: int) -> None:
    """Of the steps up to this one, keep the first, with which later ones are compared, and the newest `keep`.

    Folders of later steps are left by a killed attempt; each is cleared when its step begins again.
    """
    found = [(int(p.name), p) for p in step_dir(run_dir, step).parent.glob("*") if p.name.isdigit()]
    for _, folder in sorted(own for own in found if own[0] <= step)[1:-keep]:
        shutil.rmtree(folder)


def needed_bytes(cfg: RunConfig) -> int:
    """Most bytes on the disk at any time, when every response is as long as it may be."""
    tokens = cfg.rollout.max_prompt_tokens + cfg.rollout.max_new_tokens
    a_step = cfg.rollouts_per_step * (tokens * _TOKEN_BYTES + _RESPONSE_BYTES) + _HEADER_BYTES
    kept = 1 + cfg.checkpoint.keep_step_files + cfg.checkpoint.every_steps  # pruned when a checkpoint is written
    return a_step * min(kept, cfg.num_steps)
