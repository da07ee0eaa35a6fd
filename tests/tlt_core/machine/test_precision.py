"""What `dtype: auto` stands for: by planted machines, and in a fresh process that is told to be a smaller one."""

import pytest
import torch

from kernels import native
from tlt_core.machine import precision
from tlt_core.machine.precision import Offers, Precision

HALF, FULL, AUTO = "bfloat16", "float32", "auto"
ALL_AUTO = Precision(AUTO, AUTO, AUTO)
NO_BF16 = "this processor has no bfloat16 instructions"
AVX512 = Offers("C kernels (avx512_bf16)", "torch (avx512_bf16)", "")
SLOW = Offers("C kernels (avx512)", "torch (avx512_bf16)", "", is_slow=True)
AVX2 = Offers("C kernels (avx2)", "", NO_BF16)
NO_COMPILER = Offers("", "", NO_BF16)
GPU = Offers("GPU", "GPU", "")


@pytest.mark.parametrize(
    ("here", "asked", "expected"),
    [
        (AVX512, ALL_AUTO, (HALF, HALF, HALF)),
        (GPU, ALL_AUTO, (HALF, HALF, HALF)),
        (AVX2, ALL_AUTO, (HALF, FULL, FULL)),
        (SLOW, ALL_AUTO, (HALF, FULL, FULL)),
        (NO_COMPILER, ALL_AUTO, (FULL, FULL, FULL)),
        # what is set is not argued with, and float32 rollouts mean float32 everywhere
        (AVX512, Precision(FULL, AUTO, AUTO), (FULL, FULL, FULL)),
        (AVX512, Precision(AUTO, FULL, HALF), (HALF, FULL, HALF)),
        (SLOW, Precision(AUTO, HALF, AUTO), (HALF, HALF, HALF)),
        (AVX2, Precision(HALF, HALF, AUTO), (HALF, HALF, HALF)),
        (NO_COMPILER, Precision(HALF, AUTO, AUTO), (HALF, FULL, FULL)),
    ],
)
def test_a_new_run_computes_in_what_the_machine_does(
    here: Offers, asked: Precision, expected: tuple[str, str, str]
) -> None:
    assert precision.resolve(asked, here) == expected


@pytest.mark.parametrize(
    ("here", "asked", "recorded", "expected"),
    [
        (AVX512, ALL_AUTO, (HALF, FULL, FULL), (HALF, FULL, FULL)),  # float32 runs anywhere
        (GPU, ALL_AUTO, (HALF, HALF, FULL), (HALF, HALF, FULL)),
        (SLOW, ALL_AUTO, (HALF, HALF, HALF), (HALF, HALF, HALF)),
        # told to change: the cold start is made already
        (AVX2, Precision(AUTO, FULL, AUTO), (HALF, HALF, HALF), (HALF, FULL, HALF)),
        (NO_COMPILER, Precision(FULL, AUTO, AUTO), (HALF, HALF, HALF), (FULL, FULL, HALF)),
        (AVX512, Precision(HALF, AUTO, AUTO), (FULL, FULL, FULL), (HALF, FULL, FULL)),
        # the same as before is no change
        (AVX512, Precision(FULL, AUTO, AUTO), (FULL, HALF, HALF), (FULL, HALF, HALF)),
    ],
)
def test_a_run_that_goes_on_keeps_its_precision(
    here: Offers, asked: Precision, recorded: tuple[str, str, str], expected: tuple[str, str, str]
) -> None:
    assert precision.resolve(asked, here, recorded=Precision(*recorded)) == expected


@pytest.mark.parametrize(
    ("flags", "capability", "limit", "lacks"),
    [
        (("avx512_bf16",), "AVX512", "", ""),
        (("amx_bf16", "avx512_bf16"), "AVX512", "AVX512_CORE_BF16", ""),
        (("amx_bf16",), "AVX512", "avx512_core_amx", ""),
        ((), "AVX2", "", NO_BF16),
        (("avx512_bf16",), "AVX2", "", "torch is limited to AVX2 (ATEN_CPU_CAPABILITY)"),
        (("avx512_bf16",), "AVX512", "AVX2", "torch's products are limited to AVX2 (ONEDNN_MAX_CPU_ISA)"),
    ],
)
def test_what_torch_computes_in_on_a_cpu(
    monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], capability: str, limit: str, lacks: str
) -> None:
    for name in ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"):
        monkeypatch.delenv(name, raising=False)
    if limit:
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
    monkeypatch.setattr(precision, "bf16_instructions", lambda: flags)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(precision, "kernels_isa", lambda: "avx2")
    here = precision.offers("cpu")
    assert here.rollout == "C kernels (avx2)"
    assert bool(here.update) == (not lacks)
    assert lacks in here.lacks
    assert precision.offers("cpu", builtin_engine=False).rollout == here.update, "vLLM has no C kernels"


@pytest.mark.parametrize(
    ("about", "slow"),
    [
        ("vendor_id : GenuineIntel flags : avx512f avx512_bf16", True),
        ("vendor_id : GenuineIntel flags : avx512f avx512_bf16 amx_bf16 amx_tile", False),
        ("vendor_id : GenuineIntel flags : avx512f", False),
        ("vendor_id : AuthenticAMD flags : avx512f avx512_bf16", False),
    ],
)
def test_a_processor_that_is_slow_in_bf16_trains_in_float32(
    monkeypatch: pytest.MonkeyPatch, about: str, slow: bool
) -> None:
    monkeypatch.delenv("TLT_NATIVE_KERNELS", raising=False)
    monkeypatch.setattr(native.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(native, "_processor", lambda: about)
    monkeypatch.setattr(precision, "_torch_lacks", lambda: "" if "avx512_bf16" in about else NO_BF16)
    assert precision.offers("cpu").is_slow == slow
    assert ("-mno-avx512bf16" in native._flags()) == slow


@pytest.mark.parametrize("supported", [True, False])
def test_an_old_gpu_has_no_bf16(monkeypatch: pytest.MonkeyPatch, supported: bool) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Old GPU")

    def is_bf16_supported(including_emulation: bool = True) -> bool:
        return including_emulation or supported  # without the argument torch says yes to every GPU

    monkeypatch.setattr(torch.cuda, "is_bf16_supported", is_bf16_supported)
    here = precision.offers("cuda")
    assert (here.rollout, here.update) == (("GPU", "GPU") if supported else ("", ""))
    assert ("Old GPU has no bfloat16" in here.lacks) == (not supported)
