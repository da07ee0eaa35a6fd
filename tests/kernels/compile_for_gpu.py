"""Compile every Triton kernel to the machine code of an NVIDIA GPU, which needs none.  Started by test_compile.py in a
process of its own, without the interpreter; prints the names of the kernels."""

import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels.attention import kv_commit
from kernels.loss import distill_loss
from kernels.sampling import coupled_sample, spec_verify, token_logprob
from kernels.tree import tree_attention

# kernel, types of its tensors and numbers in their order, constants
KERNELS = [
    (
        coupled_sample._choose_in_split,
        "*bf16 *i32 *fp32 *fp32 *i32 i32 i32 i32 i32 i32 fp32",
        dict(GREEDY=False, SCALED=True, FLOORED=True, BLOCK=2048),
    ),
    (coupled_sample._choose_in_split, "*fp32 *i32 *fp32 *fp32 *i32 i32 i32 i32 i32 i32 fp32",
     dict(GREEDY=True, SCALED=False, FLOORED=False, BLOCK=2048)),
    (coupled_sample._choose_among_splits, "*fp32 *i32 *i64 *fp32 *fp32 i32 i32", dict(SPLITS=64)),
    (token_logprob._statistics_kernel, "*bf16 *i64 *fp32 *fp32 *fp32 i32 fp32", dict(BLOCK=4096)),
    (token_logprob._gradient_kernel, "*bf16 *i64 *fp32 *fp32 i32 fp32", dict(BLOCK=4096)),
    (spec_verify._walk, "*i64 *i64 *i64 *i64 *i64 *i64 i32 i32 i32", dict(BLOCK=1024)),
    (kv_commit._move_path, "*bf16 *bf16 *i64 *i64 *u8 i32 i32 i32 i64 i64 i32 i32", dict(SIZE=128)),
    *(
        (distill_loss._loss_and_gradient, "*bf16 *fp32 *fp32 *fp32 *fp32 *bf16 i32", dict(KIND=kind, BLOCK=4096))
        for kind in ("soft_ce", "tv", "mixed")
    ),
    *(
        (
            tree_attention._attend_tree,
            f"*{kind} *{kind} *{kind} *i64 *u8 *fp32 *fp32 i32 i32 i32 i32 i32 i32 i32 i64 i64 i32 fp32",
            dict(ROWS=rows, KEYS=64, SIZE=128, WIDEN=False),
        )
        for kind, rows in (("bf16", 16), ("bf16", 64), ("fp32", 16))
    ),
    (tree_attention._join_splits, "*fp32 *fp32 *bf16 i32 i32 i32", dict(SPLITS=64, SIZE=128)),
]  # fmt: skip


def main(capability: int) -> None:
    """capability: 80 for A100, 90 for H100 and H200."""
    for kernel, types, constants in KERNELS:
        names = [name for name in kernel.arg_names if name not in constants]
        signature = dict(zip(names, types.split(), strict=True)) | dict.fromkeys(constants, "constexpr")
        compiled = triton.compile(ASTSource(kernel, signature, constants), target=GPUTarget("cuda", capability, 32))
        print(kernel.__name__, compiled.metadata.shared, len(compiled.asm["cubin"]))


if __name__ == "__main__":
    main(int(sys.argv[1]))
