"""Rows as other frameworks have them train two steps with the reward functions of those frameworks."""

import math

import pyarrow
import pyarrow.parquet
import pytest

from tests.options.runs import Parts, train
from tests.tlt_core.data.test_row_shapes import SHAPES

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "shape", [pytest.param(shape, marks=pytest.mark.long if n % 2 else ()) for n, shape in enumerate(SHAPES)]
)
def test_two_steps(parts: Parts, shape: str) -> None:
    make, task = SHAPES[shape]
    file = parts.root / f"{list(SHAPES).index(shape)}.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([make(a, b) for a in range(3) for b in range(4)]), file)
    function = "compute_score" if shape.startswith("verl") else "of_trl"
    steps = train(
        parts,
        f"shape-{list(SHAPES).index(shape)}",
        [
            f"data={{kind: file, train_path: {file}, validation_fraction: 0.2}}",
            f"reward.functions=[{{kind: python, path: 'tests.options.rewards:{function}'}}]",
        ],
    )
    assert len(steps) == 2
    assert all(math.isfinite(value) for step in steps for value in step.values())
    assert max(step["critic/score/mean"] for step in steps) > 0, "the reward function was asked"
    assert sum(step["reward/num_error"] for step in steps) == 0
    assert f"val-core/{task}/reward/greedy" in steps[-1]
