"""Speculation in one rollout phase, in figures.  `items/metrics` declares each name, its unit and its meaning."""

from collections import defaultdict
from collections.abc import Sequence

from tlt_core.cluster.messages import GenerateReport
from tlt_core.tuner.ledger import live_bucket

_DEEPEST = 8  # draft positions that are reported
_TAIL_LIVE = 4  # a round with at most this many live requests is in the tail


def spec_metrics(reports: Sequence[GenerateReport]) -> dict[str, float]:
    """From the workers' rounds.  Empty when no worker speculates."""
    if not any(report.tuner for report in reports):
        return {}
    drafted = accepted = rounds = active = switches = 0
    seconds = draft_s = tail_s = 0.0
    speculative: dict[str, list[bool]] = defaultdict(list)  # by live requests: of each round
    reached, passed = [0] * (_DEEPEST + 1), [0] * (_DEEPEST + 1)
    lengths: dict[tuple[int, int], list[int]] = defaultdict(list)  # by (worker, request): tokens of its rounds
    for worker, report in enumerate(reports):
        before = None
        for trace in report.rounds:
            told = trace.report
            rounds += 1
            seconds += trace.seconds
            draft_s += told.draft_s + told.backlog_s
            switches += before not in (None, told.strategy)
            before = told.strategy
            speculative[live_bucket(told.live)].append(not told.strategy.is_off)
            tail_s += trace.seconds if told.live <= _TAIL_LIVE else 0.0
            if told.strategy.is_off:
                continue
            active += 1
            drafted += sum(told.drafted)
            accepted += sum(told.accepted)
            for number, offer, hits in zip(trace.numbers, told.offered, told.accepted, strict=True):
                lengths[worker, number].append(1 + hits)
                for depth in range(1, min(offer, _DEEPEST) + 1):
                    reached[depth] += hits >= depth - 1
                    passed[depth] += hits >= depth
    per_round = [length for of_request in lengths.values() for length in of_request]
    per_request = [sum(of_request) / len(of_request) for of_request in lengths.values()]
    speedups = [report.tuner["speedup_est"] for report in reports if report.tuner]
    metrics = {
        "rollout/spec_active_frac": active / max(rounds, 1),
        "rollout/spec_switches": float(switches),
        "rollout/spec_speedup_est": sum(speedups) / len(speedups),
        "rollout/spec_draft_share": draft_s / max(seconds, 1e-9),
        "rollout/spec_tail_time_share": tail_s / max(seconds, 1e-9),
        "rollout/spec_drafter_failures": float(sum(report.drafter_failures for report in reports)),
        "rollout/spec_accept_length": sum(per_round) / len(per_round) if per_round else 1.0,
        "rollout/spec_accept_length_requests": sum(per_request) / len(per_request) if per_request else 1.0,
        "rollout/spec_accept_rate": accepted / drafted if drafted else 0.0,
    }
    for live, chosen in speculative.items():
        metrics[f"rollout/spec_active_frac_live_{live}"] = sum(chosen) / len(chosen)
    for depth in range(1, _DEEPEST + 1):
        if reached[depth]:
            metrics[f"rollout/spec_accept_rate_pos_{depth}"] = passed[depth] / reached[depth]
    return metrics
