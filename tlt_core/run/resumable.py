"""May this run go on from its newest checkpoint?"""

import hashlib
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from conf.run import RunConfig
from tlt_core.grpo.optimizer import learning_rate
from tlt_core.items import checkpoint
from tlt_core.items.checkpoint import CheckpointError, Found
from tlt_core.machine.precision import Precision, recorded_in

log = logging.getLogger(__name__)

_FIXED = {"seed", "model", "data", "coldstart", "rollout", "algorithm", "update"}  # sections of the fingerprint
_FREE: dict[str, Any] = {  # what a resumed run may change within them
    "rollout": {
        **dict.fromkeys(("speculation", "vllm", "max_probs_diff", "kv_memory_fraction", "max_live_requests"), True),
        "environment": {"timeout_s", "num_processes", "max_running"},
    },
    "update": {
        "tokens_per_micro_batch": True,
        "activation_checkpointing": True,
        "backend": {"gather_bucket_mb", "offload_optimizer"},
    },
}


@contextmanager
def newest(cfg: RunConfig) -> Iterator[Found | None]:
    """The newest valid checkpoint of the run, None if there is none; it is not pruned within the block.

    Raises CheckpointError when it was written under another fingerprint.  Another precision is allowed, with a warning.
    """
    with checkpoint.newest(cfg.run_dir / "checkpoints") as found:
        if found is not None:
            _check(cfg, found)
        yield found


def _check(cfg: RunConfig, found: Found) -> None:
    if found.state.fingerprint == fingerprint(cfg):
        return
    before = recorded_in(found.state)
    if before is None or found.state.fingerprint != fingerprint(cfg.with_dtypes(**before._asdict())):
        raise CheckpointError(
            f"{found.folder} belongs to a run with another model, data set, rollout, algorithm or optimizer "
            f"configuration, or to an earlier release of TLT; choose another name (name={cfg.name!r} now) or remove "
            f"{cfg.run_dir}"
        )
    log.warning(
        "resuming in another precision, as configured (%s; before: %s): results are no longer those of the "
        "uninterrupted run to the bit, and losses differ slightly",
        Precision.of(cfg),
        before,
    )


def fingerprint(cfg: RunConfig) -> str:
    """Digest of the settings that a resumed run must not change.

    More steps, other workers, another tracker and other speculation (it changes no token of our engine) are allowed.
    So are settings that make a run fit into memory: they change how results are rounded, at most.
    """
    fixed = cfg.model_dump(mode="json", include=_FIXED, exclude=_FREE)
    return hashlib.sha256(json.dumps(fixed, sort_keys=True).encode()).hexdigest()


def rate_jumps(cfg: RunConfig) -> str:
    """What becomes of a decaying learning rate where `num_steps` has changed since the newest checkpoint, in words.

    Empty: it goes on as it would have.
    """
    with checkpoint.newest(cfg.run_dir / "checkpoints") as found:
        if found is None or not found.state.num_steps or cfg.num_steps <= found.state.step:
            return ""
    state, optimizer = found.state, cfg.update.optimizer
    before, now = (
        learning_rate(optimizer, cfg.optimizer_steps(state.step), total_steps=cfg.optimizer_steps(num_steps))
        for num_steps in (state.num_steps, cfg.num_steps)
    )
    if before == now:
        return ""
    return (
        f"num_steps is {cfg.num_steps} now and was {state.num_steps}: the learning rate decays over all of them, so "
        f"after step {state.step} it goes on at {now:.3g}, where it was to be {before:.3g}.  The result is neither "
        f"that of the run of {state.num_steps} steps nor that of one of {cfg.num_steps} from the start; for that one, "
        f"begin a run of another name (name={cfg.name!r} now)"
    )
