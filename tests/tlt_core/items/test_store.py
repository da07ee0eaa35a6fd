"""Files between the tasks: damage is told with the file and the remedy."""

import pytest
import torch

from tlt_core.items.store import StoreError, is_finite, read_json, read_json_lines


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'{"a": 1, "b', "cannot be read as JSON"),
        (b"", "cannot be read as JSON"),
        (b'{"a": "\xff"}', "cannot be read as JSON"),
        (b"[" * 100_000, "cannot be read as JSON"),
        (b"[1]", "must hold a JSON object, found list"),
        (None, "No such file"),
    ],
)
def test_a_damaged_object_is_told_with_the_remedy(tmp_path, content, said):
    path = tmp_path / "x.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(StoreError, match=rf"x\.json.*{said}.*; make it again$"):
        read_json(path, remedy="make it again")


def test_half_a_last_line_is_left_out_and_other_damage_is_told(tmp_path):
    path = tmp_path / "x.jsonl"
    assert read_json_lines(path) == []
    path.write_bytes(b'{"a": 1}\n\n{"a": 2}')
    assert read_json_lines(path) == [{"a": 1}, {"a": 2}]
    path.write_bytes(b'{"a": 1}\n{"a": "\xe2')
    assert read_json_lines(path) == [{"a": 1}]
    for damaged in (b'{"a": \n', b"\xff\n", b"[1]\n", b"[" * 100_000 + b"\n"):
        path.write_bytes(b'{"a": 1}\n' + damaged + b'{"a": 3}\n')
        with pytest.raises(StoreError, match=r"x\.jsonl, line 2: no JSON object .*; remove the line"):
            read_json_lines(path)


def test_a_sum_that_float16_cannot_hold_is_no_damage():
    weights = torch.full((4096,), 30.0, dtype=torch.float16)
    assert is_finite(weights)
    weights[7] = float("inf")
    assert not is_finite(weights)
