"""Every metric of a run: name, unit, aggregation, meaning, and when a step has it.  Others fail a test.

    python -m tlt_core.items.metrics > docs/metrics.md

A part in braces stands for a generated word without a slash.
"""

import functools
import re
from collections.abc import Iterable
from typing import NamedTuple

_TABLE = """
# Rewards and advantages
critic/score/mean | reward | mean over responses | weighted sum of the reward functions
critic/rewards/mean | reward | mean over responses | score less overlong and KL penalties
reward/{function}/mean | reward | mean over responses | one reward function, before its weight
reward/sample_s_max | s | maximum over responses | time to score a response
reward/num_ok | responses | count | scored
reward/num_unparseable | responses | count | no answer was found in the response
reward/num_timeout | responses | count | scoring exceeded `reward.timeout_s`; the score is 0
reward/num_error | responses | count | a reward function raised; its score is 0
training/frac_reward_zero_std | share | over groups | groups whose scores are all equal, before shaping
training/resample_rounds | rounds | count | extra rounds of sampling | dynamic sampling
training/informative_groups | groups | count | groups with different rewards kept | dynamic sampling

# Validation
> A task `all` stands for all of them.  A response passes when its main reward, from the first function in
> `reward.functions` that is not `format`, is 1 or more.
val-core/{task}/reward/greedy | reward | mean over prompts | score of the greedy response | validation
val-core/{task}/reward/mean_at_{k} | reward | mean over prompts and k samples | score | validation
val-core/{task}/reward/error_at_{k} | reward | over prompts | standard error of mean_at_{k} | validation
val-core/{task}/reward/pass_at_{k} | share | over prompts | prompts that at least one of k samples passes | validation

# Responses
response_length/mean | tokens | mean over responses | length of a response
num_turns/mean | turns | mean over responses | the policy's turns in an episode | environment
response_length/max | tokens | maximum over responses | length of a response
response_length/p50 | tokens | median over responses | length of a response
response_length/p90 | tokens | 90th percentile over responses | length of a response
response_length/p99 | tokens | 99th percentile over responses | length of a response
response_length/clip_ratio | share | over responses | cut at `rollout.max_new_tokens`
rollout/tail_ratio | ratio | p99 / p50 | how long the tail of response lengths is
rollout/entropy_est | nats | mean over tokens | negative log-probability of the sampled token
rollout/plain_speedup | ratio | of the step's rollouts | time of plain decoding over time with TLT | a comparison
rollout/plain_equal_frac | share | over responses | the same tokens when decoded plainly | a comparison
rollout/checksum | 48 bits | over all tokens | equal figures: equal rollouts, token for token

# Speculation
> The acceptance length is what a request gets from a speculative round, the bonus token included: 1 is no gain.
> A draft can be accepted at depth i if it was accepted at depth i - 1.  Cumulative figures count from the run's start.
rollout/spec_accept_length | tokens | mean over requests and rounds | acceptance length | speculation
rollout/spec_accept_length_requests | tokens | mean over requests of their means | the same | speculation
rollout/spec_accept_rate | share | over drafts | verified draft tokens accepted | speculation
rollout/spec_accept_rate_pos_{i} | share | over drafts | accepted at depth i, of those that can be | drafts were made
rollout/spec_active_frac | share | over rounds | speculative rounds | speculation
rollout/spec_speedup_est | ratio | cumulative, mean over workers | estimated plain over actual decode time | speculation
rollout/spec_drafter_failures | proposals | cumulative, sum over workers | drafts that could not be used | speculation

# Idle time of the rollout phases
idle/idle_s | worker s | sum over workers | without a request, until rollout has ended everywhere
idle/idle_ratio | share | of worker time | the same, relative
idle/harvested_s | worker s | sum over workers | idle time used, for the update or the drafter
idle/streamed_s | worker s | sum over workers | idle time used for passes of the policy update
idle/long_idle_s | worker s | sum over workers | idle time in windows of more than 0.5 s
idle/harvested_ratio | share | of long_idle_s | long windows' time that was used | there were such windows
idle/streamed_share | share | of tokens with a gradient | the update computed in idle time | not off
idle/untrained_s/{reason} | worker s | sum over workers | unused, by reason | idle
idle/wait_s | s | sum | rollout after its last response, until passes of the update in hand were done
idle/preempt_ms_p95 | ms | 95th percentile, worst phase | from rollout's end until idle work stopped | idle work

# The drafter
> Idle workers train a candidate.  Before it is published, it is measured beside the drafter in use on held-back
> responses.  The first drafter is trained before step 1; its own figures are of held-out responses.
drafter/trained_tokens | tokens | sum over workers | tokens trained on in this step | drafter training
drafter/optimizer_steps | steps | sum over workers | optimizer steps in this step | drafter training
drafter/optimizer_steps_total | steps | sum over workers | the same since the start | drafter training
drafter/buffer_tokens | tokens | sum over workers | hidden states kept for training | drafter training
drafter/buffer_sequences | responses | sum over workers | the same, in responses | drafter training
drafter/loss | nats | mean over tokens | training loss (a probability with loss `tv`) | drafter training
drafter/overlap | share | mean over tokens | chance that the first draft is accepted | drafter training
drafter/acc_top1 | share | over tokens | drafter and policy have the same likeliest token | drafter training
drafter/version | count | last value | drafters published so far | drafter training
drafter/policy_version_lag | RL steps | last value | age of the policy that it learnt from last | drafter training
drafter/rejected | 0 or 1 | last value | a candidate drafted worse and was refused | drafter training
drafter/heldout_accept_length | tokens | mean over tokens | acceptance length of the candidate | measured
drafter/heldout_accept_length_before | tokens | mean over tokens | acceptance length of the one in use before | measured
drafter/heldout_tokens | tokens | sum | held-back tokens measured on | measured
drafter/heldout_error | tokens | standard error | of the difference between both | measured
drafter/alarm | workers | count | a drafter is suspended: none of its first drafts was accepted
drafter/warmup_rollouts | responses | count | responses sampled for it | first drafter
drafter/warmup_tokens | tokens | sum | tokens of the responses trained on | first drafter
drafter/vocab_coverage | share | over held-out tokens | tokens in its vocabulary | first drafter
drafter/loss_train | nats | last optimizer step | training loss | first drafter
drafter/loss_held_out_first | nats | mean over tokens | loss before training | first drafter
drafter/loss_held_out | nats | mean over tokens | loss after training | first drafter
drafter/accept_len_sim | tokens | mean over tokens | acceptance length of chains | first drafter
drafter/overlap_pos_{i} | share | mean over tokens | chance that draft i is accepted | first drafter

# The update
> Means over the step's optimizer steps, unless said otherwise.  Absent when every response was masked out.
actor/pg_loss | reward | as `algorithm.loss_aggregation` | policy-gradient loss
actor/kl_loss | nats | as `algorithm.loss_aggregation` | KL estimate to the reference policy
actor/pg_clipfrac | share | over response tokens | the ratio was clipped
actor/pg_clipfrac_lower | share | over response tokens | the dual clip applied
actor/ppo_kl | nats | mean over response tokens | KL estimate from the policy before the step to the current one
actor/entropy | nats | mean over response tokens | entropy of the policy
actor/grad_norm | norm | mean over optimizer steps | of the gradient, before clipping
actor/lr | per step | last optimizer step | learning rate
training/tis_weight_mean | ratio | mean over response tokens | truncated importance weight, update over rollout
training/rollout_probs_diff_mean | probability | mean over response tokens | update's against rollout's, absolute
training/rollout_probs_diff_max | probability | maximum over response tokens | the same difference
training/rollout_actor_probs_pearson_corr | correlation | over response tokens | update's with rollout's probabilities
training/policy_version | RL steps | last value | steps that the published policy has seen

# Time and throughput
timing_s/step | s | sum | the whole step
timing_s/gen | s | sum | rollout
timing_s/publish_drafter | s | sum | choosing and publishing the drafter | drafter training
timing_s/reward | s | sum | waiting for scores after rollout
timing_s/ref | s | sum | log-probabilities under the reference policy | a KL term
timing_s/update_actor | s | sum | update
timing_s/update_weights | s | sum | loading the new weights into the rollout replicas
timing_s/gen_plain | s | sum | the same rollouts by plain decoding | a comparison
timing_s/testing | s | sum | validation | validation
timing_s/save_checkpoint | s | sum | checkpoint | a checkpoint is due
timing_s/tracking | s | sum | figures, samples and metrics
timing_s/overhead | s | sum | step time in which neither a phase nor a worker ran
timing_s/coldstart | s | sum | the cold start | cold start
timing_s/warmup | s | sum | training the first drafter | first drafter
timing_s/warmup_rollouts | s | sum | sampling responses for it | first drafter
perf/overhead_share | share | of the step | `timing_s/overhead`
perf/rollout_share | share | of the step | `timing_s/gen`
perf/rollout_tokens_per_s | tokens / s | of the last rollout | response tokens, all workers
perf/max_memory_gb | GB | largest worker | most that it has held so far: resident, on a GPU reserved by torch
perf/total_num_tokens | tokens | of the last rollout | prompt and response tokens

# The run
training/global_step | RL steps | last value | number of the step
training/epoch | passes | last value | passes over the training prompts at the step's begin
training/resume_attempt | attempts | last value | how often the run was resumed
coldstart/loss_first | nats | first optimizer step | cross-entropy | cold start
coldstart/loss_last | nats | mean of the last ten steps | cross-entropy | cold start
took/{stage}_s | s | whole run | what the stage took | MLflow alone
saved/{part}_s | s | whole run | estimated gain of a part of TLT (`tlt_core/run/savings.py`) | MLflow alone
"""


