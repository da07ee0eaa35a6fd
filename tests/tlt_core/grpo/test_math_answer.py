"""What `math_verify` takes as equal, with math-verify 0.9.0: what a reasonable person would.

Each line: 1 for a right answer and 0 for a wrong one, what the response has between its answer tags, the reference.
"""

import contextlib

import pytest

from tlt_core.grpo.math_answer import equal, readable
from tlt_core.grpo.reward_styles import Item
from tlt_core.grpo.verifiers import Unparseable, math_verify_reward

TABLE = r"""
1 | \sqrt{2} | \sqrt{2}
1 | \dfrac{7}{9} | \frac{7}{9}
1 | 10^{-3} | 0.001
1 | 1+x^2 | x^2+1
0 | 2 | 2\pi
0 | 12:45 | 12:30
1 | 12:30 p.m. | 12:30 PM
0 | 12:30 am | 12:30 pm
1 | {minus}5 | -5
1 | \frac12 | 0.5
1 | 7/9 | \tfrac{7}{9}
1 | 0.333333 | \frac{1}{3}
0 | 0.33 | \frac{1}{3}
1 | \frac{\sqrt{2}}{2} | 1/\sqrt{2}
1 | sqrt((x+1)/2) | \sqrt{\frac{x+1}{2}}
1 | 2*pi | 2\pi
1 | x**2 + 1 | x^2+1
1 | x^10 | x^{10}
1 | (x-1)(x+2) | x^2+x-2
1 | sin(x) | \sin x
0 | cos(x) | \sin x
1 | ln(2) | \ln 2
1 | \{1,2,3\} | \{3, 2, 1\}
1 | {1, 2} | \{1,2\}
0 | \{1,2\} | (1,2)
0 | [1,2] | (1,2)
1 | (-inf, 3] | (-\infty,3]
1 | (-\infty,3)\cup(5,\infty) | (-\infty, 3) \cup (5, \infty)
1 | x > 3 | (3,\infty)
1 | 1 \le x < 2 | [1,2)
0 | (2,1) | (1,2)
1 | 1,2 | (1,2)
1 | 2, 1 | 1,2
0 | 2,1 | (1,2)
1 | 3 and 5 | 3,5
1 | x=3 or x=5 | 3,5
0 | 3 | 3,5
1 | \left( \frac{1}{2}, 3 \right) | (1/2, 3)
1 | 50\% | 50%
1 | 50 percent | 50\%
1 | 0.5 | 50\%
0 | 5\% | 50\%
1 | 5 | 5 \text{ cm}
1 | 5 cm | 5
0 | 5 m | 5 cm
0 | 5 \text{ cm}^2 | 5 \text{ cm}^3
1 | 5 square cm | 5 \text{ cm}^2
1 | 60 miles per hour | 60\text{ miles/hour}
1 | 5 apples | 5
1 | \$5 | 5
1 | 5 dollars | \$5
0 | 5 cents | \$5
1 | 1,234 | 1234
1 | 1{,}234 | 1234
1 | 1 234 | 1234
1 | 12,345,678.5 | 12345678.5
1 | 10,\!000 | 10000
1 | 1 1/2 | 1.5
1 | 1\frac{1}{2} | \frac{3}{2}
1 | -2 1/4 | -\frac{9}{4}
1 | x = 5 | 5
1 | y = 2x+3 | y=3+2x
1 | y=3-2x | 2x+y=3
1 | \begin{bmatrix}1&2\\3&4\end{bmatrix} | \begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}
0 | \begin{pmatrix}1&2\\3&5\end{pmatrix} | \begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}
1 | \begin{pmatrix} -1/3 \\ 2/3 \end{pmatrix} | \begin{pmatrix} -\frac{1}{3} \\ \frac{2}{3} \end{pmatrix}
1 | 45 | 45^\circ
1 | 45 degrees | 45^\circ
0 | 20°C | 20^\circ F
1 | Evelyn | \text{Evelyn}
0 | Carla | \text{Evelyn}
1 | (C) | C
0 | B | C
0 | odd | even
0 | north | thorn
1 | the answer is $\frac{1}{2}$. | 0.5
1 | The answer is 3\sqrt{2}. | 3\sqrt{2}
0 | The answer is 3\sqrt{2}. | 3
1 | John has 5 apples left. | 5
0 | It is 5 or 6 | 5
1 | \boxed{\frac{1}{2}} | \frac{1}{2}
0 | so we get \boxed{3\sqrt{2}} | 3
1 | \boxed{3} and \boxed{5} | 3,5
1 | first \boxed{3}. But that was wrong, as a long and careful look at all of the cases shows. So \boxed{4} | 4
1 | 72 | Natalia sold 48/2 = <<48/2=24>>24 clips.\n#### 72
1 | **73** | 73
1 | $\frac{1}{2}$ | \frac{1}{2}
1 | .5 | 0.5
1 | 1e3 | 1000
1 | 2.5e-7 | 0.00000025
0 | 2.5 | 0.00000025
1 | 3 \times 10^8 | 300000000
0 | 3 | 3 \cdot 10^{8}
1 | 1011_2 | 1011_{2}
0 | 1011_3 | 1011_2
1 | 0.\overline{3} | \frac{1}{3}
1 | 3:4 | 3 : 4
1 | 2+3i | 3i+2
1 | \pm 2 | 2, -2
1 | 3 \pm \sqrt{2} | 3+\sqrt{2}, 3-\sqrt{2}
1 | \emptyset | \varnothing
1 | \sqrt[3]{8} | 2
1 | \log_2 8 | 3
0 | 2t | 2
0 | 3d | 3c
1 | \overrightarrow{AB} | \overrightarrow{AB}
1 | 10000000000000000 | 1e16
0 | \frac{12}{3} | \frac{1}{23}
0 | \boxed{} | 3
0 | I do not know | 3
0 | 0 | nan
1 | **Answer:** $5$ | 5
1 | \frac{3}{4}\text{ hours} | 45/60
1 | 2,500\text{ m}^2 | 2500
1 | 100\pi\text{ square inches} | 100\pi
1 | a_n = 2n+1 | 2n+1
1 | \infty | infinity
1 | 17\frac{1}{2} \% | 17.5\%
0 | June 21 | \text{June 20}
1 | 7:05 | 07:05
1 | \mathbb{R} | \mathbb{R}
1 | $-2$ | {minus}2
1 | [2,5) \cup (5,\infty) | [2, 5) \cup (5, \infty)
1 | x^3 - 6x | x(x^2-6)
1 | (3, 4) and (5, 6) | (3,4), (5,6)
"""

