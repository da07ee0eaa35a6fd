"""Commands in the documents are real: each parses with its program's own parser, and what it names exists.

Nothing is run here: see `test_commands_run.py`.
"""

import ast
import importlib.util
import itertools
import json
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml
from dvc.cli import DvcParserError, parse_args

from conf.data import FileData
from conf.load import ConfigError, load
from flows import cli
from tests.docs.commands import BLOCK, PAGES, ROOT, commands_of, files_of, text_of
from tlt_core.data import file_questions
from tlt_core.export.card import model_card
from tlt_core.grpo import verifiers
from tlt_core.items.metrics import undeclared

GENERATED = {"docs/faults.md", "docs/results.md", "docs/metrics.md"}  # of older commits
OURS = {path.parent.name for path in ROOT.glob("*/__init__.py")}
NAMED = re.compile(r"`((?:bench|conf|docs|flows|kernels|tasks|tests|tlt_core|tlt_vllm)/[\w./-]*)`")
SETTING = re.compile(r"(\w+(?:\.\w+)+)(?:=(\S+))?")
COMMANDS = [(page, command) for page in PAGES for command in commands_of(text_of(page))]


class Wrong(Exception):
    """A command that would not do what the page says.  The text says why."""


def check(command: Sequence[str]) -> None:
    """Raises Wrong.  The working directory is the project, or a folder that looks like it."""
    program, arguments = Path(command[0]).name, command[1:]
    for word in command:
        path = word.rpartition("=")[2]
        if re.match(r"(conf|deploy|docs|flows|tasks|tests)/\S+$", path) and not Path(path).exists():
            raise Wrong(f"{path} does not exist")
    known = {"tlt": check_tlt, "make": check_make, "dvc": check_dvc, "prefect": check_prefect, "python": check_python}
    if program in known:
        known[program](arguments)


def check_tlt(arguments: Sequence[str]) -> None:
    try:
        args = cli.parse(arguments)
    except SystemExit:
        raise Wrong("its parser refuses it") from None
    if "overrides" in args:
        check_config(args.config, args.overrides)


def check_config(path: str, overrides: Sequence[str]) -> None:
    try:
        load(path, overrides)
    except ConfigError as error:
        raise Wrong(str(error)) from None


def check_make(arguments: Sequence[str]) -> None:
    makefile = (ROOT / "Makefile").read_text()
    for word in arguments:
        name, equals, _ = word.partition("=")
        if not re.search(rf"^{re.escape(name)} \?=" if equals else rf"^{re.escape(name)}:", makefile, re.MULTILINE):
            raise Wrong(f"the Makefile has no {name}")
    targets = [word for word in arguments if "=" not in word]
    recipe = subprocess.run(["make", "-n", *targets], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for path in re.findall(r" (tests/[\w./]+)", recipe):
        if not (ROOT / path).exists():
            raise Wrong(f"there is no {path}")


def check_dvc(arguments: Sequence[str]) -> None:
    try:
        args = parse_args(list(arguments))
    except (DvcParserError, SystemExit):
        raise Wrong("its parser refuses it") from None
    for setting in getattr(args, "set_param", None) or ():
        key, _, values = setting.partition("=")
        for value in values.split(","):
            check_config("params.yaml", [f"{key}={value}"])
    stages = yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"]
    outs = {out for stage in stages.values() for out in stage.get("outs", ()) if isinstance(out, str)}
    for target in getattr(args, "targets", None) or ():
        if not (target in stages or target in outs or target.isupper() or target.endswith(".dvc")):
            raise Wrong(f"{target} is neither a stage of dvc.yaml nor made by one")


def check_prefect(arguments: Sequence[str]) -> None:
    """Names of deployments, their parameters, and files; the options are Prefect's."""
    deployments = {d["name"]: d for d in yaml.safe_load((ROOT / "prefect.yaml").read_text())["deployments"]}
    parameters = dict(word.split("=", 1) for flag, word in itertools.pairwise(arguments) if flag == "-p")
    for word in arguments:
        flow, slash, name = word.partition("/")
        if re.fullmatch(r"[a-z-]+/[a-z-]+", word) and slash:
            if name not in deployments:
                raise Wrong(f"prefect.yaml has no deployment {name}")
            module, _, function = deployments[name]["entrypoint"].rpartition(".")
            source = (ROOT / module.replace(".", "/")).with_suffix(".py").read_text()
            declared = source.partition(f'@flow(name="{flow}"')[2]
            if not re.match(rf".*\ndef {function}\(", declared):
                raise Wrong(f"{deployments[name]['entrypoint']} is not the flow {flow}")
            unknown = parameters.keys() - set(re.findall(r"(\w+): ", declared.partition(") ->")[0]))
            if unknown:
                raise Wrong(f"{function} has no parameter {min(unknown)}")
    if "config" in parameters:
        check_config(parameters["config"], json.loads(parameters.get("overrides", "[]")))


def check_python(arguments: Sequence[str]) -> None:
    if "-c" in arguments:
        ast.parse(arguments[arguments.index("-c") + 1])
    elif "-m" in arguments:
        module = arguments[arguments.index("-m") + 1]
        if module.partition(".")[0] in OURS and importlib.util.find_spec(module) is None:
            raise Wrong(f"there is no module {module}")


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Path:
    """The project by links, with the files beside it that the page has its reader write."""
    for path in ROOT.iterdir():
        if not path.name.startswith("."):
            (tmp_path / path.name).symlink_to(path)
    for name, text in files_of(request.getfixturevalue("page")).items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("page", "command"), COMMANDS, ids=[f"{p}: {shlex.join(c)[:70]}" for p, c in COMMANDS])
