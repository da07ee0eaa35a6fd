"""A YAML file and `section.key=value` overrides -> `RunConfig`.

    base: demo.yaml        # the file that this one changes, in the same folder; it may have a base itself
    name: ablation         # sections are merged key by key; lists, and a section of another `kind`, are replaced

Only the standard library, pydantic and PyYAML are imported.  Every problem raises `ConfigError`, whose text names the
key, the value and the remedy.
"""

import contextlib
import difflib
import re
import typing
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from conf.run import RunConfig
from conf.system import without_password


class ConfigError(ValueError):
    """A configuration that cannot be run.  The text names key, value and remedy, and no password of a URL."""

    def __init__(self, text: str) -> None:
        super().__init__(without_password(text))


class _Loader(yaml.SafeLoader):  # type: ignore[misc]  # PyYAML has no types
    """Says where a value stands that does not fit its type, such as a date of month 13.  Refuses 017 and 1:30, which
    would be 15 and 90, and two equal keys, of which PyYAML would take the last."""

    def construct_mapping(self, node: yaml.Node, deep: bool = False) -> Any:
        keys = [key for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        for i, key in enumerate(keys):
            if key.value in [earlier.value for earlier in keys[:i]]:
                problem = f"{key.value!r} stands twice, again in line {key.start_mark.line + 1}; remove one"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
        return super().construct_mapping(node, deep)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        if node.tag == "tag:yaml.org,2002:int" and re.match(r"[-+]?(0[0-9_]|[0-9_]+:)", str(node.value)):
            problem = "a number that begins with 0 is octal to YAML, one with a colon sexagesimal; write it in decimals"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        try:
            return super().construct_object(node, deep)
        except (ValueError, TypeError, LookupError, AttributeError) as error:  # PyYAML lets Python's own errors out
            tag = node.tag.rpartition(":")[2]
            raise yaml.constructor.ConstructorError(None, None, f"not a valid {tag}", node.start_mark) from error


_BASE = "base"  # a key of files, not of the configuration
_GONE = {  # keys that earlier versions had: what to do instead
    "drafter.method": "drafters are trained as EAGLE-3; choose drafter.loss, soft_ce or tv, and leave method out",
    "drafter.spot": "it is drafter.idle_training now",
    "drafter.idle_training.max_slowdown": "update.streamed says what idle workers do first, "
    "drafter.idle_training.enabled=false that they train no drafter",
    "drafter.idle_training.gain_lasts_steps": "update.streamed says what idle workers do first",
    "rollout.speculation.max_live": "leave it out: policy=cost_model learns with how many requests drafting pays",
    "rollout.speculation.menu": "it is rollout.speculation.strategies now",
    "rollout.vllm.max_probs_diff": "it is rollout.max_probs_diff now, of both engines",
}


def load(path: str | Path, overrides: typing.Sequence[str] = ()) -> RunConfig:
    """Read a YAML file and its bases, apply `section.key=value` overrides, validate.  Raises ConfigError."""
    tree = read_with_bases(Path(path))
    for override in overrides:
        apply_override(tree, override)
    return validate(tree, source=str(path))


def read_with_bases(path: Path, *, heirs: tuple[Path, ...] = ()) -> dict[str, Any]:
    """The file, merged into its `base` if it names one (relative to the file).  heirs: the files that led here.

    Raises ConfigError as `read_yaml` does, and when files are each other's base.
    """
    chain = (*heirs, path)
    if path.resolve() in {heir.resolve() for heir in heirs}:
        raise ConfigError(f"Configuration files are each other's base: {' -> '.join(map(str, chain))}; remove one.")
    try:
        tree = read_yaml(path)
    except ConfigError as error:
        raise ConfigError(f"{error} It is the base of {heirs[-1]}." if heirs else str(error)) from None
    if _BASE not in tree:
        return tree
    base = tree.pop(_BASE)
    if not isinstance(base, str):
        raise ConfigError(f"Configuration file {path}: base must name a file, e.g. base: demo.yaml (value {base!r}).")
    return _merged(read_with_bases(path.parent / base, heirs=chain), tree)


def _merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    if "kind" in above and above["kind"] != below.get("kind"):
        return above  # the settings of another kind do not apply
    result = dict(below)
    for key, value in above.items():
        old = below.get(key)
        result[key] = _merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return result


def read_yaml(path: Path) -> dict[str, Any]:
    """The file as a dictionary.  Raises ConfigError when it is missing, is not YAML, or is not a mapping."""
    try:
        text = path.read_text(encoding="utf-8")
        tree = yaml.load(text, Loader=_Loader)
    except FileNotFoundError:
        known = sorted(p.as_posix() for p in Path("conf").glob("*.yaml"))
        hint = f" Files in conf/: {', '.join(known)}." if known else ""
        raise ConfigError(f"Configuration file {path} does not exist.{hint}") from None
    except yaml.YAMLError as error:
        raise ConfigError(
            f"Configuration file {path} is not readable as YAML: {_without_content(error)}; mend it there."
        ) from None
    except (UnicodeDecodeError, OSError) as error:
        problem = "it is not UTF-8" if isinstance(error, UnicodeDecodeError) else error.strerror
        raise ConfigError(f"Configuration file {path} cannot be read: {problem}; give a YAML file.") from None
    except RecursionError:
        raise ConfigError(
            f"Configuration file {path} is nested too deeply: sections have three levels at most."
        ) from None
    if not isinstance(tree, dict):
        raise ConfigError(f"Configuration file {path} must hold a mapping of sections, found {type(tree).__name__}.")
    return tree


def _without_content(error: yaml.YAMLError) -> str:
    """What is wrong, and where.  No text of the file, which may be none that the reader of a log should see."""
    mark = getattr(error, "problem_mark", None)
    if mark is None:  # a character that YAML does not allow
        return "it holds a non-text character"
    words = ": ".join(str(part) for name in ("context", "problem") if (part := getattr(error, name, None)))
    words = re.sub(r"\b(alias|anchor|tag|handle) (['\"]).*\2", r"\1", words)  # names that stand in the file
    return f"line {mark.line + 1}, column {mark.column + 1}: {words}"


def apply_override(tree: dict[str, Any], override: str) -> None:
    """Set one `section.key=value` in the tree.  The value is read as YAML.  Raises ConfigError on bad syntax."""
    dotted, equals, text = override.partition("=")
    keys = dotted.strip().split(".")
    if not equals or not all(keys):
        raise ConfigError(f"Override {override!r} is not of the form section.key=value, e.g. rollout.num_samples=4.")
    node: Any = tree
    for key in keys[:-1]:
        node = node.setdefault(key, {}) if isinstance(node, dict) else None
        if not isinstance(node, dict):
            raise ConfigError(f"Override {override!r}: {key!r} is not a section (lists are replaced as a whole).")
    try:
        value = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"Override {override!r}: the value is not YAML: {_without_content(error)}.") from None
    except RecursionError:
        raise ConfigError(f"Override of {dotted}: the value is nested too deeply; give a plain value.") from None
    if isinstance(value, str) and value[:1] in "+-.0123456789":  # YAML 1.1 reads 1e-4 as a string
        with contextlib.suppress(ValueError):
            value = float(value)
    node[keys[-1]] = value


