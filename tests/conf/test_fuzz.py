"""Whatever stands in a configuration, it is run, or refused in words: ten thousand cases."""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conf.load import ConfigError, apply_override, load, read_with_bases, validate
from conf.run import RunConfig

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


@settings(max_examples=3000, deadline=None, derandomize=True, database=None)
@given(st.sampled_from(EVERY_SETTING), VALUES)
def test_any_value_of_any_setting_is_accepted_or_refused_by_name(path: tuple[str, ...], value: Any) -> None:
    found = _tried(lambda: validate(_with(path, value), source="fuzz.yaml"))
    if isinstance(found, str):
        assert found.startswith(REFUSED)
        assert path[0] in found
    else:
        assert validate(found.model_dump(mode="json"), source="again") == found


@settings(max_examples=2000, deadline=None, derandomize=True, database=None)
@given(st.sampled_from(EVERY_SETTING), st.text(max_size=12))
def test_any_text_of_an_override_is_accepted_or_refused(path: tuple[str, ...], text: str) -> None:
    tree = copy.deepcopy(TREE)

    def call() -> RunConfig:
        apply_override(tree, f"{'.'.join(path)}={text}")
        return validate(tree, source="fuzz.yaml")

    found = _tried(call)
    assert isinstance(found, RunConfig) or found.startswith(("Override ", REFUSED))


@settings(max_examples=2500, deadline=None, derandomize=True, database=None)
@given(st.text(max_size=30))
def test_any_override_at_all_is_accepted_or_refused(override: str) -> None:
    tree = copy.deepcopy(TREE)

    def call() -> RunConfig:
        apply_override(tree, override)
        return validate(tree, source="fuzz.yaml")

    found = _tried(call)
    assert isinstance(found, RunConfig) or found.startswith(("Override ", REFUSED))


@settings(max_examples=2500, deadline=None, derandomize=True, database=None)
@given(st.binary(max_size=60) | st.text(max_size=60).map(str.encode))
def test_any_file_is_refused_by_name(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    """Chance writes no configuration that runs."""
    path = tmp_path_factory.getbasetemp() / "fuzz.yaml"
    path.write_bytes(content)
    found = _tried(lambda: load(path))
    assert isinstance(found, str)
    assert "fuzz.yaml" in found
