"""Speculation changes no token, whatever is drafted: the theorem of `spec_round`, checked token by token."""

import pytest
import torch

from tests.tlt_core.rollout.playing import PARAMS, Cycle, Oracle, Random, assert_same, play, requests
from tlt_core.items.speculation import OFF, Strategy
from tlt_core.rollout.engine import RolloutEngine, Speculation

SHAPES = (Strategy("d", 1, 1, 1), Strategy("d", 5, 1, 5), Strategy("d", 3, 3, 9), Strategy("d", 6, 2, 16))
JOINING = tuple((at, 3 + 2 * at) for at in range(8))  # (round, requests that have come)


def run(decoder, params, drafter=None, arms=(OFF,), *, max_live=7):
    tuner = Cycle(arms)
    speculation = None if drafter is None else Speculation({drafter.name: drafter}, tuner, strategies=arms)
    engine = RolloutEngine(decoder, max_live=max_live, max_len=96, speculation=speculation)
    return *play(engine, requests(15), params, arrivals=JOINING), tuner


@pytest.fixture(scope="module", params=PARAMS, ids=list(PARAMS))
def case(request, decoder):
    params = PARAMS[request.param]
    return params, *run(decoder, params)[:2]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_right_drafts_change_no_token_and_save_rounds(decoder, case, shape):
    params, plain, plain_rounds = case
    drafter = Oracle(plain)
    speculative, traces, tuner = run(decoder, params, drafter, [shape])
    assert_same(plain, speculative)
    assert len(traces) < len(plain_rounds)
    assert sum(t.tokens for t in traces) == sum(len(r.completion) for r in plain.values())
    assert not drafter.rows, "every request was released"
    assert [report for _, report in tuner.reports] == [t.report for t in traces], "the tuner is told what happened"
    for rows, report in tuner.reports:
        assert len(rows) == report.live == len(report.drafted) == len(report.accepted)
        assert all(0 <= a <= o <= shape.depth for a, o in zip(report.accepted, report.offered, strict=True))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_wrong_and_random_drafts_change_no_token(decoder, case, shape):
    params, plain, _ = case
    for drafter in (Oracle(plain, wrong_every=3), Random()):
        assert_same(plain, run(decoder, params, drafter, [shape])[0])


def test_switching_at_every_round_changes_no_token(decoder, case):
    params, plain, _ = case
    for max_live in (1, 4, 18):
        arms = [OFF, SHAPES[2], SHAPES[0], OFF, OFF]
        assert_same(plain, run(decoder, params, Oracle(plain, wrong_every=4), arms, max_live=max_live)[0])


def test_recorded_hidden_states_are_those_of_a_plain_pass(decoder):
    """Prefill, plain and speculative rounds together: each position's taps are there, aligned with its token, while the
    request lives and when it ends."""

    class Tapped(Oracle):
        taps = (0, 1, 2)

        def borrow(self, hidden):
            self.hidden, self.seen = hidden, {}

        def read(self, row, length):
            states = self.hidden.read(torch.full((length,), row), torch.arange(length))
            self.seen.setdefault(self.rows[row], []).append(states)

        def propose(self, view, strategy):
            for row, length in enumerate(view.lengths):
                self.read(row, length - 1)
            return super().propose(view, strategy)

        def release(self, row, tokens):
            self.read(row, len(tokens) - 1)
            super().release(row, tokens)

    plain = run(decoder, PARAMS["T=1"])[0]
    drafter = Tapped(plain, wrong_every=3)
    run(decoder, PARAMS["T=1"], drafter, [SHAPES[2], OFF])
    for key, rollout in plain.items():
        tokens = rollout.tokens.long()

        def attend(layer, q, k, v):
            return torch.nn.functional.scaled_dot_product_attention(
                *(x.transpose(0, 1)[None] for x in (q, k, v)), is_causal=True, enable_gqa=True
            )[0].transpose(0, 1)

        expected = decoder(tokens, torch.arange(len(tokens)), attend, taps=Tapped.taps).taps_TE
        assert len(drafter.seen[key][-1]) == len(tokens) - 1  # the newest token never went through the target
        for recorded in drafter.seen[key]:
            torch.testing.assert_close(recorded, expected[: len(recorded)], atol=1e-4, rtol=1e-4)
