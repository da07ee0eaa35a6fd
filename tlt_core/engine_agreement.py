"""Do rollout engine and update mean the same probabilities?

Rollout records the log-prob of every token that it samples, the update computes it again with its own passes.  Between
two engines the difference is rounding; another temperature, other weights or another tokenizer are far beyond that.
"""

import math
from collections.abc import Mapping

from conf.schema import RolloutConfig

_DIFFERENCE = "training/rollout_probs_diff_mean"


class DisagreementError(Exception):
    """The engines differ by more than the configuration allows."""


def require_agreement(metrics: Mapping[str, float], cfg: RolloutConfig) -> None:
    """metrics: of an update.  Raises DisagreementError.

    Checked with vLLM only: our engine and the update share the definition (`tlt_core/sampling`).  Filters are no part
    of the update's policy, so nothing can be said with them.
    """
    if cfg.engine != "vllm" or cfg.top_k or not math.isclose(cfg.top_p, 1.0):
        return
    found = metrics.get(_DIFFERENCE, 0.0)  # missing when nothing was left to update on
    if not found <= cfg.vllm.max_probs_diff:  # NaN is no agreement
        raise DisagreementError(
            f"{_DIFFERENCE} is {found:.4f}, rollout.vllm.max_probs_diff allows {cfg.vllm.max_probs_diff}: vLLM's "
            f"probabilities of the tokens it sampled and the update's are not the same policy's; compare with "
            f"rollout.dtype=float32 (now {cfg.dtype}), or raise the bound if rounding explains it.  The newest "
            "checkpoint is from before this update"
        )
