"""Write docs/results.md, and the table in README.md, from reports/*.json:  python -m bench.results

A new report in the folder appears by itself; `tests/bench/test_results.py` fails until this has run again.  All reports
of a machine are of one commit; those of older ones, in reports/history, are listed and never quoted.
"""

import json
import re
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from bench.results_tables import Report, alike, cell, escape, kind, markdown, number
from tlt_core.items.metrics import present_name

_ROOT = Path(__file__).parents[1]
_BEGIN, _END = "<!-- results: written by `python -m bench.results` -->", "<!-- end of results -->"

_HEAD = """\
# Results

<!-- Written by `python -m bench.results` from reports/*.json: do not edit. -->

Each section below is one report of `tlt bench`. It names the machine, the commit and the command that was typed (an
option `--out`, which only names the report, is left out). All reports of a machine are of one commit, without changes;
older ones are listed [at the end](#history). Figures are medians over the repeats, with minimum and maximum in
brackets. A bound is what a figure has to reach. Tables use the names of the report; [metrics.md](metrics.md) explains
those with a slash.

To repeat a report, train the drafter first that its command names, with the same configuration:

```bash
tlt warmup conf/demo.yaml --out runs/warm/drafter-eagle3
python -m bench.results        # writes this page again, after new reports
```
"""

_MEASURES = {  # by the word behind `tlt bench`
    "step": "The phases of a training step.",
    "rollout": "Decoding on one worker under every speculation policy. `rl`: rollouts of the run's policy. `tail`: its "
    "longest responses among short ones. `short`: responses cut at the median length, so no tail. `raw`: the untrained "
    "model on word problems, where nothing can be guessed. Of the claims, `adaptive` is `cost_model, kept`, whose "
    "tuner knows what it learnt in the repeat before; `adaptive from nothing` is `cost_model`. `off` decodes plainly. "
    "`ratio` is the speed over `off`; `active_frac` the share of rounds that speculate; `differing` the share of "
    "responses unlike those of `off`. The drafter has learnt from other responses to most of these prompts.",
    "demo": "A first run of the demo: what it takes, beside the forecast at its start, and what it brings.",
    "tuner": "The tuner on planted work, on a virtual clock: the right answer is known. `threshold`, which only the "
    "benchmark has, drafts while at most 32 requests live.",
    "e2e": "Whole RL steps. `plain`: no speculation. `fixed`: one strategy in every round. `static`: the adaptive "
    "engine with its first drafter. `streamed`: no speculation, and idle workers compute parts of the policy update. "
    "`trained`: as `static`, and idle workers train the drafter. `tlt`: all of these.",
    "idle": "Whole runs that differ in the drafter. `ngram`: n-grams alone. `static`: the first drafter. `trained`: "
    "it, trained in idle time. `base`, `base_trained`: the same with a drafter of the model before its cold start. "
    "Lengths are tokens a round of long chains on the responses of each block; `error` is the standard error.",
    "engines": "Our engine beside others, on the same prompts and cores. `live` is the number of requests at a time, "
    "`over_plain` the speed over our plain decoding, `differing` the share of responses unlike those of `plain`.",
    "memory": "The memory plan, made before the run, beside the most that a worker has held.",
    "kills": "A run in which one step of ten is struck, by killing a process, beside the same run left alone.",
    "learning": "TLT and TRL's GRPOTrainer from the same start, on the same prompts, with the same noise. Where no two "
    "tokens nearly tie, both must sample the same responses, get the same rewards and make the same update.",
    "peers": "Whole steps of ours and of TRL's GRPOTrainer, all else equal but the noise.",
}

# Configurations of `bench e2e` in the README's table.
_ABLATION = {
    "fixed": "speculation with one draft length",
    "static": "adaptive engine, its first drafter kept",
    "streamed": "plain decoding, update begun in idle time",
    "trained": "adaptive engine, drafter trained in idle time",
    "tlt": "**all of TLT**",
}
_OVER_PLAIN = "over_plain_in_all"
# Further figures there, with a pattern: the first verdict of each report whose claim fits it; in the last one the least
# favourable.
_QUESTIONS = {
    "Decoding while at most four responses are left, adaptive over plain": (
        r"rl: adaptive over plain, tail_tokens_per_s"
    ),
    "Tokens a request gets from a pass at the end of a run, drafter trained in idle time over its first state": (
        r"acceptance length of the last block.*"
    ),
    "Time of a step of TRL's GRPOTrainer with transformers' generation, whose responses are others, over that of TLT": (
        r"step time, TRL over TLT"
    ),
    "Share of responses that equal TRL's token for token while both train with the same noise": (
        r"responses equal to TRL's.*"
    ),
    "Our plain decoding over that of vLLM, transformers and llama.cpp on CPUs, where it does worst": (
        r"plain over .* live, temperature .*"
    ),
}
_LEAST_FAVOURABLE = [*_QUESTIONS][-1]


