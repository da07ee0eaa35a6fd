"""What the trial of the rewards says before a run: real data, real scoring processes."""

import json
from pathlib import Path

import pytest

from conf.load import load
from conf.run import RunConfig
from tlt_core.data import dataset
from tlt_core.grpo.reward import RewardError
from tlt_core.model.load import load_tokenizer
from tlt_core.run import reward_probe

OWN = "tests.tlt_core.grpo.batch_rewards"


@pytest.fixture
def said(tmp_path, monkeypatch, caplog, embedded_model):
    """`said(settings...)`: the warnings of the trial."""
    monkeypatch.setenv("TLT_HOME", str(tmp_path / "home"))

    def run(*settings: str) -> list[str]:
        cfg: RunConfig = load("conf/smoke.yaml", settings)
        tokenizer = load_tokenizer(embedded_model)
        out = tmp_path / "data"
        manifest = dataset.prepare(
            cfg.data, tokenizer=tokenizer, vocab_size=49_152, max_prompt_tokens=1024, out_dir=out
        )
        caplog.clear()
        reward_probe.probe(cfg, data_dir=out, model_dir=embedded_model, digest=manifest.digest)
        return [record.getMessage() for record in caplog.records if record.name == reward_probe.log.name]

    return run


def rows(folder: Path, answers: list[object]) -> str:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"q{i}", "answer": a}) + "\n" for i, a in enumerate(answers)))
    return f"data={{kind: file, train_path: {path}, validation_fraction: 0.01}}"


def test_good_rows_need_no_word_and_are_tried_once(said, tmp_path, monkeypatch):
    data = rows(tmp_path, [rf"\frac{{{i}}}{{7}}" for i in range(1, 13)])
    assert said(data, "reward.functions=[{kind: math_verify}, {kind: format}, {kind: exact}]") == []
    monkeypatch.setattr(reward_probe, "Scorer", None)
    assert said(data, "reward.functions=[{kind: math_verify}, {kind: format}, {kind: exact}]") == []


def test_references_that_cannot_be_read_are_named_with_their_rows(said, tmp_path):
    answers = [rf"{i}\sqrt{{{i}}}" for i in range(2, 14)]
    answers[4] = r"\frac{3}{"
    answers[9] = r"x^{2"
    (line,) = said(rows(tmp_path, answers), "reward.functions=[{kind: math_verify}]")
    assert "the reference answer does not earn full marks for 2 of 11 prompts (18%)" in line
    assert rf"{tmp_path}/rows.jsonl, line 5 ({answers[4]!r})" in line
    assert rf"{tmp_path}/rows.jsonl, line 10 ({answers[9]!r})" in line


def test_a_reward_that_nothing_satisfies_is_refused(said, tmp_path):
    with pytest.raises(RewardError, match=r"none of .* reference answers earns full marks"):
        said(rows(tmp_path, [r"\frac{3}{"] * 6), "reward.functions=[{kind: math_verify}]")


def test_a_reward_for_a_source_that_no_row_has_is_refused(said, tmp_path):
    functions = "reward.functions=[{kind: exact}, {kind: exact, sources: [openai/gsm8k]}]"
    with pytest.raises(
        RewardError, match=r"sources=\['openai/gsm8k'\], which is no task of the data \(its tasks: file\)"
    ):
        said(rows(tmp_path, [1, 2, 3]), functions)


def test_tasks_that_a_constant_solves_are_named(said):
    """reasoning-gym 0.1.25 gives full marks to 0, to NaN."""
    lines = said(
        "data={kind: reasoning_gym, tasks: [{name: complex_arithmetic}, {name: coin_flip}, {name: chain_sum}], "
        "num_train: 60, num_validation: 8}",
        "reward.functions=[{kind: reasoning_gym}]",
        "coldstart.enabled=false",
    )
    assert any("task 'coin_flip'" in line and "the constant '0' earns full marks" in line for line in lines), lines
    assert any("task 'complex_arithmetic'" in line and "the constant 'nan'" in line for line in lines), lines
    assert not any("chain_sum" in line for line in lines)


def test_a_function_that_fails_for_every_reference_is_refused(said, tmp_path):
    good, bad = (
        f"reward.functions=[{{kind: python, path: '{OWN}:{name}', batch: true}}]" for name in ("lengths", "too_few")
    )
    data = rows(tmp_path, [str(i) for i in range(6)])
    assert said(data, good) == []
    with pytest.raises(RewardError, match=r"failed for all of 4 reference answers .*returned 0 rewards"):
        said(data, bad)
