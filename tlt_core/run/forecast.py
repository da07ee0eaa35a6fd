"""How long a run will take on this machine, stage by stage, from measured rates.

    configuration, model sizes, what is still to do, Rates --> seconds of each stage

Only the lengths of the responses are unknown; they are assumed to be those of the demo.  To calibrate the tables below,
compare `forecast_s` and `took_s` in `runs/NAME/run.json`: both have the seconds of each stage.
"""

from collections.abc import Mapping
from typing import NamedTuple

from conf.run import RunConfig
from tlt_core.machine.rates import Rates
from tlt_core.model.config import DecoderConfig

# Share of the measured rates (`rates.measure`) that a stage reaches.  If it takes twice the forecast, halve its share.
_EFFICIENCY = {
    "update": 0.82,  # of train_flops: uneven packs, and the loss
    "first drafter": 1.0,  # of train_flops: one narrow layer, several times in a row
    "hidden states": 1.0,  # of train_flops: forward only
    "decode pass": 0.5,  # of read_bytes: 30 layers of small products; attention, sampling, Python
    "decode tokens": 0.8,  # of decode_flops: the same
}
# Seconds that do not depend on model and data.
_FIXED_S = {
    "start": 10.0,  # Prefect's server and imports, MLflow's tables
    "workers": 22.0,  # Ray, a process per worker that imports torch, loading: for cold start and for RL
    "drafter": 5.0,  # loading for it, and measuring it
    "model": 15.0,  # the embedded model is de-quantised once
    "data": 5.0,  # reasoning-gym is imported
    "step": 1.5,  # Prefect, figures, metrics, files
    "validation": 2.5,  # workers are told, prompts are dealt
    "checkpoint": 1.0,
    "end": 5.0,  # policy, drafter, the registry
}
# Lengths and ratios of the demo.
_PROMPT_TOKENS = 34  # mean, with the chat template
_SOLUTION_TOKENS = 66  # mean of worked solutions
_MEAN_SHARE = 0.14  # mean response / max_new_tokens: 72 of 512
_VALIDATION_TOKENS = 45  # mean response in validation, which cuts the longest
_LONGEST_SHARE = 1.0  # longest response of a worker / max_new_tokens
_LEARNT_SHARE = 0.65  # of the responses have an advantage; the others need the forward pass only
_SPEEDUP = {"eagle3": 2.3, "ngram": 1.8, "off": 1.0}  # tokens of a request in one round, in the tail
_VERIFIED = {"eagle3": 1.35, "ngram": 1.3, "off": 1.0}  # tokens computed for one that is kept
_PUBLISH_BYTES = 12  # moved per parameter to publish new weights (fp32 read, bf16 written twice, packed)
_OPTIMIZER_BYTES = 200  # moved per parameter and optimizer step: exact sums, their all-reduce, masters, moments


class Sizes(NamedTuple):
    """The sizes of a model that decide how long it computes."""

    width: int
    inner: int
    body: int  # parameters of the layers' matrices
    head: int  # parameters of the LM head
    draft_layer: int  # parameters of a drafter's layer

    @property
    def all(self) -> int:
        """Parameters of all matrices."""
        return self.body + self.head


class ToDo(NamedTuple):
    """What is still to do after earlier attempts and runs."""

    model: bool
    data: bool
    cold_start: bool
    first_drafter: bool
    done_steps: int


class Forecast(NamedTuple):
    """Seconds of a run's stages."""

    stages: dict[str, float]  # in their order; without those that are done
    phases: dict[str, float]  # of one rollout and one update, under the names of `Progress`

    @property
    def total_s(self) -> float:
        """Of all stages."""
        return sum(self.stages.values())


def sizes_of(model: DecoderConfig) -> Sizes:
    """Sizes of a decoder."""
    width, inner = model.hidden_size, model.intermediate_size
    queries, keys = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    others = queries * width + 3 * width * inner
    body = model.num_layers * (width * (queries + 2 * keys) + others)
    draft_layer = 2 * width * (queries + 2 * keys) + others
    return Sizes(width, inner, body, model.vocab_size * width, draft_layer)


def forecast(
    cfg: RunConfig, rates: Rates, model: Sizes, todo: ToDo, *, known_s: Mapping[str, float] | None = None
) -> Forecast:
    """known_s: seconds of a rollout and an update in earlier steps of this run, by phase."""
    steps = cfg.num_steps - todo.done_steps
    phases = {"rollout": _rollout_s(cfg, rates, model), "update": _update_s(cfg, rates, model), **(known_s or {})}
    stages = {"start": _FIXED_S["start"]}
    if todo.model or todo.data:
        stages["model and data"] = todo.model * _FIXED_S["model"] + todo.data * _FIXED_S["data"]
    if todo.cold_start:
        stages["cold start"] = _FIXED_S["workers"] + _cold_start_s(cfg, rates, model)
    if todo.first_drafter:
        stages["first drafter"] = _first_drafter_s(cfg, rates, model)
    stages["workers"] = _FIXED_S["workers"]
    if steps > 0:
        publish_s = model.all * _PUBLISH_BYTES / rates.read_bytes
        stages["rollouts"] = steps * phases["rollout"]
        stages["updates"] = steps * phases["update"]
        saved = sum(_due(cfg.checkpoint.every_steps, s, cfg.num_steps) for s in _steps(cfg, todo))
        stages["rest of the steps"] = steps * (_FIXED_S["step"] + publish_s) + saved * _FIXED_S["checkpoint"]
    if validations := _validations(cfg, todo):
        stages["validations"] = validations * _validation_s(cfg, rates, model)
    stages["end"] = _FIXED_S["end"]
    return Forecast(stages, phases)


