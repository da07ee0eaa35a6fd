"""A replica reports what was decoded since its last report, and marks responses with its policy's version."""

from conf.rollout import SpeculationConfig
from tests.decoders import lively
from tests.tlt_core.rollout.playing import play, requests
from tlt_core.items.types import Rollout, SamplingParams
from tlt_core.rollout import build
from tlt_core.rollout.replica import BuiltinReplica


def test_our_engine_as_a_replica():
    decoder = lively()
    engine = build.make_engine(decoder, SpeculationConfig(policy="fixed"), max_live=2, max_len=40, seed=0)
    replica = BuiltinReplica(engine, policy_version=3)

    def decode() -> tuple[list[Rollout], int, int]:
        """Responses, tokens and rounds that were heard of."""
        tokens = []
        finished, rounds = play(
            replica, requests(3), SamplingParams(max_new_tokens=12), on_tokens=tokens.append, worker=1
        )
        return list(finished.values()), sum(tokens), len(rounds)

    finished, tokens, rounds = decode()
    assert {(r.policy_version, r.worker) for r in finished} == {(3, 1)}
    assert tokens == sum(len(r.completion) for r in finished) == 36
    report = replica.report()
    assert len(report.rounds) == rounds > 0
    assert report.tuner["rounds"] == rounds
    assert report.drafter_failures == 0
    assert replica.report().rounds == (), "told already"

    replica.release_memory()
    replica.load_weights([(name, w.clone()) for name, w in decoder.named_parameters()], policy_version=4)
    again, _, rounds = decode()
    assert {r.policy_version for r in again} == {4}
    assert {r.key: r.tokens.tolist() for r in again} == {r.key: r.tokens.tolist() for r in finished}
    assert len(replica.report().rounds) == rounds
    replica.close()
