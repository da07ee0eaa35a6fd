"""Whatever stands in a configuration, it is run, or refused in words: ten thousand cases where slow tests run."""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from conf.load import ConfigError, apply_override, load, read_with_bases, validate
from conf.run import RunConfig
from tests.fuzz import cases, fuzz

TREE = read_with_bases(Path("conf/smoke.yaml"))
NUMBERS = st.integers() | st.floats() | st.sampled_from([0, 1, -1, 10**30, 1e308, -0.0])
LEAVES = st.none() | st.booleans() | NUMBERS | st.text(max_size=8)
VALUES = st.recursive(
    LEAVES, lambda inside: st.lists(inside, max_size=3) | st.dictionaries(st.text(max_size=5), inside, max_size=3)
)
REFUSED = "Configuration fuzz.yaml cannot be run:\n  - "


def _paths(tree: Any, above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in tree.items():
        yield (*above, key)
        if isinstance(value, dict):
            yield from _paths(value, (*above, key))


EVERY_SETTING = sorted(_paths(load("conf/smoke.yaml").model_dump(mode="json")))
DOTTED = [".".join(path) for path in EVERY_SETTING]


def _with(path: tuple[str, ...], value: Any) -> dict[str, Any]:
    """The configuration that runs, with one value changed."""
    changed = copy.deepcopy(TREE)
    *above, key = path
    section = changed
    for name in above:
        section = section.setdefault(name, {})
    section[key] = value
    return changed


def _tried(call: Callable[[], RunConfig]) -> RunConfig | str:
    """The configuration, or why it is refused."""
    try:
        return call()
    except ConfigError as error:
        return str(error)


@cases(few=400, many=3000)
def test_any_value_of_any_setting_is_accepted_or_refused_by_name(count: int) -> None:
    @fuzz(count)
    @given(st.sampled_from(EVERY_SETTING), VALUES)
    def check(path: tuple[str, ...], value: Any) -> None:
        found = _tried(lambda: validate(_with(path, value), source="fuzz.yaml"))
        if isinstance(found, str):
            assert found.startswith(REFUSED)
            assert path[0] in found
        else:
            assert validate(found.model_dump(mode="json"), source="again") == found

    check()


@cases(few=600, many=4500)
def test_any_override_at_all_is_accepted_or_refused(count: int) -> None:
    @fuzz(count)
    @given(st.text(max_size=30) | st.builds("{}={}".format, st.sampled_from(DOTTED), st.text(max_size=12)))
    def check(override: str) -> None:
        tree = copy.deepcopy(TREE)

        def call() -> RunConfig:
            apply_override(tree, override)
            return validate(tree, source="fuzz.yaml")

        found = _tried(call)
        assert isinstance(found, RunConfig) or found.startswith(("Override ", REFUSED))

    check()


@cases(few=300, many=2500)
def test_any_file_is_refused_by_name(count: int, tmp_path: Path) -> None:
    """Chance writes no configuration that runs."""

    @fuzz(count)
    @given(st.binary(max_size=60) | st.text(max_size=60).map(str.encode))
    def check(content: bytes) -> None:
        path = tmp_path / "fuzz.yaml"
        path.write_bytes(content)
        found = _tried(lambda: load(path))
        assert isinstance(found, str)
        assert "fuzz.yaml" in found

    check()
