"""What an idle second is worth, and so what an idle worker does first: the policy update, or the drafter.

    the update     1 / W           seconds of this step, W workers: what is not done now, all of them do later
    the drafter    g u n / (d c)   seconds of later steps

g is the relative gain in acceptance length from one phase of training, n the phases that it lasts, at most those that
the run has left.  A phase is one rollout.  Drafts pay where few requests are left, which is when somebody is idle: t
seconds of a rollout.  In a share u of them the tuner uses this drafter.  So the training of one rollout gains g u t
seconds in each of the next n.  It took a share d of t, on c workers at a time: c d t worker seconds.  All of this is
measured (`payoff`).  At the start g is a usual value, and high: a drafter that does not know the policy's newest habits
gains much.  Later g falls, and the update comes first; in a short run it does so from the start.

`run/drafter_publisher` compares the two before each rollout, and `spot/coordinator` goes by the result whenever a
worker asks.  Training follows when no pass is left.  Passes follow when the drafter cannot be trained.
"""

# Floors, so that one odd rollout decides nothing for good.
_LEAST_USED = 0.1  # u: a drafter that is not used now may be once it is trained
_LEAST_SHARE, _FEWEST_WORKERS = 0.05, 1.0  # d and c: of a rollout with hardly any idle time


def update_worth(num_workers: int) -> float:
    """Seconds gained by an idle second that computes passes of the update."""
    return 1 / num_workers


def drafter_worth(gain: float, *, used: float, lasting_phases: int, share: float, workers: float) -> float:
    """Seconds gained by an idle second that trains the drafter.

    gain: g.  used: u.  share: d, of the time in which somebody is idle.  workers: c, that train at a time.
    """
    cost = max(share, _LEAST_SHARE) * max(workers, _FEWEST_WORKERS)
    return max(gain, 0.0) * max(used, _LEAST_USED) * lasting_phases / cost
