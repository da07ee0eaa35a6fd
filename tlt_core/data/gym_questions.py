"""Questions of a reasoning-gym mixture, by index range.

reasoning-gym derives item i from Random(seed + i), so neighbouring seeds share almost all their items.  Each task of
the mixture therefore gets its own wide index range, and the two splits and the cold start use different parts of it.
Small tasks repeat questions even so, and callers also exclude questions by their text.
"""

import importlib.metadata
import json
import random
from collections.abc import Iterator
from typing import Any

from conf.data import GymData
from tlt_core.data.question import DataError, Question

_TASK_STRIDE = 100_000_000  # seeds between two tasks of a mixture
_MAX_TRIES = 50  # items tried for each one wanted, before a task counts as exhausted
_TRAIN_FIRST_INDEX = 1_000_000
_FULL_SCORE = 0.99


def splits(cfg: GymData) -> tuple[list[Question], list[Question]]:
    """Training and validation questions, shuffled; no question is in both."""
    order = random.Random(cfg.seed)
    validation = gym_items(cfg, count=cfg.num_validation, first_index=0, exclude=set())
    held_out = {i.question for i in validation}
    train = gym_items(cfg, count=cfg.num_train, first_index=_TRAIN_FIRST_INDEX, exclude=held_out)
    order.shuffle(validation)
    order.shuffle(train)
    return train, validation


def generator() -> str:
    """Name and version of the generator.  The package's own `__version__` is out of date."""
    return f"reasoning-gym {importlib.metadata.version('reasoning-gym')}"


def gym_items(cfg: GymData, *, count: int, first_index: int, exclude: set[str]) -> list[Question]:
    """`count` distinct questions of the mixture, none of them in `exclude`, from items first_index onwards."""
    total_weight = sum(t.weight for t in cfg.tasks)
    shares = [int(count * t.weight / total_weight) for t in cfg.tasks]
    for position in range(count - sum(shares)):
        shares[position % len(shares)] += 1
    seen, items = set(exclude), []
    for number, share in enumerate(shares):
        found = 0
        for item in _stream(cfg, number, first_index=first_index, limit=max(share, 1) * _MAX_TRIES):
            if found == share:
                break
            if item.question not in seen:
                seen.add(item.question)
                items.append(item)
                found += 1
        if found < share:
            task = cfg.tasks[number]
            raise DataError(
                f"task {task.name!r} with config={task.config} has only {found} distinct questions where {share} are "
                "wanted; widen its settings, lower its weight, or lower the number of prompts"
            )
    return items


def _stream(cfg: GymData, number: int, *, first_index: int, limit: int) -> Iterator[Question]:
    import reasoning_gym

    task = cfg.tasks[number]
    seed = (cfg.seed * len(cfg.tasks) + number) * _TASK_STRIDE % 2**31 + first_index
    try:
        dataset = reasoning_gym.create_dataset(task.name, seed=seed, size=limit, **task.config)
    except (ValueError, TypeError, AssertionError, KeyError) as error:
        raise DataError(
            f"reasoning-gym cannot make task {task.name!r} with config={task.config}: {error}; see its documentation "
            "for names and settings"
        ) from None
    _check_scorable(task.name, dataset[0])
    for index in range(limit):
        entry = dataset[index]
        if entry["answer"] is not None:
            metadata = {**entry["metadata"], "mixture": number}
            yield Question(task.name, entry["question"], str(entry["answer"]), metadata)


def _check_scorable(task: str, entry: dict[str, Any]) -> None:
    """Raises DataError where the reference answer itself is scored as wrong, so that no policy could be right."""
    import reasoning_gym

    if entry["answer"] is None:
        raise DataError(f"task {task!r} has no reference answers (several are right); choose another task")
    stored = entry | {"metadata": json.loads(json.dumps(entry["metadata"], default=str))}
    if reasoning_gym.get_score_answer_fn(task)(str(entry["answer"]), stored) < _FULL_SCORE:
        raise DataError(
            f"task {task!r}: its scorer rejects its own reference answer once the item has been stored as JSON (for "
            "example because it compares tuples); choose another task"
        )
