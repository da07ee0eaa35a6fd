"""Configuration: what responses are scored by."""

from typing import Literal

from pydantic import Field, model_validator

from conf.section import Section


class RewardFunction(Section):
    """One term of the reward."""

    kind: Literal["reasoning_gym", "math_verify", "exact", "format", "python"]
    """reasoning_gym: the task's own scorer, right or wrong; math_verify: symbolic equality; exact: string equality of
    the final answer; format: think and answer tags are in place; python: your own function."""
    weight: float = 1.0
    """Factor in the sum.  Negative: a penalty."""
    path: str = ""
    """For kind=python: `package.module:function`, called as f(prompt=, response=, answer=, metadata=) -> float.  It may
    be async."""
    batch: bool = False
    """For kind=python: the function takes many responses at once, f(prompts=, responses=, answers=, metadata=) -> list
    of floats, each argument a list (a reward model, a judge).  It gets `reward.timeout_s` for each of them."""

    @property
    def name(self) -> str:
        """Name of this term in the metrics."""
        return self.path.rpartition(":")[2] if self.kind == "python" else self.kind

    @model_validator(mode="after")
    def _path_iff_python(self) -> "RewardFunction":
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
