"""A verdict holds when the median reaches its bound, and the bound itself counts."""

from bench.verdicts import verdict


def test_the_bound_itself_holds() -> None:
    assert verdict("x", [0.9, 0.97, 1.0], 0.97) == {
        "claim": "x",
        "value": 0.97,
        "spread": [0.9, 1.0],
        "bound": 0.97,
        "holds": True,
    }
    assert not verdict("x", [0.9, 0.969, 1.0], 0.97)["holds"]
    assert verdict("x", [90, 100, 300], 100, at_most=True)["holds"]
    assert not verdict("x", [90, 101, 300], 100, at_most=True)["holds"]