def load_reports(folder: Path) -> dict[str, Report]:
    """All reports of a folder by name, in alphabetical order.  Raises ValueError on a file that is none."""
    reports: dict[str, Report] = {}
    for path in sorted(folder.glob("*.json"), key=lambda path: path.stem):
        text = path.read_text(encoding="utf-8")
        report = json.loads(text, object_pairs_hook=lambda pairs: {present_name(name): v for name, v in pairs})
        if not isinstance(report, dict) or not {"commit", "command", "machine"} <= report.keys():
            raise ValueError(f"{path} is no report: commit, command and machine are missing; move it elsewhere")
        reports[path.stem] = report
    return reports


def require_one_commit(reports: Mapping[str, Report]) -> None:
    """Raises ValueError where the reports of a machine are of several commits, or of changed files."""
    of_machine: dict[str, tuple[str, str]] = {}
    for name, report in reports.items():
        commit = report["commit"]
        if commit.endswith("-dirty"):
            raise ValueError(
                f"reports/{name}.json: files had changed since {commit[:9]}; commit them and measure again"
            )
        first, known = of_machine.setdefault(_short_machine(report), (name, commit))
        if commit != known:
            raise ValueError(
                f"reports/{first}.json is of {known[:9]} and reports/{name}.json of {commit[:9]}, on the same machine: "
                "make both on one commit, or move the older to reports/history"
            )


def page(reports: Mapping[str, Report], history: Mapping[str, Report]) -> str:
    """docs/results.md."""
    sections = [_section(name, report) for name, report in reports.items()]
    return "\n".join([_HEAD, _missed(reports), *sections, _history(history)])


def readme_table(reports: Mapping[str, Report]) -> str:
    """The README's results, without the comments around them: whole steps by part of TLT, then further ratios."""
    steps = {name: found for name, report in reports.items() if (found := _over_plain(report))}
    whole = sorted(found["tlt"] for found in steps.values() if "tlt" in found)
    lines = []
    if whole:
        gain = (
            _times(whole[0]) if _times(whole[0]) == _times(whole[-1]) else f"{_times(whole[0])} to {_times(whole[-1])}"
        )
        lines = [
            f"**On two CPU cores, where the policy update is half of a step, TLT makes a whole RL step {gain} times as "
            f"fast. The GPU code has not run on a GPU.** By part, with a long tail{_lengths(reports.values())} and all "
            "else equal, times as fast as with plain decoding:",
            "",
        ]
    if steps:
        lines.append(f"| | {' | '.join(_short_machine(reports[name]) for name in steps)} |")
        lines.append("|---" * (len(steps) + 1) + "|")
        for name, words in _ABLATION.items():
            lines.append(f"| {words} | {' | '.join(_times(found.get(name)) for found in steps.values())} |")
        lines.append("")
    if any(found.get("trained", 0.0) < found.get("static", 0.0) for found in steps.values()):
        lines.append("- Training the drafter in idle time does not pay yet in runs as short as these.")
    for question in _QUESTIONS:
        answers = [(_answer(question, report), report) for report in reports.values()]
        values = [f"{_spread(v)} ({_widest(report)})" for v, report in answers if v]
        lines += [f"- {question}: {', '.join(values)}."] if values else []
    verdicts = [v for report in reports.values() for v in report.get("verdicts", ())]
    missed = sum(not v["holds"] for v in verdicts)
    which = "[which](docs/results.md#missed-bounds)"
    held = f"Of {len(verdicts)} targets set beforehand, {len(verdicts) - missed} are met ({which} are not)"
    lines.append(f"- {held}. Every figure, with machine, commit and command: [docs/results.md](docs/results.md).")
    return "\n".join(lines)


def _over_plain(report: Report) -> dict[str, float]:
    """Steps of the tail workload over plain ones, by configuration."""
    return {
        row["configuration"]: row[_OVER_PLAIN]["median"] if isinstance(row[_OVER_PLAIN], Mapping) else row[_OVER_PLAIN]
        for row in report.get("rows", ())
        if row.get("workload") == "tail" and _OVER_PLAIN in row
    }


def _lengths(reports: Iterable[Report]) -> str:
    """Of the responses of the tail workload, in parentheses; "" where no report has them."""
    rows = (row for report in reports for row in report.get("rows", ()) if row.get("workload") == "tail")
    row = next((row for row in rows if "length p50" in row), None)
    if row is None:
        return ""
    return (
        f" (SmolLM2-135M; the median response has {row['length p50']:.0f} tokens, the longest {row['length max']:.0f})"
    )


def _times(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}"


def _spread(verdict: Mapping[str, Any]) -> str:
    value = _times(verdict["value"])
    low, high = map(_times, verdict.get("spread", (verdict["value"],) * 2))
    return value if low == high else f"{value}, from {low} to {high}"


def replace_table(readme: str, table: str) -> str:
    """The README with another table between its two comments.  Raises ValueError when they are not there."""
    before, begin, rest = readme.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not (begin and end):
        raise ValueError(f"README.md lacks {_BEGIN} or {_END}: put both back, each on a line of its own")
    return f"{before}{_BEGIN}\n{table}\n{_END}{after}"


