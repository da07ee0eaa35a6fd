"""Response lengths that no run here has recorded: from a file, or drawn."""

import json
import math
import random
from pathlib import Path

from tlt_core.run.plan.errors import PlanError
from tlt_core.run.plan.simulate import Group

SPEC = "median=1500,sigma=1.0,cap=16384"
STEPS = 8  # drawn; their mean counts
_OF_PROMPT = 0.5  # of the variance of log lengths: responses to one prompt resemble each other (believed)
_MOST = 10_000_000  # tokens of a response


def read(path: Path, *, prompts: int) -> list[list[Group]]:
    """Steps of `prompts` groups.  A line is a JSON list: the lengths of one prompt's responses.  Raises PlanError."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"--lengths {path} cannot be read ({error})") from None
    groups = [Group.of(_lengths(line, f"{path}, line {n}")) for n, line in enumerate(lines, 1) if line.strip()]
    if len(groups) < prompts:
        raise PlanError(f"{path} has {len(groups)} prompts, a step {prompts}: set --prompts, or give more lines")
    return [groups[i : i + prompts] for i in range(0, len(groups) - prompts + 1, prompts)]


def drawn(spec: str, *, prompts: int, samples: int, seed: int = 0) -> list[list[Group]]:
    """Log-normal lengths, cut at the cap.  spec: "median=1500,sigma=1.0,cap=16384".  Raises PlanError."""
    median, sigma, cap = _numbers(spec)
    draw = random.Random(seed)

    def group() -> Group:
        common = draw.gauss(0, sigma * math.sqrt(_OF_PROMPT))
        each = (common + draw.gauss(0, sigma * math.sqrt(1 - _OF_PROMPT)) for _ in range(samples))
        return Group.of([max(1, min(round(median * math.exp(x)), round(cap))) for x in each])

    return [[group() for _ in range(prompts)] for _ in range(STEPS)]


def _numbers(spec: str) -> tuple[float, float, float]:
    given = dict(part.partition("=")[::2] for part in spec.split(","))
    bounds = {"median": (1.0, _MOST), "sigma": (0.0, 5.0), "cap": (1.0, _MOST)}
    try:
        values = {name.strip(): float(value) for name, value in given.items()}
    except ValueError:
        values = {}
    if values.keys() != bounds.keys() or any(not low <= values[n] <= high for n, (low, high) in bounds.items()):
        limits = ", ".join(f"{name} from {low:g} to {high:g}" for name, (low, high) in bounds.items())
        raise PlanError(f"--lengths {spec}: name a file, or write such as {SPEC} ({limits})")
    return values["median"], values["sigma"], values["cap"]


def _lengths(line: str, where: str) -> list[int]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        found = None
    if (
        not isinstance(found, list)
        or not found
        or not all(isinstance(n, int) and not isinstance(n, bool) and 1 <= n <= _MOST for n in found)
    ):
        raise PlanError(f"{where}: write the lengths of a prompt's responses as a JSON list, such as [512, 80, 1024]")
    return found
