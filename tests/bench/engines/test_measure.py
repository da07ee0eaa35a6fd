"""The contest's parent side with engines of a few lines: order, pinning, rates, failures."""

import os
import sys
from pathlib import Path

import pytest

from bench.engines.environment import PeerError
from bench.engines.measure import Case, EngineSpec, compete, cores, own_environment

ENGINE = """
import os, time

def describe(settings):
    return {"cores": sorted(os.sched_getaffinity(0)), "pid": os.getpid()}

def build(settings):
    print("noise on stdout")
    def decode(job):
        with open(settings["journal"], "a") as journal:
            row = [settings["name"], job["new_tokens"], len(job["prompts"]), job["temperature"], job["seed"]]
            journal.write(" ".join(map(str, row)) + chr(10))
        def run():
            time.sleep(0.01 * job["new_tokens"])
            return [[p[0]] * (job["new_tokens"] + settings["extra"]) for p in job["prompts"]]
        return run
    return decode
"""


def spec(tmp_path: Path, name: str, *, most_live: int = 0, extra: int = 0) -> EngineSpec:
    file = tmp_path / "engine.py"
    file.write_text(ENGINE)
    settings = {"name": name, "journal": str(tmp_path / "journal"), "cores": cores(1), "extra": extra}
    return EngineSpec(name, file, Path(sys.executable), dict(os.environ), settings, most_live)


def run(tmp_path, specs, *, repeats=2):
    return compete(
        specs,
        [Case(1, 0.0), Case(2, 1.0)],
        [[5], [6], [7]],
        new_tokens=11,
        repeats=repeats,
        seed=3,
        log_dir=tmp_path / "logs",
    )


def test_every_engine_takes_its_turn_on_every_case(tmp_path):
    contest = run(tmp_path, [spec(tmp_path, "a"), spec(tmp_path, "b", most_live=1)])
    assert {key: len(runs) for key, runs in contest.measured.items()} == {
        ("a", Case(1, 0.0)): 2,
        ("b", Case(1, 0.0)): 2,
        ("a", Case(2, 1.0)): 2,
    }
    journal = (tmp_path / "journal").read_text().splitlines()
    whole = [line for line in journal if line.split()[1] == "11"]
    assert whole == ["a 11 1 0.0 3", "b 11 1 0.0 3", "a 11 2 1.0 3", "b 11 1 0.0 4", "a 11 1 0.0 4", "a 11 2 1.0 4"]
    assert journal[:2] == ["a 1 1 0.0 3", "a 8 1 0.0 3"]  # the warm-up
    assert contest.measured["a", Case(2, 1.0)][0].tokens == [[6] * 11, [7] * 11]
    assert all(row["cores"] == cores(1) for row in contest.described.values())
    assert len({row["pid"] for row in contest.described.values()}) == 2
    assert all(not Path(f"/proc/{row['pid']}").exists() for row in contest.described.values())


@pytest.mark.parametrize("broken", ["import no_such_module", None], ids=["start", "warm-up"])
def test_an_engine_that_fails_says_why_and_is_left_out_if_it_is_optional(tmp_path, broken):
    other, why = spec(tmp_path, "b", extra=-1), "no_such_module" if broken else "tokens were wanted"
    if broken:
        other = other._replace(file=tmp_path / "broken.py")
        other.file.write_text(broken)
    with pytest.raises(PeerError, match=rf"engine b ended.*\n(.*\n)*.*{why}"):
        run(tmp_path, [other])
    contest = run(tmp_path, [spec(tmp_path, "a"), other._replace(optional=True)])
    assert {name for name, _ in contest.measured} == {"a"} == contest.described.keys()
    assert contest.failed.keys() == {"b"}
    assert why in contest.failed["b"]


@pytest.mark.slow
@pytest.mark.long
def test_our_engine_and_transformers_decode_the_same(tiny_folder, tmp_path):
    common = {"model": str(tiny_folder), "dtype": "float32", "threads": 1, "cores": cores(1)}
    more = {"max_live": 2, "max_len": 32, "speculation": {"policy": "cost_model"}, "lookup_tokens": 0}
    folder = Path(__file__).parents[3] / "bench/engines/processes"
    own, hf = (
        EngineSpec(name, folder / f"{name}.py", Path(sys.executable), own_environment(threads=1), common | more)
        for name in ("builtin", "hf")
    )
    prompts, case = [[1, 9, 4, 17, 30], [1, 12, 8]], Case(2, 0.0)
    contest = compete([own, hf], [case], prompts, new_tokens=9, repeats=1, seed=0, log_dir=tmp_path)
    ours, theirs = contest.measured["builtin", case][0], contest.measured["hf", case][0]
    assert ours.tokens == theirs.tokens
    assert [len(row) for row in ours.tokens] == [9, 9]
