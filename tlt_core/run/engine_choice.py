"""What `rollout.engine=auto` stands for where each worker has a GPU: vLLM if its CUDA build is installed, else ours.

`settle` alone decides, at the start of each command; the rest of the code gets the settled engine.  A resumed run keeps
the engine of its newest checkpoint.  On CPUs, and where one engine alone can do what is asked, `RunConfig` has decided.
"""

import logging
from typing import NamedTuple

from conf.run import RunConfig
from tlt_core.items import checkpoint
from tlt_core.rollout.vllm.environment import vllm_python, why_not

log = logging.getLogger(__name__)


class Choice(NamedTuple):
    engine: str  # builtin or vllm
    why: str


def settle(cfg: RunConfig) -> RunConfig:
    """The same run with `auto` replaced; a log line says by what, and why.  Raises CheckpointError."""
    found = choose(cfg)
    if found.engine != cfg.rollout.engine:
        log.info("rollout engine: %s, because %s", found.engine, found.why)
    return cfg.with_engine(found.engine)


def choose(cfg: RunConfig) -> Choice:
    """What `settle` will choose.  Commands call it to fail before they start anything.  Raises CheckpointError."""
    engine = cfg.rollout.engine
    if engine != "auto":
        why = f"the configuration says rollout.engine={engine}"
        if engine == "builtin":
            why = (cfg.why_not_vllm or why) if cfg.cluster.gpus_per_worker else "workers have no GPU"
        return Choice(engine, why)
    with checkpoint.newest(cfg.run_dir / "checkpoints") as found:
        recorded = "" if found is None else found.state.engine
    if recorded:
        return Choice(recorded, "the run began with it")
    problem = why_not(vllm_python(), "cuda")
    return Choice("builtin", problem) if problem else Choice("vllm", "workers have GPUs, and vLLM is installed")
