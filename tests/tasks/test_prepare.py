"""What several runs of one machine share, and what is said of the data before a run."""

import json
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from conf.data import FileData
from conf.load import load
from conf.run import RunConfig
from tasks.stages import prepare_data
from tests.tlt_core.export.conftest import write_policy
from tlt_core.data import file_questions
from tlt_core.data.question import Question
from tlt_core.model.config import DecoderConfig, ModelError
from tlt_core.run import inputs


@pytest.fixture
def words(tmp_path: Path, tiny_config: DecoderConfig, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model whose tokens are words, of 512 positions."""
    monkeypatch.setenv("TLT_HOME", str(tmp_path / "home"))
    write_policy(tmp_path / "words", tiny_config)
    return tmp_path / "words"


def _file_run(folder: Path, prompts: Sequence[str], *settings: str) -> RunConfig:
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": prompt, "answer": "w3"}) + "\n" for prompt in prompts))
    data = f"data={{kind: file, train_path: {rows}}}"
    return load("conf/smoke.yaml", [data, "reward.functions=[{kind: exact}]", *settings])


def test_of_two_runs_that_want_the_same_data_set_one_makes_it(
    tmp_path: Path, words: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second waits for the first, and takes what that one has made."""
    cfg = _file_run(tmp_path, [f"w{i}" for i in range(3, 20)])
    both_inside, making, splits = threading.Event(), [], file_questions.splits

    def slow(own: FileData) -> tuple[list[Question], list[Question]]:
        making.append(threading.current_thread())
        if len(making) == 2:
            both_inside.set()
        both_inside.wait(1.0)  # the other one would come in now
        return splits(own)

    monkeypatch.setattr(file_questions, "splits", slow)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: prepare_data.fn(cfg, words), range(2))
    assert first == second
    assert len(making) == 1
    folder = inputs.data_dir(cfg)
    assert [p.name for p in folder.parent.iterdir()] == [folder.name], "nothing else that DVC would track"


def test_long_prompts_that_were_dropped_are_said_with_counts(
    tmp_path: Path, words: Path, caplog: pytest.LogCaptureFixture
) -> None:
    long = [" ".join([f"w{i}"] * 9) for i in range(20, 50)]
    cfg = _file_run(tmp_path, [*long, *(f"w{i}" for i in range(3, 13))], "rollout.max_prompt_tokens=8")
    for _ in range(2):  # also where the data set is there already
        caplog.clear()
        prepared = prepare_data.fn(cfg, words)
        said = "30 of 40 prompts are longer than rollout.max_prompt_tokens=8 tokens and were dropped; "
        assert f"{said}{prepared.count} training and {10 - prepared.count} validation prompts are left" in caplog.text


@pytest.mark.parametrize("section", ["rollout", "evaluation", "retrain"])
def test_a_response_that_leaves_the_context_of_the_model_is_refused(tmp_path: Path, words: Path, section: str) -> None:
    prompts = [" ".join(f"w{i + j}" for j in range(9)) for i in range(3, 13)]
    prepare_data.fn(_file_run(tmp_path, prompts, f"{section}.max_new_tokens=503"), words)
    with pytest.raises(ModelError, match=rf"{section}\.max_new_tokens=504 after a prompt of 9 .*set it to 503 or l"):
        prepare_data.fn(_file_run(tmp_path, prompts, f"{section}.max_new_tokens=504"), words)
