"""Do the rollout engine and the update compute the same probabilities?

Rollout records the log-probability of every token that it samples; the update computes it again.  Two engines differ by
rounding.  Another temperature, other weights or another tokenizer make a much larger difference.
"""

from collections.abc import Mapping

from conf.rollout import RolloutConfig
from tlt_core.rollout.engines import ENGINES

_DIFFERENCE = "training/rollout_probs_diff_mean"


class DisagreementError(Exception):
    """The engines differ by more than the configuration allows."""


def require_agreement(metrics: Mapping[str, float], cfg: RolloutConfig) -> None:
    """metrics: of an update.  Raises DisagreementError.

    Our engine has other kernels than the update, vLLM has all its own code, so both are checked.
    """
    found = metrics.get(_DIFFERENCE, 0.0)  # missing when nothing was left to update on
    if not found <= cfg.max_probs_diff:  # NaN is no agreement
        raise DisagreementError(
            f"{_DIFFERENCE} is {found:.4f}, rollout.max_probs_diff allows {cfg.max_probs_diff}: the probabilities of "
            f"sampled tokens in rollout.engine={cfg.engine} and in the update are not those of one policy; compare "
            f"with rollout.dtype=float32 (now {cfg.dtype}) and {ENGINES[cfg.engine].other_code}, or raise the bound if "
            "rounding explains it.  The newest checkpoint is from before this update"
        )
