"""A replica reports what was decoded since its last report, and marks responses with its policy's version."""

import torch

from conf.rollout import SpeculationConfig
from tests.tlt_core.drafter.eagle3.training_texts import lively_decoder
from tlt_core.items.types import GenerationRequest, NoiseKey, Rollout, SamplingParams
from tlt_core.rollout import build
from tlt_core.rollout.own import OwnReplica


def test_our_engine_as_a_replica(tiny_config):
    decoder = lively_decoder(tiny_config)
    engine = build.make_engine(decoder, SpeculationConfig(policy="fixed"), max_live=2, max_len=40, seed=0)
    replica = OwnReplica(engine, policy_version=3)

    def decode(step: int) -> tuple[list[Rollout], int, int]:
        """Responses, tokens and rounds that were heard of."""
        waiting = [GenerationRequest(NoiseKey(0, step, p, 0), torch.arange(3, 7).int()) for p in range(3)]
        finished, tokens, rounds = [], [], []
        replica.decode(
            lambda wanted: [waiting.pop() for _ in range(min(wanted, len(waiting)))],
            finished.append,
            SamplingParams(max_new_tokens=12),
            on_tokens=tokens.append,
            on_round=rounds.append,
            worker=1,
        )
        return finished, sum(tokens), len(rounds)

    finished, tokens, rounds = decode(1)
    assert {(r.policy_version, r.worker) for r in finished} == {(3, 1)}
    assert tokens == sum(len(r.completion) for r in finished) == 36
    report = replica.report()
    assert len(report.rounds) == rounds > 0
    assert report.tuner["rounds"] == rounds
    assert report.drafter_failures == 0
    assert replica.report().rounds == (), "told already"

    replica.release_memory()
    replica.load_weights([(name, w.clone()) for name, w in decoder.named_parameters()], policy_version=4)
    again, _, rounds = decode(1)
    assert {r.policy_version for r in again} == {4}
    assert {r.key: r.tokens.tolist() for r in again} == {r.key: r.tokens.tolist() for r in finished}
    assert len(replica.report().rounds) == rounds
    replica.close()
