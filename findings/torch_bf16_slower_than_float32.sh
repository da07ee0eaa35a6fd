#!/usr/bin/env bash
# torch 2.13.0, CPU: on Intel's processors with avx512_bf16 and without AMX (a virtual machine may hide it), products of
# bfloat16 matrices take longer than those of float32 matrices, although torch says that bfloat16 is supported.
#
# Their instruction for bfloat16 products, vdpbf16ps, does twice the work of a float32 one, but by these rates starts only
# once in two cycles, while nearly two float32 ones start in each.  oneDNN uses it wherever it is there
# (brg_matmul:avx512_core_bf16), so autocast or a bfloat16 model makes training slower.  The limit below keeps oneDNN from
# the tiles where there are some (not tried there).
# Exits with 0 while this is so, and with 77 on other processors.
set -euo pipefail
if ! grep -q GenuineIntel /proc/cpuinfo || ! grep -qw avx512_bf16 /proc/cpuinfo; then
  echo "this is no processor of Intel's with avx512_bf16"
  exit 77
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy
cat > "$work/rates.py" <<'END'
import time

import torch
from torch.nn.functional import linear

torch.set_num_threads(1)
TOKENS, IN, OUT = 2048, 576, 1536


def rate(dtype):
    """GFLOP/s, the best of 20."""
    x, w = torch.randn(TOKENS, IN).to(dtype), torch.randn(OUT, IN).to(dtype)
    linear(x, w)
    times = []
    for _ in range(20):
        began = time.perf_counter()
        linear(x, w)
        times.append(time.perf_counter() - began)
    return 2e-9 * TOKENS * IN * OUT / min(times)


full, half = rate(torch.float32), rate(torch.bfloat16)
print(f"GFLOP/s of a core: float32 {full:.0f}, bfloat16 {half:.0f}, ratio {half / full:.2f}")
assert half / full < 0.8, "torch or oneDNN has changed"
END
# Seen (Xeon, family 6, model 207): float32 125 to 135, bfloat16 85, ratio 0.62 to 0.68
ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 "$work/venv/bin/python" "$work/rates.py"
