"""Whether a candidate drafter replaces the champion: it changes no token, its acceptance length is at least
(1 + min_gain) times the rival's, and it decodes at least `min_speed` times as fast.

The rival is the champion, or plain decoding where no champion fits the policy.  A champion is checked against itself:
has its acceptance dropped since its promotion?
"""

import math
from typing import Literal, NamedTuple

from conf.drafter import RetrainConfig
from tlt_core.export.drafter_trial import Trial


class Decision(NamedTuple):
    outcome: Literal["promoted", "refused", "unchanged", "nothing", "busy"]
    reason: str


class Check(NamedTuple):
    outcome: Literal["ok", "dropped", "nothing", "busy"]
    reason: str


def check(accept_length: float, before: float, *, name: str, cfg: RetrainConfig) -> Check:
    """ok or dropped.  before: at the promotion.  Plain decoding has acceptance length 1: what is above it counts."""
    bound = 1.0 + cfg.alert_below * (before - 1.0)
    found = f"acceptance length {accept_length:.3f} of {name}, {before:.3f} when it was promoted"
    if accept_length >= bound:
        return Check("ok", found)
    return Check("dropped", f"{found}; below {bound:.3f} (retrain.alert_below={cfg.alert_below:g})")


def decide(candidate: Trial, rival: Trial, *, rival_name: str, cfg: RetrainConfig) -> Decision:
    for whose, trial in (("the candidate", candidate), (rival_name, rival)):
        for figure, value in trial._asdict().items():
            if not math.isfinite(value):
                return Decision("refused", f"{figure} of {whose} is {value}, so nothing can be compared")
    if candidate.changed:
        differ = f"{candidate.changed} responses differ from plain decoding's in fp32"
        return Decision("refused", f"{differ}: a fault of the engine, not a matter of quality")
    wanted = rival.accept_length * (1.0 + cfg.min_gain)
    gain = f"acceptance length {candidate.accept_length:.3f} against {rival.accept_length:.3f} of {rival_name}"
    if candidate.accept_length < wanted:
        return Decision("refused", f"{gain}; {wanted:.3f} would be needed (retrain.min_gain={cfg.min_gain:g})")
    ratio = candidate.tokens_per_s / rival.tokens_per_s
    speed = f"{candidate.tokens_per_s:.0f} tokens/s against {rival.tokens_per_s:.0f}"
    if ratio < cfg.min_speed:
        return Decision("refused", f"{gain}, but {speed} (retrain.min_speed={cfg.min_speed:g})")
    return Decision("promoted", f"{gain}, {speed}")
