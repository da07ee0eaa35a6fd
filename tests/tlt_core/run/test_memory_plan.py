"""The memory plan: its arithmetic, what it refuses and advises, and what vLLM is told to leave."""

from pathlib import Path

import pytest
import torch

from conf.load import load
from conf.optimizer import AdamWConfig
from conf.run import RunConfig
from tests.pretended_gpu import pretended_gpu
from tlt_core.cluster.worker import Worker
from tlt_core.grpo.pass_memory import LiveBytes
from tlt_core.grpo.policy import PolicyModel
from tlt_core.grpo.torch_backend import TorchBackend
from tlt_core.machine import memory
from tlt_core.machine.memory import named_gpu_bytes
from tlt_core.model.config import DecoderConfig
from tlt_core.model.load import load_config, random_decoder
from tlt_core.model.shapes import KNOWN, shape, shape_of
from tlt_core.run import memory_plan as module
from tlt_core.run import preflight
from tlt_core.run.memory_plan import MemoryPlanError, check, memory_plan, vllm_room
from tlt_core.run.worker_spec import worker_spec

GPU_GB = {"single_gpu": 24, "multi_gpu": 80, "multi_node": 80, "gpu_7b_lora": 80, "gpu_7b_offload": 80}
GPU_GB |= {"gpu_14b": 80, "gpu_32b": 80, "longtail_gpu": 80}
SEVEN_B = KNOWN["qwen2.5-7b"]


def _load(name: str, *changes: str) -> RunConfig:
    cfg = load(f"conf/{name}.yaml", changes).with_dtypes(rollout="bfloat16", update="bfloat16", coldstart="bfloat16")
    return cfg.with_engine("vllm") if cfg.rollout.engine == "auto" else cfg


def _shape(cfg: RunConfig) -> DecoderConfig:
    found = shape_of(cfg.model)
    assert found is not None
    return found


@pytest.mark.parametrize("name", GPU_GB)
def test_every_file_fits_the_gpu_that_it_names(name: str) -> None:
    cfg, device = _load(name), int(GPU_GB[name] * 1e9)
    plan = memory_plan(cfg, _shape(cfg))
    check(plan, cfg, device_bytes=device)
    share, responses = vllm_room(plan, cfg, _shape(cfg), device_bytes=device)
    assert share + plan.leave_bytes <= device
    assert responses >= 4
    if name in ("single_gpu", "multi_gpu"):  # with a drafter that is trained in idle time, too
        with_drafter = _load(name, "drafter.warmup=true")
        more = memory_plan(with_drafter, _shape(cfg))
        check(more, with_drafter, device_bytes=device)
        assert more.leave_bytes > plan.leave_bytes
        assert more.host["hidden states"] > 0


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        (["update.backend={kind: deepspeed, zero_stage: 1}"], "update.backend.zero_stage=3"),
        (["update.backend={kind: deepspeed, zero_stage: 1}"], "update.backend.offload_optimizer=true"),
        (["update.backend={kind: deepspeed, zero_stage: 1}"], "update.lora.enabled=true"),
        (["update.activation_checkpointing=false"], "update.activation_checkpointing=true"),
        (["update.tokens_per_micro_batch=65536"], "update.tokens_per_micro_batch=16384"),
        (["rollout.engine=builtin", "rollout.max_live_requests=200"], "rollout.max_live_requests=20"),
        (["rollout.engine=builtin", "rollout.max_live_requests=200"], "rollout.engine=vllm"),
        (["cluster.release_rollout_memory=false"], "cluster.release_rollout_memory=true"),
    ],
)
def test_each_remedy_is_named_and_helps(changes: list[str], remedy: str) -> None:
    before, after = _load("multi_gpu", *changes), _load("multi_gpu", *changes, remedy)
    plan, better = memory_plan(before, SEVEN_B), memory_plan(after, SEVEN_B)
    assert any(remedy.partition("=")[0] in module.remedies(before, plan, phase) for phase in plan.phases)
    assert all(better.total(phase) <= plan.total(phase) for phase in plan.phases)
    assert any(better.total(phase) < plan.total(phase) for phase in plan.phases)


