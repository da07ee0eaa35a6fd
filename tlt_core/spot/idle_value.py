"""What an idle second is worth, and so what an idle worker does first: the policy update, or the drafter.

    the update     1 / W           seconds of this step, W workers: what is not done now, all of them do later
    the drafter    g n / (d c)     seconds of later steps

g is the relative gain in acceptance length from one phase of training, n the phases that it lasts.  Drafts are used in
about the t seconds in which somebody is idle, so a phase of training gains g n t seconds.  It took d t seconds, on c
workers at a time.  Both sides are measured (`payoff`).  At the start g is a usual value, and high: a drafter that does
not know the policy's newest habits gains much.  Later g falls, and the update comes first.

Whatever comes second is done when nothing is left of the first, or when training pauses.
"""


def update_worth(num_workers: int) -> float:
    """Seconds gained by an idle second that computes passes of the update."""
    return 1 / num_workers


def drafter_worth(gain: float, *, lasting_phases: int, share: float, workers: float) -> float:
    """Seconds gained by an idle second that trains the drafter.

    gain: g.  share: d, of the time in which somebody is idle.  workers: c, that train at a time.
    """
    return max(gain, 0.0) * lasting_phases / (max(share, 0.05) * max(workers, 1.0))
