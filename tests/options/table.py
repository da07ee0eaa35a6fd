"""Options that meet: which values each of them takes, and few runs in which every two values meet that may.

    OPTIONS --every pair--> refused at the start: `conf` says no to these two
                        '-> in one of the runs of runs.csv, at least

After a change of options, or of what is refused:

    .venv/bin/uv run --no-project --with covertable==3.2.0 python -m tests.options.table
"""

import csv
import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path

from conf.load import ConfigError, load

Run = Mapping[str, str]  # the name of a value, by option
Pair = frozenset[tuple[str, str]]  # two of a run's items

TABLE = Path(__file__).with_name("runs.csv")
OPTIONS: dict[str, dict[str, tuple[str, ...]]] = {  # option: name of a value: settings
    "advantage": {
        name: (f"algorithm.advantage={name}",) for name in ("grpo", "dr_grpo", "rloo", "reinforce_pp_baseline")
    },
    "kl": {
        "off": (),
        **{
            f"{kind}_{place}": ("algorithm.kl.coef=0.05", f"algorithm.kl.kind={kind}", f"algorithm.kl.place={place}")
            for place in ("loss", "reward")
            for kind in ("k1", "k2", "k3")
            if (kind, place) != ("k1", "loss")  # refused by itself
        },
    },
    "dynamic_sampling": {"no": (), "yes": ("algorithm.dynamic_sampling=true",)},
    "overlong": {"no": (), "yes": ("algorithm.overlong_buffer_tokens=8",)},
    "aggregation": {
        name: (f"algorithm.loss_aggregation={name}",) for name in ("token_mean", "sequence_mean", "constant")
    },
    "mask_truncated": {"no": (), "yes": ("algorithm.mask_truncated=true",)},
    "streamed": {name: (f"update.streamed={name}",) for name in ("auto", "first", "last", "off")},
    "minibatches": {str(n): (f"update.num_minibatches={n}",) for n in (1, 2)},
    "epochs": {str(n): (f"update.num_epochs={n}",) for n in (1, 2)},
    "lora": {"no": (), "yes": ("update.lora={enabled: true, rank: 4}",)},
    "backend": {
        "torch": (),
        **{f"zero{stage}": (f"update.backend={{kind: deepspeed, zero_stage: {stage}}}",) for stage in range(4)},
    },
    "precision": {
        f"{rollout}_{update}": (f"rollout.dtype={rollout}", f"update.dtype={update}")
        for rollout in ("float32", "bfloat16")
        for update in ("float32", "bfloat16")
    },
    "workers": {str(n): (f"cluster.num_workers={n}",) for n in (1, 2)},
    "dispatch": {name: (f"rollout.dispatch={name}",) for name in ("pull", "static")},
    "release": {"no": (), "yes": ("cluster.release_rollout_memory=true",)},
    "policy": {name: (f"rollout.speculation.policy={name}",) for name in ("cost_model", "beg_mab", "fixed", "off")},
    "drafter": {
        "ngram": (),
        "untrained": ("rollout.speculation.drafter_path=DRAFTER", "drafter.idle_training.enabled=false"),
        "eagle3": ("rollout.speculation.drafter_path=DRAFTER",),
    },
    "environment": {
        "none": (),
        "turns": (
            "rollout.environment={path: 'tests.flows.talking:Talk', max_turns: 2, max_turn_tokens: 8}",
            "rollout.max_new_tokens=80",  # both turns fit
        ),
    },
    "engine": {"builtin": ("rollout.engine=builtin",), "vllm": ("rollout.engine=vllm",)},
}


def settings(run: Run) -> list[str]:
    return [setting for option, value in run.items() for setting in OPTIONS[option][value]]


def refusal(run: Run) -> str:
    """Why a run with these values, and defaults for the rest, is refused; empty when it is not."""
    try:
        load("conf/smoke.yaml", settings(run))
    except ConfigError as error:
        return str(error)
    return ""


def pairs(run: Run) -> Iterator[Pair]:
    return map(frozenset, itertools.combinations(run.items(), 2))


def every_pair() -> list[Pair]:
    """Every value of an option with every value of another."""
    both = itertools.combinations(OPTIONS, 2)
    return [frozenset([(a, x), (b, y)]) for a, b in both for x in OPTIONS[a] for y in OPTIONS[b]]


def read() -> list[Run]:
    with TABLE.open() as file:
        return list(csv.DictReader(file))


def write() -> None:
    """The table anew.  Runs of vLLM need an environment of their own, so only its own pairs are in them."""
    import covertable

    refused = [pair for pair in every_pair() if refusal(dict(pair))]
    none_of = [
        {"operator": "or", "conditions": [{"operator": "ne", "left": o, "value": v} for o, v in sorted(pair)]}
        for pair in refused
    ]
    runs: list[Run] = []
    for engine, strength in (("builtin", 2), ("vllm", 1)):
        factors = {o: list(values) if o != "engine" else [engine] for o, values in OPTIONS.items()}
        makes = [covertable.make(factors, constraints=none_of, strength=strength, salt=str(n)) for n in range(4)]
        runs += min(makes, key=len)
    with TABLE.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(OPTIONS), lineterminator="\n")
        writer.writeheader()
        writer.writerows(runs)


if __name__ == "__main__":
    write()