def test_the_torch_back_end_takes_what_the_plan_says() -> None:
    small = shape("llama", 512, 64, 192, 4, 4, 2, tied=True)
    cfg = _load("smoke")
    with LiveBytes(torch.device("cpu")) as live:
        decoder = random_decoder(small, seed=0, dtype=torch.bfloat16)
        backend = TorchBackend(PolicyModel(decoder, temperature=1.0), AdamWConfig(), world_size=1)
        taken = live.now
    phase = memory_plan(cfg, small).phases["update"]
    planned = sum(phase[owner] for owner in ("policy in training", "optimizer", "gradients"))
    assert taken == pytest.approx(planned, rel=0.01)
    backend.close()


def test_the_heap_has_holes_where_compiled_products_lie() -> None:
    def update(*changes: str) -> module.Owners:
        cfg = _load("demo", *changes)
        return memory_plan(cfg, _shape(cfg)).phases["update"]

    holes, products = "holes in the heap", "compiled products"
    assert update()[holes] == update()["passes of the update"] // 2
    assert products in update()
    assert not {holes, products} & update("cluster.gpus_per_worker=1", "rollout.engine=builtin").keys()
    single = load("conf/demo.yaml").with_dtypes(rollout="bfloat16", update="float32", coldstart="float32")
    assert not {holes, products} & memory_plan(single, _shape(single)).phases["update"].keys()


def test_a_run_that_cannot_fit_is_refused_before_it_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "load_config", lambda folder: SEVEN_B)
    monkeypatch.setattr(preflight, "count_parameters", lambda folder: 1)
    monkeypatch.setattr(preflight, "gpu_bytes", lambda: 80 * 10**9)
    preflight.check_model(_load("multi_gpu", f"output_dir={tmp_path}"), tmp_path)
    too_much = _load("multi_gpu", f"output_dir={tmp_path}", "update.backend={kind: torch}")
    said = r"a GPU of 80 GB: .*optimizer 91\.4.*update\.backend\.kind=deepspeed"  # 12 bytes a parameter
    with pytest.raises(MemoryPlanError, match=said):
        preflight.check_model(too_much, tmp_path)


def test_a_gpu_is_named_by_its_memory_or_its_name() -> None:
    assert (named_gpu_bytes("80"), named_gpu_bytes("H200")) == (80 * 10**9, 141 * 10**9)
    for wrong in ("0", "h1", "nan"):
        with pytest.raises(ValueError, match="give a GPU's memory in GB"):
            named_gpu_bytes(wrong)


def test_workers_that_share_a_gpu_have_half_of_it_each(monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = _load("smoke", "cluster.gpus_per_worker=0.5", "cluster.num_workers=2")
    model = shape("qwen2", 151_936, 1536, 8960, 28, 12, 2, tied=True)
    plan = memory_plan(cfg, model)
    needed = plan.peak[1]
    just = int(needed / memory.USABLE)  # a GPU that one worker would fill
    check(plan, _load("smoke", "cluster.gpus_per_worker=1", "rollout.engine=builtin"), device_bytes=just + 1)
    check(plan, cfg, device_bytes=2 * just + 2)
    with pytest.raises(MemoryPlanError, match=r"a worker's part, one of 2, of a GPU of .*gpus_per_worker=1, with as"):
        check(plan, cfg, device_bytes=int(1.9 * just))
    assert "deepspeed" not in module.remedies(cfg, plan, "update"), "it needs a GPU for each worker"
    monkeypatch.setattr(memory, "gpu_bytes", lambda: 2 * just + 2)
    with pretended_gpu():
        memory.require_gpu(needed, workers=1)
        assert torch.cuda.get_per_process_memory_fraction() == 1
        memory.require_gpu(needed, workers=2)
        assert torch.cuda.get_per_process_memory_fraction() == memory.USABLE / 2
        with pytest.raises(memory.GpuError, match=r"by 3 workers.*--gpu"):
            memory.require_gpu(needed, workers=3)


def test_a_worker_without_a_gpu_says_so_before_it_loads_anything(tiny_folder: Path) -> None:
    cfg = _load("multi_gpu", "rollout.engine=builtin", "cluster.threads_per_worker=1")
    spec = worker_spec(cfg, tiny_folder, longest_prompt=8)
    assert spec.gpu_bytes == memory_plan(cfg, load_config(tiny_folder), longest_prompt=8).peak[1] > 0
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(memory.GpuError, match=r"cluster\.gpus_per_worker=1"):
        Worker(0, 1, spec).load(None, 0)
