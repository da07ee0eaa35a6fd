"""Speculation in one rollout phase, in figures.  `items/metrics` declares each name, its unit and its meaning."""

from collections import defaultdict
from collections.abc import Sequence

from tlt_core.cluster.messages import GenerateReport

_DEEPEST = 8  # draft positions that are reported


def spec_metrics(reports: Sequence[GenerateReport]) -> dict[str, float]:
    """From the workers' rounds.  Empty when no worker speculates."""
    if not any(report.tuner for report in reports):
        return {}
    drafted = accepted = rounds = active = 0
    reached, passed = [0] * (_DEEPEST + 1), [0] * (_DEEPEST + 1)
    lengths: dict[tuple[int, int], list[int]] = defaultdict(list)  # by (worker, request): tokens of its rounds
    for worker, report in enumerate(reports):
        for trace in report.rounds:
            told = trace.report
            rounds += 1
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
        "rollout/spec_speedup_est": sum(speedups) / len(speedups),
        "rollout/spec_drafter_failures": float(sum(report.drafter_failures for report in reports)),
        "rollout/spec_accept_length": sum(per_round) / len(per_round) if per_round else 1.0,
        "rollout/spec_accept_length_requests": sum(per_request) / len(per_request) if per_request else 1.0,
        "rollout/spec_accept_rate": accepted / drafted if drafted else 0.0,
    }
    for depth in range(1, _DEEPEST + 1):
        if reached[depth]:
            metrics[f"rollout/spec_accept_rate_pos_{depth}"] = passed[depth] / reached[depth]
    return metrics