def _steps(cfg: RunConfig, todo: ToDo) -> range:
    return range(todo.done_steps + 1, cfg.num_steps + 1)


def _due(every: int, step: int, last: int) -> bool:
    return every > 0 and (step % every == 0 or step == last)


def _validations(cfg: RunConfig, todo: ToDo) -> int:
    every = cfg.evaluation.every_steps
    before = int(every > 0 and todo.done_steps == 0)
    return before + sum(_due(every, step, cfg.num_steps) for step in _steps(cfg, todo))


def _train_s(cfg: RunConfig, rates: Rates, model: Sizes, *, tokens: float, completions: float) -> float:
    """Forward and backward passes, shared by the workers: 2 FLOPs a parameter forward, 4 backward, 2 more for layers
    that are recomputed (activation checkpointing)."""
    a_token = 8 if cfg.update.activation_checkpointing else 6
    flops = a_token * model.body * tokens + 6 * model.head * completions
    return flops / cfg.cluster.num_workers / (rates.train_flops * _EFFICIENCY["update"])


def _optimizer_s(rates: Rates, model: Sizes) -> float:
    return model.all * _OPTIMIZER_BYTES / rates.read_bytes


def _cold_start_s(cfg: RunConfig, rates: Rates, model: Sizes) -> float:
    own = cfg.coldstart
    examples = own.num_examples * own.num_epochs
    tokens = examples * (_PROMPT_TOKENS + _SOLUTION_TOKENS)
    optimizer_s = tokens / own.tokens_per_step * _optimizer_s(rates, model)
    return optimizer_s + _train_s(cfg, rates, model, tokens=tokens, completions=examples * _SOLUTION_TOKENS)


def _update_s(cfg: RunConfig, rates: Rates, model: Sizes) -> float:
    own, responses = cfg.update, cfg.rollouts_per_step
    worth = (_LEARNT_SHARE + (1 - _LEARNT_SHARE) / 3) * own.num_epochs
    completions = responses * _MEAN_SHARE * cfg.rollout.max_new_tokens
    tokens = completions + cfg.rollout.num_prompts * _PROMPT_TOKENS  # a group shares its prompt
    optimizer_s = own.num_epochs * own.num_minibatches * _optimizer_s(rates, model)
    return optimizer_s + worth * _train_s(cfg, rates, model, tokens=tokens, completions=completions)


def _decode_s(rates: Rates, model: Sizes, cfg: RunConfig, *, passes: float, tokens: float, drafter: str) -> float:
    """Time of `passes` forward passes of plain decoding, which make `tokens` tokens."""
    item = 2 if cfg.rollout.dtype == "bfloat16" else 4
    pass_s = model.all * item / (rates.read_bytes * _EFFICIENCY["decode pass"])
    token_s = 2 * model.all / (rates.decode_flops * _EFFICIENCY["decode tokens"])
    return passes / _SPEEDUP[drafter] * pass_s + tokens * _VERIFIED[drafter] * token_s


def _drafter(cfg: RunConfig) -> str:
    speculation = cfg.rollout.speculation
    if speculation.policy == "off":
        return "off"
    return "eagle3" if cfg.needs_first_drafter or speculation.drafter_path is not None else "ngram"


def _rollout_s(cfg: RunConfig, rates: Rates, model: Sizes) -> float:
    """A worker ends with its longest response; the others are decoded in the same passes."""
    own = cfg.rollout
    per_worker = cfg.rollouts_per_step / cfg.cluster.num_workers * _MEAN_SHARE * own.max_new_tokens
    waves = per_worker / own.max_live_requests  # each slot decodes one response after the other
    passes = max(waves, _LONGEST_SHARE * own.max_new_tokens)
    return _decode_s(rates, model, cfg, passes=passes, tokens=per_worker, drafter=_drafter(cfg))


def _validation_s(cfg: RunConfig, rates: Rates, model: Sizes) -> float:
    """Greedy responses, then samples."""
    own = cfg.evaluation
    longest = own.max_new_tokens or cfg.rollout.max_new_tokens
    total_s = _FIXED_S["validation"]
    for samples in (1, own.num_samples):
        tokens = own.num_prompts * samples / cfg.cluster.num_workers * min(_VALIDATION_TOKENS, longest)
        passes = max(tokens / cfg.rollout.max_live_requests, longest * bool(samples))
        total_s += _decode_s(rates, model, cfg, passes=passes, tokens=tokens, drafter=_drafter(cfg))
    return total_s


def _first_drafter_s(cfg: RunConfig, rates: Rates, model: Sizes) -> float:
    """Responses, hidden states, training: in one process, with the threads of all workers."""
    own, workers = cfg.drafter, cfg.cluster.num_workers
    together = Rates(*(rate * workers for rate in rates))
    responses = own.num_prompts * own.num_samples
    tokens = responses * _MEAN_SHARE * cfg.rollout.max_new_tokens
    passes = tokens / cfg.rollout.max_live_requests + _LONGEST_SHARE * cfg.rollout.max_new_tokens
    sampled_s = _decode_s(together, model, cfg, passes=passes, tokens=tokens, drafter="ngram")
    seen = tokens + responses * _PROMPT_TOKENS
    observed_s = 2 * model.all * seen / (together.train_flops * _EFFICIENCY["hidden states"])
    a_row = own.depth * (model.draft_layer + model.width * own.vocab_size) + 3 * model.width**2
    trained = own.num_steps * own.tokens_per_step
    trained_s = 6 * a_row * trained / (together.train_flops * _EFFICIENCY["first drafter"])
    return _FIXED_S["drafter"] + sampled_s + observed_s + trained_s
