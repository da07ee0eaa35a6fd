"""The rollout engines, by the names that a configuration gives them.  The rest of the code asks for their properties.

How a worker starts one stands in `cluster/start_replica`, what it takes of memory in `run/memory_plan`.
"""

from collections.abc import Callable
from typing import NamedTuple

from tlt_core.rollout.vllm.client import require_vllm
from tlt_core.rollout.vllm.environment import vllm_python


class EngineKind(NamedTuple):
    words: str  # where rollouts run
    own_process: bool  # beside its worker: with a CUDA context, weights and keys and values of its own
    check_install: Callable[[str], None]  # for a device; raises VllmUnusable
    other_code: str  # setting that computes the same with other code


ENGINES = {
    "builtin": EngineKind(
        words="on our engine",
        own_process=False,
        check_install=lambda device: None,
        other_code="TLT_NATIVE_KERNELS=0 (torch's kernels)",
    ),
    "vllm": EngineKind(
        words="in vLLM",
        own_process=True,
        check_install=lambda device: require_vllm(vllm_python(), device),
        other_code="rollout.engine=builtin",
    ),
}
ENGINES["auto"] = ENGINES["builtin"]  # where nobody has asked `run/engine_choice`
