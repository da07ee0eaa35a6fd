"""Precision by machine: what `dtype: auto` stands for.

    rollout.dtype     bfloat16 where C kernels run (their arithmetic is float32) or torch computes in it, else float32
    update.dtype      bfloat16 where torch computes in it and is not slower for it, else float32; float32 where
                      rollout.dtype was set to that
    coldstart.dtype   as update.dtype

A resumed run keeps the precision of its newest checkpoint, and is refused where this machine would emulate it.
"""

import logging
import os
from pathlib import Path
from typing import NamedTuple

import torch

from conf.run import RunConfig
from kernels import native
from tlt_core.items import checkpoint
from tlt_core.items.store import read_json

log = logging.getLogger(__name__)

_CPU_FLAGS = ("amx_bf16", "avx512_bf16")  # /proc/cpuinfo names of x86 instructions on bf16 matrices and vectors
_ONEDNN_LIMITS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
_UNLIMITED = ("ALL", "DEFAULT", "AMX", "BF16", "FP16", "AVX10")  # parts of the names of limits that allow bf16
_AUTO, _HALF, _FULL = "auto", "bfloat16", "float32"


class PrecisionError(ValueError):
    """This machine would emulate the run's precision.  The text names the override to continue with."""


class Precision(NamedTuple):
    """Precision(rollout="bfloat16", update="float32", coldstart="float32")"""

    rollout: str  # replica with its KV cache and drafter; exported policies and drafters
    update: str  # training passes of policy and drafter; master weights are float32
    coldstart: str  # training passes of the cold start, and the weights that it saves

    @classmethod
    def of(cls, cfg: RunConfig) -> "Precision":
        """As configured, which may be `auto`."""
        return cls(cfg.rollout.dtype, cfg.update.dtype, cfg.coldstart.dtype)

    def __str__(self) -> str:
        return f"rollout {self.rollout}, update {self.update}, cold start {self.coldstart}"


class Offers(NamedTuple):
    """What computes in bfloat16 on a machine.  Offers("C kernels (avx2)", "", "this processor has no ...")"""

    rollout: str  # in rollouts; empty: nothing
    update: str  # in training
    lacks: str  # why torch would emulate it; empty: it would not
    is_slow: bool = False  # torch's products of bfloat16 numbers take longer than those of float32 numbers


def kernels_isa() -> str | None:
    """Instructions that the C kernels are compiled for; None where they do not run."""
    return native.isa()


def bf16_instructions(cpuinfo: Path = Path("/proc/cpuinfo")) -> tuple[str, ...]:
    """bf16 instruction sets of this CPU; empty where it has none or does not report them."""
    if not cpuinfo.is_file():
        return ()
    flags = next((line for line in cpuinfo.read_text().splitlines() if line.startswith("flags")), "").split()
    return tuple(f for f in _CPU_FLAGS if f in flags)


def offers(device: str, *, builtin_engine: bool = True) -> Offers:
    """What this machine offers.  device: cpu or cuda.  builtin_engine: False with vLLM, which has no C kernels."""
    lacks = _gpu_lacks() if device == "cuda" else _torch_lacks()
    torchs = "" if lacks else "GPU" if device == "cuda" else f"torch ({', '.join(bf16_instructions())})"
    isa = kernels_isa() if device == "cpu" and builtin_engine else None
    is_slow = device == "cpu" and not lacks and native.is_bf16_slow()
    return Offers(torchs if isa is None else f"C kernels ({isa})", torchs, lacks, is_slow)


def _torch_lacks() -> str:
    """Why torch emulates bfloat16 on this CPU; empty where it does not.

    Environment variables can limit torch to fewer instructions than the CPU has, for example to imitate a smaller one.
    """
    if not bf16_instructions():
        return "this processor has no bfloat16 instructions"
    capability = torch.backends.cpu.get_cpu_capability()
    if not capability.startswith("AVX512"):
        return f"torch is limited to {capability} (ATEN_CPU_CAPABILITY)"
    for name in _ONEDNN_LIMITS:
        limit = os.environ.get(name, "").upper()
        if limit and not any(word in limit for word in _UNLIMITED):
            return f"torch's products are limited to {limit} ({name})"
    return ""


def _gpu_lacks() -> str:
    """The same for the GPU.  A driver may have none: its workers' GPUs are then assumed to be sm_80 or newer."""
    if not torch.cuda.is_available() or torch.cuda.is_bf16_supported(including_emulation=False):
        return ""
    return f"{torch.cuda.get_device_name()} has no bfloat16 (it takes sm_80 or newer)"


