"""The specification of a training run's workers."""

from pathlib import Path

from conf.rollout import RolloutConfig
from conf.run import RunConfig
from tlt_core.cluster.messages import TrainerSpec, WorkerSpec
from tlt_core.model.load import load_config
from tlt_core.rollout.vllm.environment import vllm_python
from tlt_core.rollout.vllm.replica import VllmSpec
from tlt_core.run.drafter_release import trains_drafter
from tlt_core.run.memory_plan import memory_plan


def worker_spec(cfg: RunConfig, start_model: Path, *, longest_prompt: int) -> WorkerSpec:
    """longest_prompt: tokens of it, over training and validation prompts."""
    plan = None
    if cfg.cluster.device == "cuda":
        plan = memory_plan(cfg, load_config(start_model), longest_prompt=longest_prompt)
    leave = 0 if plan is None else plan.leave_bytes
    return WorkerSpec(
        model_dir=start_model.resolve(),
        rollout=_with_absolute_path(cfg.rollout),
        max_len=longest_prompt + cfg.longest_response,
        trainer=TrainerSpec(
            update=cfg.update,
            algorithm=cfg.algorithm,
            total_steps=cfg.optimizer_steps(cfg.num_steps),
            max_new_tokens=cfg.rollout.max_new_tokens,
            temperature=cfg.rollout.temperature,
        ),
        threads=cfg.cluster.threads_per_worker,
        device=cfg.cluster.device,
        seed=cfg.seed,
        drafter=cfg.drafter,
        idle_training_dir=(cfg.run_dir / "idle_training").resolve() if trains_drafter(cfg) else None,
        vllm=VllmSpec(vllm_python(), (cfg.run_dir / "vllm").resolve(), leave),
        release_memory=cfg.cluster.release_rollout_memory,
        gpu_bytes=0 if plan is None else plan.peak[1],
        workers_per_gpu=cfg.cluster.workers_per_gpu,
    )


def _with_absolute_path(rollout: RolloutConfig) -> RolloutConfig:
    """Workers on other nodes have another working directory."""
    speculation = rollout.speculation
    if speculation.drafter_path is None:
        return rollout
    speculation = speculation.model_copy(update={"drafter_path": str(Path(speculation.drafter_path).resolve())})
    return rollout.model_copy(update={"speculation": speculation})
