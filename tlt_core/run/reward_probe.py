"""Do the reward terms tell right from wrong?  Tried on a sample of the prompts before a run, in the scoring processes.

The reference answer has to earn full marks, another prompt's answer or a constant (a policy would find it) must not; a
function of yours has to return a number.  What fails is a warning with the share of the prompts; a term that nothing
satisfies is refused.  The result is kept under $TLT_HOME, so the same data and rewards are tried once (functions of
yours each time).
"""

import inspect
import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from conf.data import FileData
from conf.reward import RewardConfig
from conf.run import RunConfig
from tlt_core.data import dataset, file_questions
from tlt_core.data.response_text import continued, response_text
from tlt_core.grpo import math_answer, verifiers
from tlt_core.grpo.reward import RewardError, Score, Scorer
from tlt_core.items.store import StoreError, read_json, write_atomically
from tlt_core.items.types import Prompt
from tlt_core.model.load import load_tokenizer, stop_token_ids
from tlt_core.run.inputs import artifacts_dir, short_digest

log = logging.getLogger(__name__)

_RIGHT, _OTHER = "the reference answer", "another prompt's answer"
CONSTANTS = ("0", "nan", "True", "1 2 3")
_REFERENCES, _WRONG, _OWN = 300, 60, 4  # prompts that are tried with right and with wrong answers; with your functions
_AT_ONCE, _MOST_S = 20, 120.0  # prompts between two looks at the time
_FULL = 0.99
_SHOWN = 3
_NOT_TRIED = ("environment", "code_tests")  # a reference answer is no episode, and no code but its tests

Say = Callable[[Prompt, str], str]  # the response with this answer, as a reward would see it


def probe(cfg: RunConfig, *, data_dir: Path, model_dir: Path, digest: str) -> None:
    """Logs what is wrong.  Raises RewardError for a term that nothing satisfies or that no prompt is for.

    digest: of the data set."""
    tokenizer = load_tokenizer(model_dir)
    stop = stop_token_ids(model_dir, tokenizer)

    def say(prompt: Prompt, answer: str) -> str:
        return _response(tokenizer, stop, prompt, answer)

    tasks = dataset.read_manifest(data_dir).tasks
    for term in cfg.reward.functions:
        if not any(map(term.takes, tasks)):
            raise RewardError(
                f"reward {term.name!r} has sources={list(term.sources)}, which is no task of the data (its tasks: "
                f"{', '.join(tasks)}): it would score nothing; mend sources, or leave it out"
            )
    tried = [f for f in cfg.reward.functions if f.kind not in _NOT_TRIED]
    built_in, own = (tuple(f for f in tried if (f.kind in ("python", "judge")) == mine) for mine in (False, True))
    kept = artifacts_dir() / "probes" / f"{_digest(cfg, digest)}.json"
    found: list[str] | None = _known(kept)
    prompts = [] if found is not None and not own else dataset.load(data_dir, "train", tokenizer)
    if found is None:
        found = _tried(cfg, built_in, prompts, say) if built_in else []
        text = json.dumps({"found": found})
        write_atomically(kept, lambda partial: partial.write_text(text))
    for line in found:
        log.warning("%s", line)
    if own:
        _require_numbers(cfg.reward.model_copy(update={"functions": own}), prompts, say)


def _response(tokenizer: Any, stop: Sequence[int], prompt: Prompt, answer: str) -> str:
    text = continued(prompt.opening, f"<think>\nThis is known.\n</think>\n<answer>{answer}</answer>")
    return response_text(tokenizer, tokenizer.encode(text, add_special_tokens=False), stop_token_ids=stop)


def page(cfg: RunConfig, *, data_dir: Path, model_dir: Path) -> list[str]:
    """What the policy will be asked, in lines: counts, lengths, and three prompts as it reads them, each with what the
    reward terms give for the reference answer."""
    tokenizer = load_tokenizer(model_dir)
    stop, manifest = stop_token_ids(model_dir, tokenizer), dataset.read_manifest(data_dir)
    prompts = dataset.load(data_dir, "train", tokenizer)
    lengths = sorted(len(prompt.tokens) for prompt in prompts)
    dropped = f", {manifest.dropped_long} longer ones dropped" if manifest.dropped_long else ""
    lines = [
        f"{manifest.counts['train']} training and {manifest.counts['validation']} validation prompts; "
        f"tasks: {', '.join(f'{task} {count}' for task, count in manifest.tasks.items())}",
        f"tokens of a prompt: median {lengths[len(lengths) // 2]}, p99 {lengths[int(0.99 * (len(lengths) - 1))]}, "
        f"longest {lengths[-1]} (rollout.max_prompt_tokens={cfg.rollout.max_prompt_tokens}{dropped})",
    ]
    shown = _spread(prompts, _SHOWN)
    with Scorer(cfg.reward) as scorer:
        for key, prompt in enumerate(shown):
            scorer.submit(key, prompt, _response(tokenizer, stop, prompt, prompt.answer))
        for prompt, score in zip(shown, scorer.collect(range(len(shown))), strict=True):
            terms = zip(cfg.reward.functions, score.components, strict=True)
            earns = ", ".join(f"{term.name} {value:g}" for term, value in terms if term.kind not in _NOT_TRIED)
            text = tokenizer.decode(prompt.tokens, skip_special_tokens=False)
            lines += ["", f"prompt {prompt.id}:", text, f"reference {prompt.answer!r} earns: {earns}"]
    return lines


