"""What several runs of one machine share."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from conf.data import FileData
from conf.load import load
from tasks.prepare import prepare_data
from tests.tlt_core.export.conftest import write_tokenizer
from tlt_core.data import file_questions
from tlt_core.data.question import Item
from tlt_core.run import inputs


def test_of_two_runs_that_want_the_same_data_set_one_makes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second waits for the first, and takes what that one has made."""
    monkeypatch.setenv("TLT_HOME", str(tmp_path / "home"))
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"w{i}", "answer": "w3"}) + "\n" for i in range(3, 20)))
    data = f"data={{kind: file, train_path: {rows}}}"
    cfg = load("conf/smoke.yaml", [data, "reward.functions=[{kind: exact}]"])
    write_tokenizer(tmp_path / "words")
    both_inside, making, splits = threading.Event(), [], file_questions.splits

    def slow(own: FileData) -> tuple[list[Item], list[Item]]:
        making.append(threading.current_thread())
        if len(making) == 2:
            both_inside.set()
        both_inside.wait(1.0)  # the other one would come in now
        return splits(own)

    monkeypatch.setattr(file_questions, "splits", slow)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: prepare_data.fn(cfg, tmp_path / "words"), range(2))
    assert first == second
    assert len(making) == 1
    folder = inputs.data_dir(cfg)
    assert [p.name for p in folder.parent.iterdir()] == [folder.name], "nothing else that DVC would track"
