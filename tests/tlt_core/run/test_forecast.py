"""The arithmetic of the forecast, on planted rates; how near it comes is what `run.json` of real runs shows."""

import pytest
import torch

from conf.load import load
from conf.run import RunConfig
from tlt_core.machine.rates import Rates, measure
from tlt_core.model.embedded import EMBEDDED_NAME
from tlt_core.model.shapes import KNOWN, shape, shape_of
from tlt_core.run import forecast as module
from tlt_core.run.forecast import Forecast, Sizes, ToDo, forecast, sizes_of
from tlt_core.run.training_pass import layer_pass

EMBEDDED = sizes_of(KNOWN[EMBEDDED_NAME])
ALL = ToDo(model=True, data=True, cold_start=True, first_drafter=True, done_steps=0)
RATES = Rates(train_flops=1e11, read_bytes=1e10, decode_flops=1e11)


def _demo(*changes: str) -> RunConfig:
    fixed = ("num_steps=10", "evaluation.every_steps=5", "rollout.num_prompts=12", "rollout.num_samples=6")
    dtypes = {part: "bfloat16" for part in ("rollout", "update", "coldstart")}
    return load("conf/demo.yaml", (*fixed, *changes)).with_dtypes(**dtypes)


def _forecast(cfg: RunConfig, rates: Rates = RATES, todo: ToDo = ALL) -> Forecast:
    return forecast(cfg, rates, EMBEDDED, todo)


def test_the_size_of_a_model_is_that_of_its_products() -> None:
    tiny = sizes_of(shape("llama", 7, 4, 10, 2, 2, 1))
    # a layer: 4 x (4 + 2 x 2) + 4 x 4 + 3 x 4 x 10 = 168; a drafter's reads twice the width in its first product
    assert (tiny.body, tiny.head, tiny.draft_layer, tiny.all) == (336, 28, 200, 364)


def test_the_embedded_model_is_known_before_it_is_made() -> None:
    assert EMBEDDED.all == 134_479_872  # the 134.5M of its name, norms aside
    assert shape_of(_demo("model.path=some/hub-name").model) is None


def test_training_is_six_operations_a_parameter_and_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_EFFICIENCY", dict.fromkeys(module._EFFICIENCY, 1.0))
    cfg, model = _demo("cluster.num_workers=2"), Sizes(width=1, inner=0, body=1000, head=10, draft_layer=0)
    seconds = module._train_s(cfg, Rates(100.0, 1.0, 1.0), model, tokens=5.0, completions=2.0)
    assert seconds == (6 * 1000 * 5 + 6 * 10 * 2) / 2 / 100
    again = _demo("update.activation_checkpointing=true")
    assert module._train_s(again, Rates(100.0, 1.0, 1.0), model, tokens=5.0, completions=0.0) == 8 * 1000 * 5 / 2 / 100


def test_a_rollout_reads_the_weights_for_its_longest_response_and_computes_every_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_EFFICIENCY", dict.fromkeys(module._EFFICIENCY, 1.0))
    monkeypatch.setattr(module, "_MEAN_SHARE", 0.1)
    cfg = _demo("rollout.speculation.policy=off", "rollout.max_new_tokens=1000")
    model = Sizes(width=1, inner=0, body=900, head=100, draft_layer=0)
    # 1000 passes over 1000 parameters of two bytes; 36 responses of 100 tokens a worker, two operations a parameter
    expected = 1000 * 2000 / 1e6 + 3600 * 2000 / 1e7
    assert module._rollout_s(cfg, Rates(1.0, 1e6, 1e7), model) == pytest.approx(expected)


def test_what_is_there_already_costs_nothing() -> None:
    cfg = _demo()
    whole = _forecast(cfg)
    assert list(whole.stages)[:4] == ["start", "model and data", "cold start", "first drafter"]
    rest = _forecast(cfg, todo=ToDo(False, False, False, False, done_steps=5))
    assert not {"model and data", "cold start", "first drafter"} & rest.stages.keys()
    assert rest.stages["rollouts"] == pytest.approx(whole.stages["rollouts"] / 2)
    assert rest.stages["validations"] == pytest.approx(whole.stages["validations"] / 3)  # after step 10 alone
    done = _forecast(cfg, todo=ToDo(False, False, False, False, done_steps=10))
    assert set(done.stages) == {"start", "workers", "end"}


def test_a_machine_of_twice_the_speed_takes_half_as_long_for_what_it_computes() -> None:
    slow, fast = _forecast(_demo()), _forecast(_demo(), Rates(*(2 * rate for rate in RATES)))
    for stage in ("rollouts", "updates"):
        assert fast.stages[stage] == pytest.approx(slow.stages[stage] / 2)
    assert fast.stages["start"] == slow.stages["start"]
    assert slow.total_s == sum(slow.stages.values())


def test_a_run_that_goes_on_knows_its_own_steps() -> None:
    cfg, todo = _demo(), ToDo(False, False, False, False, done_steps=8)
    found = forecast(cfg, RATES, EMBEDDED, todo, known_s={"rollout": 10.0, "update": 12.0})
    assert (found.stages["rollouts"], found.stages["updates"]) == (20.0, 24.0)
    assert found.phases == {"rollout": 10.0, "update": 12.0}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_rates_of_this_machine_are_measured(dtype: str) -> None:
    asked = {"workers": 2, "threads": 1, "width": 64, "inner": 128, "update_dtype": dtype, "rollout_dtype": dtype}
    found = measure(layer_pass, **asked)
    assert all(rate > 1e6 for rate in found)
    assert found is measure(layer_pass, **asked)


def test_a_training_pass_is_six_operations_a_parameter_and_token() -> None:
    run, operations = layer_pass(width=128, inner=256, dtype=torch.float32)
    run()
    # queries and outputs 2 x 128 x 128, one key and one value head 2 x 128 x 64, gated MLP 3 x 128 x 256; 512 tokens
    assert operations == 6 * 512 * (2 * 128 * 128 + 2 * 128 * 64 + 3 * 128 * 256)
