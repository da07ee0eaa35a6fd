"""The specification of a training run's workers."""

from pathlib import Path

from conf.run import RunConfig
from tlt_core.cluster.messages import TrainerSpec, WorkerSpec
from tlt_core.model.load import load_config
from tlt_core.rollout.vllm.environment import vllm_python
from tlt_core.rollout.vllm.replica import VllmSpec
from tlt_core.run.drafter_release import trains_drafter
from tlt_core.run.memory_plan import memory_plan


def worker_spec(cfg: RunConfig, start_model: Path, *, longest_prompt: int) -> WorkerSpec:
    """longest_prompt: tokens of it, over training and validation prompts."""
    if cfg.rollout.speculation.drafter_path is not None:  # workers on other nodes have another working directory
        cfg = cfg.with_drafter(Path(cfg.rollout.speculation.drafter_path).resolve())
    leave = needed = 0
    if cfg.cluster.device == "cuda":
        plan = memory_plan(cfg, load_config(start_model), longest_prompt=longest_prompt)
        leave, needed = plan.leave_bytes, plan.peak[1]
    return WorkerSpec(
        model_dir=start_model.resolve(),
        rollout=cfg.rollout,
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
        gpu_bytes=needed,
        workers_per_gpu=cfg.cluster.workers_per_gpu,
    )