def test_a_command_is_one(page: str, command: list[str], project: Path) -> None:
    check(command)


@pytest.mark.parametrize("page", PAGES)
def test_all_commands_are_in_bash_blocks(page: str) -> None:
    assert set(re.findall(r"^```(.*)$", text_of(page), re.MULTILINE)) <= {"bash", ""}
    for block in re.findall(r"^```\n(.*?)^```", text_of(page), re.DOTALL | re.MULTILINE):
        assert not re.search(r"^(tlt|make|dvc) ", block, re.MULTILINE), "a command that nothing checks"


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    for target, anchor in re.findall(r"\]\(([^)#:\s]*)(?:#([\w-]+))?\)", text_of(page)):
        path = (ROOT / page).parent / target if target else ROOT / page
        assert path.exists(), target
        assert not anchor or anchor in anchors_of(path), f"{target}#{anchor}"


def anchors_of(page: Path) -> set[str]:
    """Of the headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_named_files_exist(page: str) -> None:
    for name in NAMED.findall(text_of(page)):
        assert (ROOT / name).exists() or any(ROOT.glob(name)), name


def test_the_readme_is_short_and_the_rooms_are_those_of_the_contract() -> None:
    assert len(text_of("README.md").splitlines()) <= 130
    contracts = tomllib.loads(text_of("pyproject.toml"))["tool"]["importlinter"]["contracts"]
    (layers,) = [c["layers"] for c in contracts if c.get("containers") == ["tlt_core"]]
    laid_out = text_of("CONTRIBUTING.md").split("## How the code is laid out\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (`[\w`, ]+`) \| ", laid_out, re.MULTILINE)
    assert [set(re.findall(r"\w+", row)) for row in rows] == [{*layer.replace("|", " ").split()} for layer in layers]


@pytest.mark.parametrize("page", sorted(set(PAGES) - GENERATED))
def test_settings_in_the_text_exist(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    code = " ".join(re.findall(r"`([^`]+)`", BLOCK.sub("", text_of(page))))
    named = {match for word in code.split() if (match := SETTING.fullmatch(word))}
    sections = yaml.safe_load((ROOT / "params.yaml").read_text()).keys()
    monkeypatch.chdir(ROOT)
    for match in named:
        key, value = match.groups()
        if key.partition(".")[0] in sections and not key.endswith((".py", ".json", ".md")):
            assert "unknown key" not in refusal_of(f"{key}={value or '{}'}"), f"{page}: {key}"


def refusal_of(override: str) -> str:
    try:
        load("params.yaml", [override])
    except ConfigError as error:
        return str(error)
    return ""


def test_metrics_in_the_text_are_measured() -> None:
    rows = re.findall(r"^\| .*\? \| (.*) \|$", text_of("docs/research.md"), re.MULTILINE)
    names = {name for row in rows for name in re.findall(r"`([^`]+)`", row)}
    assert len(names) > 20
    assert not undeclared(names)


@pytest.mark.parametrize("page", ["docs/research.md"])
def test_the_example_of_own_data_and_reward_works(page: str, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = load("mine.yaml")
    assert isinstance(cfg.data, FileData)
    (question,), held_back = file_questions.splits(cfg.data)
    assert len(held_back) == 1
    monkeypatch.syspath_prepend(str(project))
    monkeypatch.delitem(sys.modules, "my_reward", raising=False)
    response = f"<think>so</think><answer>{question.answer}</answer>"
    item = verifiers.Item(question.question, response, question.answer, question.task, question.metadata)
    outcome = verifiers.score_response([(f.kind, f.path) for f in cfg.reward.functions], item)
    assert outcome.message == ""
    assert outcome.components == pytest.approx((1.0, 1.0, 1 - len(response) / 4000))


def test_the_serving_page_serves_as_the_card_does() -> None:
    text = text_of("docs/serving.md")
    (config,) = [c[c.index("--speculative-config") + 1] for c in commands_of(text) if "--speculative-config" in c]
    serving = {key: value for key, value in json.loads(config).items() if key.startswith("num_")}
    record = {
        **{"created": "", "commit": "", "command": [], "serving": serving},
        "run": {"name": "x", "step": 1, "mlflow_run_id": ""},
        "target": {"name": "policy", "vocab_size": 64},
        "drafter": {"taps": [0, 1, 2], "draft_vocab_size": 8},
    }
    engines = ("vllm", "python")
    on_page = [c for c in commands_of(text) if c[0] in engines]
    normal = [[json.dumps(json.loads(w)) if w.startswith("{") else w for w in c] for c in on_page]
    assert normal == [c for c in commands_of(model_card(record)) if c[0] in engines]
    table = serving["num_speculative_tokens_per_batch_size"]
    assert f"`{json.dumps(table)}`" in text
    assert serving["num_speculative_tokens"] == max(depth for *_, depth in table)
