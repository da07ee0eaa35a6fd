"""Twenty steps on 200 rows in MATH's style: each planted response earns what it should, through the real scorer."""

import random

import pytest
import torch

from conf.reward import RewardConfig, RewardFunction
from tlt_core.grpo.reward import Scorer
from tlt_core.items.types import Prompt, ScoreStatus


def row(number: int) -> tuple[str, str, str]:
    """(reference, the same written otherwise, a wrong answer near it); ten kinds of answers take turns."""
    draw = random.Random(number)
    a, b, c = draw.sample(range(2, 30), 3)
    return (
        (rf"\frac{{{a}}}{{31}}", f"{a}/31", rf"\frac{{{a}}}{{37}}"),
        (rf"{a}\sqrt{{2}}", rf"\sqrt{{2}} \cdot {a}", f"{a}"),
        (f"({a},{b})", rf"\left( {a}, {b} \right)", f"({b},{a})"),
        (rf"{a}\pi", f"{a}*pi", f"{a}"),
        (f"{a}x+{b}", f"{b} + {a}x", f"{a}x+{b + c}"),
        (f"[{a}, {a + b})", f"{a} \\le x < {a + b}", f"[{a}, {a + b}]"),
        (rf"{a}\%", f"{a} percent", rf"{a + b}\%"),
        (f"{a},{b:03d}", rf"{a}{b:03d}", f"{a}"),
        (rf"\text{{Person {a}}}", f"person {a}", f"Person {b}"),
        (
            rf"\begin{{pmatrix}} {a} \\ -{b} \end{{pmatrix}}",
            rf"\begin{{bmatrix}} {a} \\ \frac{{-{2 * b}}}{{2}} \end{{bmatrix}}",
            rf"\begin{{pmatrix}} {a} \\ {b} \end{{pmatrix}}",
        ),
    )[number % 10]


@pytest.mark.slow
def test_planted_responses_score_as_expected() -> None:
    cfg = RewardConfig(functions=(RewardFunction(kind="math_verify"),), timeout_s=60)
    with Scorer(cfg) as scorer:
        for step in range(20):
            wanted: list[float] = []
            for number in range(10 * step, 10 * step + 10):
                reference, right, wrong = row(number)
                prompt = Prompt(number, torch.tensor([1], dtype=torch.int32), f"q{number}", reference, "file", {})
                said = (rf"\boxed{{{reference}}}", right, wrong, "no idea")
                for sample, answer in enumerate(said):
                    scorer.submit((number, sample), prompt, f"<think>x</think><answer>{answer}</answer>")
                wanted += [1.0, 1.0, 0.0, 0.0]
            keys = [(number, sample) for number in range(10 * step, 10 * step + 10) for sample in range(4)]
            scores = scorer.collect(keys)
            wrong_ones = [(k, row(k[0])) for k, s, w in zip(keys, scores, wanted, strict=True) if s.total != w]
            assert not wrong_ones, step
            assert all(score.status in (ScoreStatus.OK, ScoreStatus.UNPARSEABLE) for score in scores)
