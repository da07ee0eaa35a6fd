"""Image, compose file and Kubernetes job fit each other and the code.  No container engine is needed."""

import fnmatch
import json
import re
import shlex
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from conf.load import load
from flows import _environment, cli
from tlt_core.rollout.vllm.environment import vllm_python

ROOT = Path(__file__).parents[2]
UID = 10001
TARGETS = ("cpu", "cuda")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())
SERVICES: dict[str, Any] = COMPOSE["services"]
POOL: dict[str, Any] = json.loads((ROOT / "deploy" / "kubernetes" / "pool.json").read_text())
CLUSTER: dict[str, Any] = yaml.safe_load((ROOT / "deploy" / "kubernetes" / "prefect.yaml").read_text())


def stages() -> dict[str, list[tuple[str, str]]]:
    """(instruction, rest of its line) of each stage, those of the stage that it begins from included."""
    text = (ROOT / "deploy" / "Dockerfile").read_text()
    lines = (line for line in text.replace("\\\n", " ").splitlines() if line and not line.startswith("#"))
    found: dict[str, list[tuple[str, str]]] = {}
    for line in lines:
        word, _, rest = line.partition(" ")
        if word == "FROM":
            base, as_, name = rest.split()
            assert as_ == "AS"
            current = found[name] = list(found.get(base, [("FROM", base)]))
        else:
            current.append((word, rest.strip()))
    return found


def rest_of(stage: str, word: str) -> list[str]:
    return [rest for found, rest in stages()[stage] if found == word]


def variables(stage: str) -> dict[str, str]:
    return dict(word.split("=", 1) for line in rest_of(stage, "ENV") for word in shlex.split(line))


def writable() -> set[str]:
    """Folders that the image makes for its user."""
    (made,) = re.findall(rf"install -d -o {UID} -g {UID} ([^&\n]+)$", "\n".join(rest_of("base", "RUN")), re.MULTILINE)
    return set(made.split())


def is_sent(path: str) -> bool:
    """Whether the build gets this file: the last pattern of .dockerignore that matches it or a folder above decides."""
    folders = [path, *(str(folder) for folder in Path(path).parents)][:-1] or [path]
    sent = True
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        if line and not line.startswith("#"):
            pattern = line.removeprefix("!")
            anywhere = pattern.removeprefix("**/")
            if any(fnmatch.fnmatch(f if anywhere == pattern else Path(f).name, anywhere) for f in folders):
                sent = line.startswith("!")
    return sent


@cache
def job() -> dict[str, Any]:
    """The Kubernetes job of the train deployment."""
    from prefect.utilities.templating import apply_values

    properties = POOL["variables"]["properties"]
    defaults = {name: variable["default"] for name, variable in properties.items() if "default" in variable}
    given = CLUSTER["deployments"][0]["work_pool"]["job_variables"]
    filled = apply_values(POOL["job_configuration"], defaults | given)
    assert isinstance(filled, dict)
    return filled["job_manifest"]


@pytest.mark.parametrize("target", TARGETS)
def test_an_image_ends_as_a_user_without_rights_and_keeps_a_compiler(target: str) -> None:
    instructions = [word for word, _ in stages()[target]]
    assert rest_of(target, "USER") == [f"{UID}:{UID}"], "a name could not be checked by runAsNonRoot"
    assert "RUN" not in instructions[instructions.index("USER") :], "a RUN after USER would make files of its own"
    setup = " ".join(rest_of(target, "RUN"))
    assert f"useradd --uid {UID} --gid {UID} --create-home" in setup
    assert re.search(r"apt-get install [^&]*\bgcc libc6-dev\b", setup)  # kernels.native looks for it at run time


@pytest.mark.parametrize("target", TARGETS)
def test_what_is_copied_exists_and_is_sent(target: str) -> None:
    sources = [source for line in rest_of(target, "COPY") for source in line.split()[:-1]]
    locked = [f"deploy/requirements{part}.txt" for part in ("", "-build")]
    vllm = ["deploy/requirements-vllm-cuda.txt"] if target == "cuda" else []
    assert sources == ["pyproject.toml", "constraints.txt", *locked, *vllm, "."]
    packages = [name.rstrip("*") for name in PROJECT["tool"]["setuptools"]["packages"]["find"]["include"]]
    others = ("conf/demo.yaml", "kernels/native/layers.c", "kernels/native/lanes.h", "prefect.yaml", "README.md")
    for name in (*sources[:-1], *others, *(f"{package}/__init__.py" for package in packages)):
        assert (ROOT / name).is_file()
        assert is_sent(name), name