ROWS = [line.replace("{minus}", "\u2212").split(" | ") for line in TABLE.strip().splitlines()]


@pytest.mark.parametrize(("wanted", "answer", "reference"), ROWS, ids=[f"{a} = {r}" for _, a, r in ROWS])
def test_a_right_answer_earns_one_and_a_wrong_one_nothing(wanted: str, answer: str, reference: str) -> None:
    reference = reference.replace(r"\n", "\n") if "####" in reference else reference
    try:
        earned = math_verify_reward(Item("q", f"<think>x</think><answer>{answer}</answer>", reference, "file", {}))
    except Unparseable:
        earned = 0.0
    assert earned == float(wanted)
    assert readable(reference)
    assert equal(reference, reference)


@pytest.mark.parametrize("reference", [r"\frac{1}{", r"\foo{3}{4}{", r"x^{2"])
def test_a_reference_that_cannot_be_read_is_an_error_and_no_silent_nothing(reference: str) -> None:
    assert not readable(reference)
    with pytest.raises(ValueError, match="cannot read the reference answer"):
        math_verify_reward(Item("q", f"<answer>{reference}</answer>", reference, "file", {}))


def test_a_response_without_tags_is_read_at_its_end() -> None:
    def earned(response: str, reference: str) -> float:
        return math_verify_reward(Item("q", response, reference, "file", {}))

    worked = "We have 2 + 3 = 5 and 7 more.\nSo in total there are twelve.\n\n"
    assert earned(worked + "The answer is $12$.", "12") == 1
    assert earned(worked + "The answer is $12$.", "5") == 0
    assert earned(worked * 100 + r"Therefore, the final answer is \boxed{\dfrac{7}{9}}.", r"\frac{7}{9}") == 1
    with pytest.raises(Unparseable):
        earned("I do not know.", "12")


def test_an_endless_answer_costs_no_time() -> None:
    """A policy may repeat itself up to the length limit."""
    for piece in ("((", r"\sqrt(", "answer is ", "1 ", r"\( ", "a.", r"\boxed{"):
        with contextlib.suppress(Unparseable):
            assert math_verify_reward(Item("q", piece * 20_000, "12", "file", {})) == 0