_FORMER = {"bubble/": "idle/", "drafter/canary_": "drafter/heldout_"}  # in runs and reports of earlier releases


class Metric(NamedTuple):
    """Metric("response_length/p99", "tokens", "99th percentile over responses", "length of a response")"""

    name: str
    unit: str
    aggregation: str
    meaning: str
    when: str = ""


class Section(NamedTuple):
    title: str
    note: str
    metrics: tuple[Metric, ...]


def present_name(name: str) -> str:
    """What a metric of an earlier release is called now."""
    for former, present in _FORMER.items():
        if name.startswith(former):
            return present + name.removeprefix(former)
    return name


def undeclared(names: Iterable[str]) -> list[str]:
    """Names that this file does not declare: a mistake in the code, which must not cost a run its step."""
    return [name for name in names if declaration(name) is None]


@functools.cache
def declaration(name: str) -> Metric | None:
    return next((metric for metric, pattern in _patterns() if pattern.fullmatch(name)), None)


def _section(text: str) -> Section:
    title, *lines = text.strip().splitlines()
    note = " ".join(line[2:] for line in lines if line.startswith("> "))
    metrics = (Metric(*line.split(" | ")) for line in lines if not line.startswith("> "))
    return Section(title, note.replace(".  ", ". "), tuple(metrics))


SECTIONS = tuple(_section(text) for text in _TABLE.split("\n# ")[1:])


@functools.cache
def _patterns() -> tuple[tuple[Metric, re.Pattern[str]], ...]:
    metrics = [metric for section in SECTIONS for metric in section.metrics]
    return tuple((metric, re.compile(re.sub(r"\\{\w+\\}", "[^/]+", re.escape(metric.name)))) for metric in metrics)


def page() -> str:
    lines = [
        "# Metrics",
        "",
        "Generated by `python -m tlt_core.items.metrics > docs/metrics.md`; do not edit it. `runs/NAME/metrics.jsonl`",
        "has one line a step, MLflow has the same. A part in braces stands for a generated word. A metric with nothing",
        "under *when* is in every RL step.",
    ]
    for section in SECTIONS:
        lines += ["", f"## {section.title}", "", *([section.note, ""] if section.note else [])]
        lines += ["| metric | unit | aggregation | meaning | when |", "|---|---|---|---|---|"]
        lines += [f"| `{m.name}` | {m.unit} | {m.aggregation} | {m.meaning} | {m.when} |" for m in section.metrics]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(page(), end="")