def test_the_cuda_target_has_vllm_where_the_code_looks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    python = variables("cuda")["VLLM_PYTHON"]
    monkeypatch.setenv("VLLM_PYTHON", python)
    assert vllm_python() == Path(python)
    assert "VLLM_PYTHON" not in variables("cpu")
    packages, plug_in = [rest for rest in rest_of("cuda", "RUN") if "VLLM_PYTHON" in rest]
    assert "--require-hashes --no-deps --requirement deploy/requirements-vllm-cuda.txt" in packages
    instructions = stages()["cuda"]
    assert instructions.index(("COPY", ". .")) < instructions.index(("RUN", plug_in)), "it is in the checkout"


def test_the_image_sets_what_the_command_sets() -> None:
    """Prefect's own commands do not come through `tlt`."""
    image = variables("cpu")
    wanted = _environment._DEFAULTS | _environment.NO_BARS
    assert {name: image.get(name) for name in wanted} == wanted
    assert image["PREFECT_HOME"] == "/tlt/.prefect"
    assert image["TLT_PROJECT"] == rest_of("cpu", "WORKDIR")[0] == job_container()["workingDir"]
    assert Path(image["HF_HOME"]).parent == Path("/tlt/artifacts"), "models would be fetched again by each container"


def commands(service: str) -> list[list[str]]:
    """Words of each command that a service runs."""
    program, *arguments = SERVICES[service]["command"]
    if program != "sh":
        return [[program, *arguments]]
    assert arguments[0] == "-c"
    found = [shlex.split(part) for part in arguments[1].split("&&")]
    assert found[-1].pop(0) == "exec", "the shell would not hand signals on"
    return found


def test_services_run_commands_that_there_are() -> None:
    for program, *arguments in (command for name in SERVICES for command in commands(name)):
        assert program in ("tlt", "prefect")
        if program == "tlt":
            cli.parse(arguments)


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_has_no_rights_and_no_secrets(name: str) -> None:
    service = SERVICES[name]
    assert (service["image"], service["build"]["target"]) == (f"tlt:{PROJECT['project']['version']}-cpu", "cpu")
    assert (service["read_only"], service["cap_drop"]) == (True, ["ALL"])
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert not {"user", "privileged", "cap_add", "network_mode", "env_file", "secrets"} & service.keys()
    for variable in service.get("environment", {}):
        assert not re.search("KEY|TOKEN|SECRET|PASS|AUTH", variable), variable
    folders = dict(folder.split(":") for folder in service["tmpfs"])
    assert folders.keys() == {"/tmp", "/home/tlt"}
    assert all("exec" in options.split(",") for options in folders.values()), "a compiled kernel could not be loaded"


def test_the_worker_is_the_one_that_tlt_deploy_would_start(monkeypatch: pytest.MonkeyPatch) -> None:
    from flows import deploy

    for variable in [*_environment._DEFAULTS, "PREFECT_WORKER_QUERY_SECONDS", "TLT_PROJECT"]:
        monkeypatch.delenv(variable, raising=False)
    wanted, ours = deploy._environment("http://prefect:4200/api"), SERVICES["worker"]["environment"]
    for variable in ("PREFECT_API_URL", "PREFECT_WORKER_QUERY_SECONDS", "PREFECT_FLOWS_HEARTBEAT_FREQUENCY"):
        assert ours[variable] == wanted[variable], variable
    before, worker = commands("worker")
    assert before == ["tlt", "recover", "--alone"], "runs of an earlier container would stay Running"
    for words in (["worker", "start"], ["--pool", deploy.POOL], ["--type", "process"], ["--with-healthcheck"]):
        assert " ".join(words) in " ".join(worker)


def job_container() -> dict[str, Any]:
    (container,) = job()["spec"]["template"]["spec"]["containers"]
    return container


def test_a_pod_is_the_image_s_user_without_rights() -> None:
    pod, container = job()["spec"]["template"]["spec"], job_container()
    assert pod["automountServiceAccountToken"] is False
    user = {"runAsNonRoot": True, "runAsUser": UID, "runAsGroup": UID, "fsGroup": UID}
    assert user.items() <= pod["securityContext"].items()
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert "command" not in container, "the image's entry point hands signals on"
    mounted = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    assert {"/home/tlt", "/tmp", *writable()} - {"/tlt/reports"} <= mounted.keys()


def test_the_deployments_of_the_cluster_run_in_the_image() -> None:
    for deployment in CLUSTER["deployments"]:
        assert deployment["work_pool"]["job_variables"]["image"] == f"tlt:{PROJECT['project']['version']}-cuda"
        cfg = load(ROOT / deployment["parameters"]["config"], deployment["parameters"]["overrides"])
        assert cfg.rollout.engine == "auto", "vLLM is in the image"
