"""An engine as verl starts it: with its own worker extension, without the policy's weights, asleep between rollouts.

The drafter's weights come from its folder and are still there after the sleep: rounds are those of an engine that
somebody started by hand."""

import pytest

from tests.vllm.scripted import LENGTHS, told

pytestmark = pytest.mark.vllm


def test_drafts_are_as_good_as_without_the_trainer(vllm_python, small):
    policy, drafter = str(small.policy / "model.safetensors"), str(small.drafter)
    by_hand = told(vllm_python, small, drafter=drafter, lengths=LENGTHS, loads=[None])
    trained = told(
        vllm_python,
        small,
        drafter=drafter,
        lengths=LENGTHS,
        load_format="dummy",
        extension="trainer_extension.TrainerExtension",
        loads=[["tlt_load_policy", policy], ["sleep_and_lose_the_drafter", None]],
    )
    (expected,) = by_hand["passes"]
    assert expected["counted"][1] > 20
    for found in trained["passes"]:
        assert found["tokens"] == expected["tokens"]
        assert found["steps"] == expected["steps"]
