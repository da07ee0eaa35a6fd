"""`tlt plan` for a machine that is not here."""

from pathlib import Path

import pytest

from flows import cli

SEVEN_B = ["plan", "--gpu", "h100", "--model", "qwen2.5-7b"]


def rows(text: str) -> dict[str, float]:
    """What plain decoding takes over what each takes."""
    lines = [line for line in text.splitlines() if "%" in line and "workers of" not in line]
    return {line[:40].strip(): float(line.split()[-3]) for line in lines}


def test_gpus_from_published_rates(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*SEVEN_B, "--lengths", "median=1500,sigma=1.0,cap=16384"]) == 0
    said = capsys.readouterr().out
    found = rows(said)
    assert found["plain"] == 1
    assert 1 < found["streamed update"] < found["speculation, adaptive"] < found["all of TLT"] < 3.5
    assert "8 workers of 1 x h100" in said
    assert "not measured" in said


def test_an_adaptive_length_is_worth_most_where_many_live_at_first(capsys: pytest.CaptureFixture[str]) -> None:
    many = [*SEVEN_B, "--prompts", "512", "--max-live", "512", "--lengths", "median=800,sigma=0.8,cap=16384"]
    assert cli.main(many) == 0
    found = rows(capsys.readouterr().out)
    fixed = next(value for name, value in found.items() if name.startswith("speculation, always"))
    assert found["speculation, adaptive"] > 1.02 * fixed


def test_lengths_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "lengths.jsonl"
    path.write_text("[500, 500]\n" * 16)
    assert cli.main([*SEVEN_B, "--lengths", str(path), "--prompts", "8", "--workers", "2"]) == 0
    assert rows(capsys.readouterr().out)["streamed update"] == 1, "all end together: nobody is idle"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["plan"], "name a run without speculation, or a machine"),
        (["plan", "--model", "qwen2.5-7b", "--max-live", "8"], "--model and --max-live: only with --gpu"),
        (["plan", "--gpu", "h1000", "--model", "qwen2.5-7b"], "--gpu h1000: choose one of l4, rtx4090"),
        (["plan", "--gpu", "h100"], "--gpu needs --model"),
        (["plan", "--gpu", "h100", "--model", "gpt-5"], "--model gpt-5: no known shape"),
        ([*SEVEN_B, "--speculative", "runs/demo"], "--speculative beside --gpu"),
        ([*SEVEN_B, "runs/demo", "--lengths", "median=1,sigma=1,cap=1"], "both give response lengths"),
        ([*SEVEN_B, "--lengths", "nowhere.jsonl"], "name a file, or write such as"),
        (["plan", "--gpu", "rtx4090", "--model", "qwen2.5-32b"], "--gpus-per-worker"),
    ],
)
def test_what_cannot_be_planned_is_refused(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words) == 2
    assert said in capsys.readouterr().err