def _digest(cfg: RunConfig, data: str) -> str:
    """Of all that the result depends on, the code of the rewards included."""
    code = [inspect.getsource(module) for module in (verifiers, math_answer)]
    chosen = cfg.model_dump(mode="json", include={"reward", "model"})
    return short_digest([chosen, data, code, Path(__file__).read_text()])


def _known(path: Path) -> list[str] | None:
    try:
        found = read_json(path, remedy="").get("found")
    except StoreError:  # it was not tried yet
        return None
    return found if isinstance(found, list) else None


def _tried(cfg: RunConfig, functions: Sequence[Any], prompts: Sequence[Prompt], say: Say) -> list[str]:
    """What to warn of.  Raises RewardError."""
    marks: dict[tuple[str, str, str], list[tuple[Prompt, bool]]] = {}  # by term, task and kind of answer
    reward = cfg.reward.model_copy(update={"functions": tuple(functions)})
    with Scorer(reward) as scorer:
        for prompt, kind, score in _scored(scorer, _answers(prompts), say):
            for function, value in zip(functions, score.components, strict=True):
                if not function.takes(prompt.task):
                    continue
                if kind == _RIGHT or function.kind != "format":  # any answer may be well formed
                    marks.setdefault((function.name, prompt.task, kind), []).append((prompt, value >= _FULL))
    for name in {name for name, _, _ in marks}:
        right = [tried for (term, _, kind), tried in marks.items() if term == name and kind == _RIGHT]
        full = [full for tried in right for _, full in tried]
        if not any(full):
            raise RewardError(
                f"reward {name!r}: none of {len(full)} reference answers earns full marks, so no response ever could; "
                "look at the answers (data.answer_key), or choose another reward (reward.functions)"
            )
    return [line for key, tried in marks.items() if (line := _warning(cfg, *key, tried))]


def _answers(prompts: Sequence[Prompt]) -> Iterator[list[tuple[Prompt, str, str]]]:
    """(prompt, kind, answer), a list for each prompt; prompts are spread evenly over each task."""
    tasks: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        tasks.setdefault(prompt.task, []).append(prompt)
    for of_task in tasks.values():
        chosen = _spread(of_task, max(1, _REFERENCES // len(tasks)))
        also_wrong = {prompt.id for prompt in _spread(chosen, max(1, _WRONG // len(tasks)))}
        for index, prompt in enumerate(chosen):
            others = [other.answer for other in chosen[index:] + chosen[:index] if other.answer != prompt.answer][:1]
            wrong = [(_OTHER, other) for other in others] + [(f"the constant {c!r}", c) for c in CONSTANTS]
            yield [
                (prompt, kind, answer)
                for kind, answer in [(_RIGHT, prompt.answer), *(wrong if prompt.id in also_wrong else [])]
                if kind == _RIGHT or not _same_number(answer, prompt.answer)
            ]


def _spread(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    step = max(1.0, len(prompts) / count)
    return [prompts[int(index * step)] for index in range(min(count, len(prompts)))]


def _same_number(one: str, other: str) -> bool:
    try:
        return float(one) == float(other)
    except ValueError:
        return one.strip().casefold() == other.strip().casefold()


def _scored(
    scorer: Scorer, answers: Iterator[list[tuple[Prompt, str, str]]], say: Say
) -> Iterator[tuple[Prompt, str, Score]]:
    """Until all are scored, or the time is up."""
    until_s = time.monotonic() + _MOST_S
    waiting = [*answers]
    while waiting and time.monotonic() < until_s:
        now, waiting = [one for some in waiting[:_AT_ONCE] for one in some], waiting[_AT_ONCE:]
        for key, (prompt, _, answer) in enumerate(now):
            scorer.submit(key, prompt, say(prompt, answer))
        for (prompt, kind, _), score in zip(now, scorer.collect(range(len(now))), strict=True):
            yield prompt, kind, score


def _warning(cfg: RunConfig, name: str, task: str, kind: str, tried: Sequence[tuple[Prompt, bool]]) -> str:
    """Empty: all is well."""
    bad = [prompt for prompt, full in tried if full != (kind == _RIGHT)]
    if not bad:
        return ""
    share = f"{len(bad)} of {len(tried)} prompts ({len(bad) / len(tried):.0%})"
    where = "" if task == "file" else f", task {task!r}"
    if kind == _RIGHT:
        chosen = {(prompt.text, prompt.answer): prompt.id for prompt in bad[:_SHOWN]}
        places = file_questions.places(cfg.data, set(chosen)) if isinstance(cfg.data, FileData) else {}
        rows = "; ".join(f"{places.get(row, f'prompt {id_}')} ({row[1][-60:]!r})" for row, id_ in chosen.items())
        return (
            f"reward {name!r}{where}: {kind} does not earn full marks for {share}: {rows}.  Responses to them may "
            "never score: mend or remove such rows"
        )
    return (
        f"reward {name!r}{where}: {kind} earns full marks for {share}, so a policy can earn them without the right "
        f"answer{'' if task == 'file' else '; drop the task, or ask for something that cannot be guessed'}"
    )


def _require_numbers(reward: RewardConfig, prompts: Sequence[Prompt], say: Say) -> None:
    """Raises RewardError where functions of yours fail for every prompt that is tried."""
    chosen = _spread(prompts, _OWN)
    with Scorer(reward) as scorer:
        for key, prompt in enumerate(chosen):
            scorer.submit(key, prompt, say(prompt, prompt.answer))
        scores = scorer.collect(range(len(chosen)))
    if all(score.message for score in scores):
        raise RewardError(
            f"a reward function failed for all of {len(scores)} reference answers ({scores[0].message}); mend it, or "
            "what it needs (reward.timeout_s, reward.max_memory_gb, reward.pass_variables)"
        )
