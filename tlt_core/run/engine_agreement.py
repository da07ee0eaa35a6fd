"""Do the rollout engine and the update compute the same probabilities?

Rollout records the log-probability of every token that it samples; the update computes it again.  Two engines differ by
rounding.  Another temperature, other weights or another tokenizer make a much larger difference.
"""

from collections.abc import Mapping

from conf.rollout import RolloutConfig

_DIFFERENCE = "training/rollout_probs_diff_mean"


class DisagreementError(Exception):
    """The engines differ by more than the configuration allows."""


def require_agreement(metrics: Mapping[str, float], cfg: RolloutConfig) -> None:
    """metrics: of an update.  Raises DisagreementError.

    Only vLLM is checked: our engine runs the update's own network.  With top-k or top-p nothing is checked,
    as the update's policy has no such filters.
    """
    if cfg.engine != "vllm" or cfg.filters:
        return
    found = metrics.get(_DIFFERENCE, 0.0)  # missing when nothing was left to update on
    if not found <= cfg.vllm.max_probs_diff:  # NaN is no agreement
        raise DisagreementError(
            f"{_DIFFERENCE} is {found:.4f}, rollout.vllm.max_probs_diff allows {cfg.vllm.max_probs_diff}: vLLM's "
            f"probabilities of the tokens it sampled and the update's are not those of one policy; compare with "
            f"rollout.dtype=float32 (now {cfg.dtype}), or raise the bound if rounding explains it.  The newest "
            "checkpoint is from before this update"
        )
