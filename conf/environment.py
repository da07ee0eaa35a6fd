"""Configuration: what the policy talks with, turn by turn."""

from pydantic import Field, field_validator

from conf.section import MANY, MOST_TOKENS, Section


class EnvironmentConfig(Section):
    """A class of yours that answers the policy: a game, a tool, a user.  Each response becomes an episode: turns of the
    policy with the environment's messages between them, together at most `rollout.max_new_tokens` tokens long."""

    path: str
    """`package.module:Class`, made without arguments for each episode.  `reset(prompt=, answer=, metadata=)` is called
    before the first turn, then `step(text) -> (message, reward, done)` after each of the policy's turns.  Either may be
    async.  Tokens of messages are read by the policy and not trained on."""
    max_turns: int = Field(8, ge=1, le=1000)
    """Most turns of the policy in one episode."""
    max_turn_tokens: int | None = Field(None, ge=1, le=MOST_TOKENS)
    """Longest turn.  A longer one is cut, and the environment answers to what there is.  None: no limit of its own."""
    timeout_s: float = Field(30.0, gt=0)
    """Most seconds of one step.  An episode whose step takes longer, raises or ends its process scores 0."""
    num_processes: int = Field(1, ge=1, le=1000)
    """Processes that hold episodes.  Raise it for environments that compute much."""
    max_running: int = Field(64, ge=1, le=MANY)
    """Most steps at once in one process, each in a thread."""

    @field_validator("path")
    @classmethod
    def _is_a_path(cls, path: str) -> str:
        if path.count(":") != 1:
            raise ValueError(f"path={path!r}: write it as 'package.module:Class'")
        return path
