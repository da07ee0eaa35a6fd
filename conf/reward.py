"""Configuration: what responses are scored by."""

import re
from typing import Literal

from pydantic import Field, model_validator

from conf.section import Section


def task_of(source: str) -> str:
    """A data source as the name of a task: openai/gsm8k is openai_gsm8k, since a slash would divide metrics."""
    return re.sub(r"[^\w.-]+", "_", source)


class JudgeConfig(Section):
    """A model that judges responses, behind an OpenAI-compatible address (vLLM, SGLang and others have one)."""

    url: str
    """Address up to and including /v1."""
    model: str
    """Its name there."""
    prompt: str = (
        "Question:\n{prompt}\n\nReference answer:\n{answer}\n\nResponse:\n{response}\n\nHow good is the response, "
        "from 0 (wrong) to 1 (right)? Answer with the number alone."
    )
    """What it is asked.  {prompt}, {answer} and {response} are filled in; the last number of its reply is the score."""
    key_variable: str = ""
    """Environment variable with the key, if one is needed.  It also has to stand in `reward.pass_variables`."""
    max_tokens: int = Field(16, ge=1, le=100_000)
    """Of its reply."""
    retries: int = Field(3, ge=0, le=100)
    """Further tries after an answer of 429 or 5xx, or none, within `reward.timeout_s`."""

    @model_validator(mode="after")
    def _asks_about_the_response(self) -> "JudgeConfig":
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(f"url={self.url!r}: begin it with http:// or https://")
        if "{response}" not in self.prompt:
            raise ValueError("prompt has no {response}: the judge would not see what it judges")
        return self


class RewardFunction(Section):
    """One term of the reward."""

    kind: Literal["reasoning_gym", "math_verify", "exact", "format", "code_tests", "judge", "environment", "python"]
    """reasoning_gym: the task's own scorer, right or wrong; math_verify: symbolic equality; exact: string equality of
    the final answer; format: think and answer tags are in place; code_tests: the last ```python block passes the tests
    that are the reference; judge: another model; environment: the sum of what `rollout.environment` gave; python: your
    own function."""
    sources: tuple[str, ...] = ()
    """Data sources (column `data_source`), or tasks, whose responses this term scores; it gives 0 for others.  None:
    all of them."""
    judge: JudgeConfig | None = None
    """For kind=judge."""
    weight: float = 1.0
    """Factor in the sum.  Negative: a penalty."""
    path: str = ""
    """For kind=python: `package.module:function`, called as f(prompt=, response=, answer=, metadata=) -> float.  It may
    be async.  A `compute_score` of verl's (solution_str, ground_truth, ..) and a function of TRL's (prompts,
    completions, **columns) are called as there."""
    batch: bool = False
    """For kind=python: the function takes many responses at once, f(prompts=, responses=, answers=, metadata=) -> list
    of floats, each argument a list (a reward model, a judge).  It gets `reward.timeout_s` for each of them."""

    @property
    def name(self) -> str:
        """Name of this term in the metrics."""
        return self.path.rpartition(":")[2] if self.kind == "python" else self.kind

    def takes(self, task: str) -> bool:
        """Whether it scores responses to prompts of this task."""
        return not self.sources or task in map(task_of, self.sources)

    @model_validator(mode="after")
    def _path_iff_python(self) -> "RewardFunction":
        if (self.kind == "judge") != (self.judge is not None):
            raise ValueError(
                f"kind={self.kind!r} {'without' if self.judge is None else 'with'} judge: {{url: ..., model: ...}}, "
                "which kind 'judge' needs, and the others have not"
            )
        if (self.kind == "python") != bool(self.path):
            raise ValueError(
                f"kind={self.kind!r} with path={self.path!r}: a path 'package.module:function' is needed for "
                "kind 'python' and must be left out for the others"
            )
        if self.path and self.path.count(":") != 1:
            raise ValueError(f"path={self.path!r}: write it as 'package.module:function'")
        if self.batch and self.kind != "python":
            raise ValueError(f"batch=true with kind={self.kind!r}: only functions of kind 'python' take whole batches")
        return self


class RewardConfig(Section):
    """Scoring of finished responses in separate processes while the rollout continues."""

    functions: tuple[RewardFunction, ...] = (RewardFunction(kind="reasoning_gym"),)
    """Terms; the reward is their weighted sum."""
    timeout_s: float = Field(5.0, gt=0)
    """Time limit for scoring one response, in seconds.  A response that exceeds it gets 0 and is counted."""
    num_processes: int = Field(1, ge=1, le=1000)
    """Number of scoring processes.  Raise it when steps wait for rewards (`timing_s/reward`)."""
    max_memory_gb: float = Field(4.0, ge=0.5, le=10_000)
    """Most memory of a scoring process, in GB.  A response for which a function needs more gets 0 and is counted."""
    pass_variables: tuple[str, ...] = ()
    """Environment variables that scoring processes get though they look like secrets (passwords, tokens, keys), for
    example OPENAI_API_KEY for a judge."""
