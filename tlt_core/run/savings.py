"""What speculation, the streamed update and drafter training have saved in one run: seconds, shares, a verdict.

In: the rows of `metrics.jsonl` and the configuration.  Out: `Savings`.  Seconds are estimates, against what plain work
costs on this machine in this run, unless some rollouts were decoded plainly, too (`evaluation.plain_every_steps`); each
part says how it was computed, and which setting to change where it did not help.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from conf.run import RunConfig

Row = Mapping[str, float]
Outcome = Literal["helped", "did not help", "not measured", "not used", "off"]

SPECULATION, STREAMED, DRAFTER = "speculation", "streamed update", "drafter training"
_BESIDE = ("gen_plain", "testing", "save_checkpoint")  # no part of an RL step
_NOTICEABLE = 0.005  # of the step time: less counts as nothing
_NO_TAIL = 0.05  # of the workers' rollout time: with less idle time there is nothing to use


@dataclass(frozen=True, slots=True)
class Part:
    """Part("speculation", "helped", "Decoding was ...", saved_s=43.6, share=0.29, how="Rollout time x ...")"""

    name: str
    outcome: Outcome
    finding: str
    change: str = ""  # setting that would help; empty where none is needed
    how: str = ""  # it was computed
    saved_s: float | None = None  # estimated; negative: it cost time; None: not known in seconds
    share: float | None = None  # of the estimated step time without TLT


class Idle(NamedTuple):
    use: str  # what became of idle worker seconds
    worker_s: float


@dataclass(frozen=True, slots=True)
class Savings:
    steps: int
    step_s: float  # measured, all steps, without validations, checkpoints and comparisons
    saved_s: float  # estimated, all parts
    plain_s: float  # step_s + saved_s: what the steps would have taken
    parts: tuple[Part, ...]
    idle: tuple[Idle, ...]  # adds up to the idle worker seconds of the rollouts
    verdict: str  # one line

    def metrics(self) -> dict[str, float]:
        """`saved/PART_s` of the parts that are known in seconds, and of all of them; nothing without a step."""
        if not self.steps:
            return {}
        known = {part.name.replace(" ", "_"): part.saved_s for part in self.parts if part.saved_s is not None}
        return {f"saved/{name}_s": seconds for name, seconds in {**known, "total": self.saved_s}.items()}


class _Totals(NamedTuple):
    rows: list[Row]  # of the steps that were recorded whole; the rest are sums over them
    step_s: float
    gen_s: float  # without the wait for passes in hand
    idle_s: float  # worker seconds, as the next two
    streamed_s: float
    trained_s: float
    idle_share: float  # of the workers' rollout time


def savings(rows: Sequence[Row], cfg: RunConfig) -> Savings:
    """What a run has saved.  rows: as in `metrics.jsonl`; those without a step time do not count."""
    total = _totals(rows, cfg.cluster.num_workers)
    found = (_speculation(total, cfg), _streamed(total, cfg), _drafter(total, cfg))
    saved_s = sum(part.saved_s or 0.0 for part in found)
    plain_s = total.step_s + saved_s
    parts = tuple(
        part if part.saved_s is None or plain_s <= 0 else replace(part, share=part.saved_s / plain_s) for part in found
    )
    return Savings(
        steps=len(total.rows),
        step_s=total.step_s,
        saved_s=saved_s,
        plain_s=plain_s,
        parts=parts,
        idle=_idle(total),
        verdict=_verdict(total, parts, saved_s=saved_s, plain_s=plain_s),
    )


def _totals(rows: Sequence[Row], num_workers: int) -> _Totals:
    whole = [row for row in rows if "timing_s/step" in row]

    def of(name: str) -> float:
        return math.fsum(row.get(name, 0.0) for row in whole)

    gen_s, idle_s, streamed_s = of("timing_s/gen") - of("idle/wait_s"), of("idle/idle_s"), of("idle/streamed_s")
    trained_s = max(of("idle/harvested_s") - streamed_s, 0.0)
    worker_s = num_workers * gen_s
    share = idle_s / worker_s if worker_s else 0.0
    step_s = of("timing_s/step") - sum(of(f"timing_s/{name}") for name in _BESIDE)
    return _Totals(whole, step_s, gen_s, idle_s, streamed_s, trained_s, share)


def _speculation(total: _Totals, cfg: RunConfig) -> Part:
    policy = cfg.rollout.speculation.policy
    how = (
        "Rollout time x (estimated plain over actual decode time - 1). The tuner measures what plain rounds cost here; "
        "its ratio counts all rounds since the run began, and is the mean over the workers."
    )
    if policy == "off":
        return Part(SPECULATION, "off", "Decoding was plain.", "rollout.speculation.policy=cost_model")
    if measured := [row for row in total.rows if "timing_s/gen_plain" in row]:
        return _measured(measured, total)
    ratios = [row["rollout/spec_speedup_est"] for row in total.rows if "rollout/spec_speedup_est" in row]
    if not ratios:
        return Part(SPECULATION, "not measured", "The rollout engine does not say what plain rounds would have cost.")
    saved_s = total.gen_s * (ratios[-1] - 1)
    if saved_s >= _NOTICEABLE * total.step_s:
        text = f"Decoding was {ratios[-1]:.2f} times as fast as plain: rollouts took {total.gen_s:.1f} s."
        return Part(SPECULATION, "helped", text, "", how, saved_s)
    text = f"Decoding was {ratios[-1]:.2f} times as fast as plain decoding would have been."
    change = "off" if policy == "cost_model" else "cost_model"
    return Part(SPECULATION, "did not help", text, f"rollout.speculation.policy={change}", how, saved_s)


def _measured(rows: Sequence[Row], total: _Totals) -> Part:
    """rows: of the steps whose rollouts were decoded plainly, too."""
    plain_s = math.fsum(row["timing_s/gen_plain"] for row in rows)
    gen_s = math.fsum(row["timing_s/gen"] - row.get("idle/wait_s", 0.0) for row in rows)
    equal = min(row["rollout/plain_equal_frac"] for row in rows)
    steps = ", ".join(f"{row['training/global_step']:.0f}" for row in rows)
    how = (
        f"Rollout time x (plain over actual time - 1): the rollouts of step {steps} were decoded once more, plainly "
        "and without idle work; the wait for a pass of the update in hand does not count."
    )
    saved_s = total.gen_s * (plain_s / gen_s - 1)
    same = "the same tokens" if equal == 1 else f"{equal:.1%} of responses the same"
    text = f"Measured at step {steps}: {plain_s:.1f} s plainly, {gen_s:.1f} s with TLT, {same}."
    if saved_s >= _NOTICEABLE * total.step_s:
        return Part(SPECULATION, "helped", text, "", how, saved_s)
    return Part(SPECULATION, "did not help", text, "", how, saved_s)  # one comparison is no ground for advice


def _streamed(total: _Totals, cfg: RunConfig) -> Part:
    workers = cfg.cluster.num_workers
    how = (
        f"Per step, the smaller of two estimates: idle worker seconds spent on passes of the update, over {workers} "
        "workers; and update time x share / (1 - share), with the share of the gradient work done in idle time; less "
        f"{workers - 1}/{workers} of the wait for a pass in hand, which one worker used. So much at most: what it "
        "costs those who still decode is not measured and can be as much (tlt bench e2e measures)."
    )
    if cfg.update.streamed == "off":
        return Part(STREAMED, "off", "The update began after the rollout.", "update.streamed=auto")
    if cfg.why_not_streamed:
        return Part(STREAMED, "off", f"Not possible: {cfg.why_not_streamed}.", cfg.why_not_streamed.split()[0])
    if not any("idle/streamed_s" in row or "idle/streamed_share" in row for row in total.rows):
        return Part(STREAMED, "not measured", "No step says how much of the update was done in idle time.")
    saved_s = math.fsum(_streamed_s(row, workers) for row in total.rows)
    share = max((row.get("idle/streamed_share", 0.0) for row in total.rows), default=0.0)
    if saved_s >= _NOTICEABLE * total.step_s:
        text = (
            f"{total.streamed_s:.1f} idle worker seconds went into it; at most {share:.0%} of a step's gradient work."
        )
        return Part(STREAMED, "helped", text, "", how, saved_s)
    text, change = _why_nothing_streamed(total, cfg)
    return Part(STREAMED, "did not help", text, change, how, saved_s)


def _streamed_s(row: Row, workers: int) -> float:
    """Seconds that idle work took off one step: see `_streamed`."""
    by_time, share = row.get("idle/streamed_s", 0.0) / workers, row.get("idle/streamed_share", 0.0)
    if share < 1:
        by_time = min(by_time, row.get("timing_s/update_actor", 0.0) * share / (1 - share))
    return by_time - row.get("idle/wait_s", 0.0) * (workers - 1) / workers


def _why_nothing_streamed(total: _Totals, cfg: RunConfig) -> tuple[str, str]:
    """A sentence, and the setting to change; empty where none would help."""
    if nothing := _why_no_idle_time(total, cfg):
        return nothing
    if total.trained_s > total.streamed_s and cfg.update.streamed != "first":
        return "Idle time went to drafter training first.", "update.streamed=first"
    if cfg.update.groups_per_pack > 1:
        return "Hardly a pack of groups was complete before the rollout ended.", "update.groups_per_pack=1"
    smaller = max(cfg.update.tokens_per_micro_batch // 2, 64)
    return "Hardly a pass was finished before the rollout ended.", f"update.tokens_per_micro_batch={smaller}"


def _why_no_idle_time(total: _Totals, cfg: RunConfig) -> tuple[str, str] | None:
    if cfg.cluster.num_workers == 1:
        return "A lone worker has no idle time while it decodes.", "cluster.num_workers=2"
    if total.idle_share < _NO_TAIL:
        return f"There is no tail: workers were idle for {total.idle_share:.1%} of the rollouts.", ""
    return None


def _drafter(total: _Totals, cfg: RunConfig) -> Part:
    speculation, off = cfg.rollout.speculation, "drafter.idle_training.enabled=false"
    has_drafter = speculation.policy != "off" and (speculation.drafter_path is not None or cfg.drafter.warmup)
    how = (
        "Seconds are part of speculation's. It helped if the new drafters, on held-back responses, gained more tokens "
        "a round than one standard error."
    )
    if not total.rows:
        return Part(DRAFTER, "not measured", "No step was recorded.")
    if not (cfg.drafter.idle_training.enabled and has_drafter):
        change = "drafter.idle_training.enabled=true" if has_drafter else ""
        return Part(DRAFTER, "off", "No drafter was trained in idle time.", change)
    if total.trained_s == 0:
        all_used = "All idle time that could be used went to the update.", ""
        return Part(DRAFTER, "not used", *(_why_no_idle_time(total, cfg) or all_used))
    gain, error, published = _drafter_gain(total.rows)
    spent = f"{total.trained_s:.1f} idle worker seconds went into it"
    if not published:
        text = f"{spent}; no new drafter came into use."
        return Part(DRAFTER, "did not help", text, f"{off}, or more num_steps", how)
    text = (
        f"{spent}; {published} new drafter{'s' if published > 1 else ''}, {gain:+.3f} tokens a round (+-{error:.3f})."
    )
    if gain > error:
        return Part(DRAFTER, "helped", text, "", how)
    return Part(DRAFTER, "did not help", f"{text} That is no more than chance.", off, how)


def _drafter_gain(rows: Sequence[Row]) -> tuple[float, float, int]:
    """Gain in acceptance length over all drafters that came into use, its standard error, and their number."""
    gain, variance, published, version = 0.0, 0.0, 0, 0.0
    for row in rows:
        if row.get("drafter/version", version) > version and "drafter/heldout_accept_length" in row:
            before = row.get("drafter/heldout_accept_length_before", row["drafter/heldout_accept_length"])
            gain += row["drafter/heldout_accept_length"] - before
            variance += row.get("drafter/heldout_error", 0.0) ** 2
            published += 1
        version = row.get("drafter/version", version)
    return gain, math.sqrt(variance), published


def _idle(total: _Totals) -> tuple[Idle, ...]:
    """Largest first; the rest has no reason."""
    uses = {"update": total.streamed_s, "drafter": total.trained_s}
    for row in total.rows:
        for name, seconds in row.items():
            if name.startswith("idle/untrained_s/"):
                reason = name.rpartition("/")[2]
                uses[reason] = uses.get(reason, 0.0) + seconds
    uses["unknown"] = max(total.idle_s - math.fsum(uses.values()), 0.0)
    known = [Idle(use, seconds) for use, seconds in uses.items() if seconds >= 0.05]
    return tuple(sorted(known, key=lambda item: -item.worker_s))


def _verdict(total: _Totals, parts: Sequence[Part], *, saved_s: float, plain_s: float) -> str:
    if not total.rows:
        return "nothing to judge: no step was recorded"
    how = "rollouts measured" if any("timing_s/gen_plain" in row for row in total.rows) else "estimate"
    count = f"{len(total.rows)} step{'s' if len(total.rows) > 1 else ''}"
    if abs(saved_s) < _NOTICEABLE * total.step_s:
        head = f"nothing saved in {count} of {total.step_s:.1f} s"
    elif saved_s < 0:
        head = f"{-saved_s:.1f} s lost in {count} of {total.step_s:.1f} s ({how})"
    else:
        most = "at most " if any(part.name == STREAMED and part.outcome == "helped" for part in parts) else ""
        head = f"{most}{saved_s:.1f} s saved of about {plain_s:.1f} s in {count} ({saved_s / plain_s:.0%}, {how})"
    return "; ".join([head, *(_in_words(part) for part in parts)])


def _in_words(part: Part) -> str:
    if part.outcome == "helped":
        if part.name == STREAMED:
            return f"{part.name} at most {part.saved_s:.1f} s"
        return f"{part.name} helped" if part.saved_s is None else f"{part.name} {part.saved_s:+.1f} s"
    if part.outcome in ("off", "not measured"):
        return f"{part.name} was {part.outcome}"
    why = f"set {part.change}" if part.change else part.finding[0].lower() + part.finding[1:].rstrip(".")
    seconds = "" if abs(part.saved_s or 0.0) < 0.05 else f"{part.saved_s:+.1f} s, "
    return f"{part.name} {'was ' if part.outcome == 'not used' else ''}{part.outcome} ({seconds}{why})"