def _missed(reports: Mapping[str, Report]) -> str:
    rows = [
        f"| {escape(v['claim'])} | {_value_of(v)} | {_bound_of(v)} | [{name}](#{name}) |"
        for name, report in reports.items()
        for v in report.get("verdicts", ())
        if not v["holds"]
    ]
    table = ["| claim | measured | bound | report |", "|---|---|---|---|", *rows] if rows else ["None."]
    return "\n".join(["## Missed bounds", "", *table, ""])


def _section(name: str, report: Report) -> str:
    lines, command = [f"## {name}", ""], re.sub(r" --out \S+", "", report["command"])
    lines += [_MEASURES[kind(report)], ""] if kind(report) in _MEASURES else []
    lines += [
        f"- Report: [reports/{name}.json](../reports/{name}.json); repeats: {report.get('repeats', 1)}",
        f"- Machine: {_machine(report)}",
        f"- Commit: `{report['commit']}`",
        f"- Command: `{command}`",
    ]
    environment = " ".join(f"{key}={shlex.quote(value)}" for key, value in report.get("environment", {}).items())
    lines += [f"- Environment: `{environment}`"] if environment else []
    lines += [f"- Conditions: {report['conditions']}"] if "conditions" in report else []
    lines.append("")
    if report.get("verdicts"):
        lines += ["| claim | measured | bound | |", "|---|---|---|---|"]
        lines += [
            f"| {escape(v['claim'])} | {_value_of(v)} | {_bound_of(v)} | {'holds' if v['holds'] else '**missed**'} |"
            for v in report["verdicts"]
        ]
        lines.append("")
    for rows in alike(report):
        lines += [*markdown(rows, kind(report)), ""]
    return "\n".join(lines)


def _history(reports: Mapping[str, Report]) -> str:
    head = "Older measurements, which have not been made again. Some are of changed files (`-dirty`)."
    rows = [
        f"| [{name}](../reports/history/{name}.json) | {_short_machine(r)} | `{r['commit'][:9]}"
        f"{'-dirty' * r['commit'].endswith('-dirty')}` | `{re.sub(r' --out [^ ]+', '', r['command'])}` |"
        for name, r in reports.items()
    ]
    return "\n".join(
        ["## History", "", head, "", "| report | machine | commit | command |", "|---" * 4 + "|", *rows, ""]
    )


def _value_of(verdict: Mapping[str, Any]) -> str:
    low, high = verdict.get("spread", (verdict["value"],) * 2)
    return cell({"median": verdict["value"], "min": low, "max": high})


def _bound_of(verdict: Mapping[str, Any]) -> str:
    """A report says whether a bound holds, and so on which side of it the value has to be."""
    value, bound = verdict["value"], verdict["bound"]
    if value == bound:
        return number(bound)
    return f"{'at least' if (value > bound) == verdict['holds'] else 'at most'} {number(bound)}"


def _answer(question: str, report: Report) -> Mapping[str, Any] | None:
    found = [v for v in report.get("verdicts", ()) if re.fullmatch(_QUESTIONS[question], v["claim"])]
    if question == _LEAST_FAVOURABLE:
        found.sort(key=lambda v: float(v["value"]))
    return next(iter(found), None)


def _short_machine(report: Report) -> str:
    machine = report["machine"]
    what = [*machine.get("gpus", ()), re.sub(r"\(R\)| Processor", "", machine["cpu"]), _widest(report)]
    return f"{', '.join(filter(None, what))}, {machine['cores']} core{'s' * (machine['cores'] > 1)}"


def _widest(report: Report) -> str:
    """The widest instructions that the measured code used."""
    limit = report.get("environment", {}).get("TLT_NATIVE_KERNELS")
    products = "".join(report["machine"].get("bf16_instructions", ()))
    return limit.upper() if limit else ("AMX" if "amx" in products else "AVX-512" if "avx512" in products else "AVX2")


def _machine(report: Report) -> str:
    machine = report["machine"]
    versions = ", ".join(f"{package} {version}" for package, version in machine.get("versions", {}).items())
    threads = f"{machine['threads']} thread{'s' * (machine['threads'] > 1)}"
    return f"{_short_machine(report)}, {threads}, {machine['memory_gb']} GB; Python {machine['python']}, {versions}"


def main() -> None:
    reports = load_reports(_ROOT / "reports")
    require_one_commit(reports)
    readme, whole = _ROOT / "README.md", page(reports, load_reports(_ROOT / "reports" / "history"))
    (_ROOT / "docs" / "results.md").write_text(whole, encoding="utf-8")
    readme.write_text(replace_table(readme.read_text(encoding="utf-8"), readme_table(reports)), encoding="utf-8")
    print(f"{len(reports)} reports: docs/results.md and the table in README.md are up to date")


if __name__ == "__main__":
    main()