def resolve(asked: Precision, here: Offers, *, recorded: Precision | None = None, made: str = "") -> Precision:
    """Replace `auto`.  Raises PrecisionError where a resumed run would continue in emulated bfloat16.

    recorded: precision of the run's newest checkpoint.  made: type of a cold start that a stage of dvc.yaml has made,
    perhaps on another machine.
    """

    def settled(what: str, wanted: str, able: str) -> str:
        if wanted != _AUTO:
            return wanted
        if recorded is None:
            return _HALF if able and not (what == "update" and here.is_slow) else _FULL
        kept: str = getattr(recorded, what)
        if kept == _HALF and not able:
            raise PrecisionError(_refusal(what, f"{what}.dtype", recorded, here))
        return kept

    rollout = settled("rollout", asked.rollout, here.rollout)
    # float32 rollouts mean float32 everywhere
    is_full = asked.rollout == _FULL and (recorded is None or recorded.rollout != _FULL)
    update = _FULL if asked.update == _AUTO and is_full else settled("update", asked.update, here.update)
    coldstart = asked.coldstart
    if coldstart == _AUTO:  # a resumed run has its cold start already
        coldstart = made or update if recorded is None else recorded.coldstart
    return Precision(rollout, update, coldstart)


def _refusal(what: str, key: str, recorded: Precision, here: Offers) -> str:
    fresh = resolve(Precision(_AUTO, _AUTO, _AUTO), here)
    follows = ", and training with it" if what == "rollout" and recorded.update == _HALF else ""
    remedy = "resume it on a machine like the one it started on"
    if what == "rollout":
        remedy += ", or install a C compiler here (Debian, Ubuntu: apt install gcc)"
    return (
        f"this run's checkpoint says '{recorded}', but here {what}s in bfloat16 would be emulated, several times "
        f"slower than float32: {here.lacks} (a new run would get '{fresh}').  Either {remedy}, or continue in float32 "
        f"with {key}=float32{follows}: results are then no longer those of the uninterrupted run to the bit, and "
        "losses differ slightly"
    )


def settle(cfg: RunConfig) -> RunConfig:
    """The same run with `auto` replaced; a log line says by what.  Raises PrecisionError, CheckpointError."""
    asked, chosen, here = Precision.of(cfg), decide(cfg), _offers_to(cfg)
    if _AUTO in asked:
        by = f"; bfloat16 by {here.rollout}" if chosen.rollout == _HALF and here.rollout else ""
        lacks = f"; torch would emulate bfloat16: {here.lacks}" if here.lacks else ""
        slow = "; this processor multiplies bfloat16 numbers slower than float32 numbers" if here.is_slow else ""
        log.info("precision: %s%s%s%s", chosen, by, lacks, slow)
    for key, dtype, able in (("rollout", chosen.rollout, here.rollout), ("update", chosen.update, here.update)):
        if dtype == _HALF and not able:
            log.warning("%s.dtype=bfloat16 is emulated here, several times slower: %s", key, here.lacks)
    return cfg.with_dtypes(**chosen._asdict())


def decide(cfg: RunConfig) -> Precision:
    """What `settle` will choose.  Commands call it to fail before they start anything.  Raises as `settle`."""
    with checkpoint.newest(cfg.run_dir / "checkpoints") as found:
        recorded = None if found is None else recorded_in(found.state)
    return resolve(Precision.of(cfg), _offers_to(cfg), recorded=recorded, made=_made_by_stage())


def recorded_in(state: checkpoint.DriverState) -> Precision | None:
    return Precision(**state.precision) if state.precision else None


def for_rollouts(dtype: str, device: str) -> str:
    """The settled `rollout.dtype` of rollouts outside a run."""
    return resolve(Precision(dtype, _FULL, _FULL), offers(device)).rollout


def as_torch(dtype: str) -> torch.dtype:
    assert dtype != _AUTO, "settle() comes first"
    found: torch.dtype = getattr(torch, dtype)
    return found


def _offers_to(cfg: RunConfig) -> Offers:
    return offers(cfg.cluster.device, builtin_engine=cfg.rollout.engine == "builtin")


def _made_by_stage() -> str:
    """Type of the cold start that dvc.yaml tracks; empty where there is none."""
    if "TLT_STAGES" not in os.environ:
        return ""
    reports = list(Path(os.environ["TLT_STAGES"]).glob("coldstart/*/coldstart.json"))
    if len(reports) != 1:
        return ""
    return str(read_json(reports[0], remedy="run 'dvc pull' or 'dvc repro' again").get("dtype", ""))