def validate(tree: dict[str, Any], source: str) -> RunConfig:
    """Build the frozen tree.  Raises ConfigError that lists every problem, one per line."""
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        problems = "\n".join("  - " + _explain(e) for e in error.errors())
        raise ConfigError(f"Configuration {source} cannot be run:\n{problems}") from None


def _explain(error: Any) -> str:
    path = [str(p) for p in error["loc"]]
    key, value = _walked(path)[0], error["input"]
    if error["type"] == "extra_forbidden":
        if path == [_BASE]:
            return f"{key}: only a file can name its base, an override cannot (value {value!r})"
        if key in _GONE:
            return f"{key}: this key is gone: {_GONE[key]}"
        section = _walked(path[:-1])[1]
        known = (list(section.model_fields) if _is_model(section) else []) + ([_BASE] if len(path) == 1 else [])
        close = difflib.get_close_matches(path[-1], known, n=1, cutoff=0.5)
        meant = f"; did you mean {close[0]!r}?" if close else f"; known keys here: {', '.join(sorted(known))}"
        shown = f" (value {value!r})" if isinstance(value, int | float) else ""  # a text may be of a file of secrets
        return f"{key}: unknown key{shown}{meant}"
    if error["type"] in ("union_tag_not_found", "union_tag_invalid"):
        given = value.get("kind") if isinstance(value, dict) else value
        known = sorted(_tags(_walked(path)[1]))
        close = difflib.get_close_matches(str(given), known, n=1, cutoff=0.5)
        meant = f"did you mean {close[0]!r}?" if close else f"one of {', '.join(known)} is needed"
        return f"{key}.kind: {meant} (value {given!r})"
    if error["type"] == "missing":
        return f"{key}: required, but not given"
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "value_error":
        return f"{key}: {message}" if key else message
    return f"{key}: {message} (value {value!r})"


def _walked(path: list[str]) -> tuple[str, Any]:
    """An error's location as a key, without pydantic's union tags (data.reasoning_gym.seed -> data.seed), and the
    section, or the union of sections, that is there."""
    shown: list[str] = []
    model: Any = RunConfig
    for part in path:
        option = _tags(model).get(part)
        if option is None:
            shown.append(part)
        model = option or _child(model, part)
    return ".".join(shown), model


def _child(model: Any, part: str) -> Any:
    if _is_model(model) and part in model.model_fields:
        return model.model_fields[part].annotation
    if part.isdigit():
        return next(iter(typing.get_args(model)), None)
    return None


def _tags(model: Any) -> dict[str, Any]:
    """Class of each `kind`, for a union of sections."""
    tags = {}
    for option in typing.get_args(model):
        if _is_model(option) and "kind" in option.model_fields:
            for tag in typing.get_args(option.model_fields["kind"].annotation):
                tags[tag] = option
    return tags


def _is_model(candidate: Any) -> bool:
    return isinstance(candidate, type) and issubclass(candidate, BaseModel)
