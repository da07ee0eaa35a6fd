"""The table for those who come from TRL or verl says our defaults."""

from pathlib import Path

from conf.run import RunConfig

PAGE = Path(__file__).parents[2] / "docs" / "coming-from.md"


def test_defaults_are_those_of_the_configuration() -> None:
    rows = [line.split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    assert len(rows) > 15
    data = {"kind": "file", "train_path": "rows.jsonl"}
    reward = {"functions": [{"kind": "exact"}]}
    settings = RunConfig.model_validate(
        {"name": "x", "num_steps": 1, "model": {"kind": "pretrained", "path": "m"}, "data": data, "reward": reward}
    )
    for key, default, *_ in rows:
        value: object = settings
        for part in key.strip("|` ").split("."):
            value = getattr(value, part)
        assert str(value) == default, key
