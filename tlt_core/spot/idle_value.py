"""What an idle second is worth, and so what an idle worker does first: the policy update, or the drafter.

    the update     1 / W           seconds of this step, W workers: what is not done now, all of them do later
    the drafter    g u n / (d c)   seconds of later steps

g is the relative gain in acceptance length from one phase of training, n the phases that it lasts, at most those that
the run has left.  It matters in the t seconds in which somebody is idle, as far as the tuner uses this drafter in them:
a share u.  So a phase of training gains g u n t seconds.  It took d t seconds, on c workers at a time.  All of this is
measured (`payoff`).  At the start g is a usual value, and high: a drafter that does not know the policy's newest habits
gains much.  Later g falls, and the update comes first; in a short run it does so from the start.

Training follows when no pass is left.  Passes follow when the drafter cannot be trained.
"""

_LEAST_USED = 0.1  # a drafter that is not used now may be once it is trained


def update_worth(num_workers: int) -> float:
    """Seconds gained by an idle second that computes passes of the update."""
    return 1 / num_workers


def drafter_worth(gain: float, *, used: float, lasting_phases: int, share: float, workers: float) -> float:
    """Seconds gained by an idle second that trains the drafter.

    gain: g.  used: u.  share: d, of the time in which somebody is idle.  workers: c, that train at a time.
    """
    return max(gain, 0.0) * max(used, _LEAST_USED) * lasting_phases / (max(share, 0.05) * max(workers, 1.0))
