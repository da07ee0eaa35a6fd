"""llama.cpp and OpenVINO GenAI as rivals of our engine: environment, converted model, and how each is started.

    llama.cpp         Hugging Face folder -> GGUF, by `gguf_file`
    llama.cpp fp16    the same with float16 weights, if bfloat16 is configured: not every build is fast with bfloat16
    openvino          Hugging Face folder -> OpenVINO IR, by optimum-intel in the peer's environment

Neither weights nor caches are quantised.  An engine that cannot be had is reported with the reason.
"""

import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bench.engines import environment
from bench.engines.environment import LLAMA_CPP, OPENVINO, PeerError
from bench.engines.gguf_file import write_gguf
from bench.engines.measure import EngineSpec
from tlt_core.model.config import ModelError

NAMES = (LLAMA_CPP.name, OPENVINO.name)
_PROCESSES = Path(__file__).with_name("processes")


class Peers(NamedTuple):
    """Engines to start, and why others cannot be."""

    specs: list[EngineSpec]
    reasons: dict[str, str]  # by the engine's name


def chosen_peers(text: str) -> tuple[str, ...]:
    """Names from `all`, `none`, or a list with commas.  Raises ValueError for an unknown name."""
    if text in ("all", "none"):
        return NAMES if text == "all" else ()
    names = tuple(part.strip() for part in text.split(","))
    unknown = sorted(set(names) - set(NAMES))
    if unknown:
        raise ValueError(f"no peer is called {unknown[0]!r}; say all, none, or of {', '.join(NAMES)}")
    return names


def peers_of(names: Sequence[str], common: Mapping[str, Any], *, environments: Path, work_dir: Path) -> Peers:
    """Prepare the named peers.  common: settings of every engine; work_dir: folder for converted models."""
    makers: dict[str, Callable[[Mapping[str, Any], Path, Path], list[EngineSpec]]] = {
        LLAMA_CPP.name: _llama_cpp,
        OPENVINO.name: _openvino,
    }
    found = Peers([], {})
    for name in names:
        work_dir.mkdir(parents=True, exist_ok=True)
        try:
            found.specs.extend(makers[name](common, environments, work_dir.absolute()))
        except (PeerError, ModelError) as error:
            found.reasons[name] = f"left out: {error}"
    return found


def _llama_cpp(common: Mapping[str, Any], environments: Path, work_dir: Path) -> list[EngineSpec]:
    python = environment.interpreter(LLAMA_CPP, environments)
    kinds = {LLAMA_CPP.name: common["dtype"]}
    if common["dtype"] == "bfloat16":
        kinds[f"{LLAMA_CPP.name} fp16"] = "float16"
    specs = []
    for name, dtype in kinds.items():
        file = work_dir / f"model-{dtype}.gguf"
        write_gguf(Path(common["model"]), file, dtype=getattr(torch, dtype))
        specs.append(_spec(name, "llama_cpp.py", python, {**common, "dtype": dtype, "weights": str(file)}))
    return specs


def _openvino(common: Mapping[str, Any], environments: Path, work_dir: Path) -> list[EngineSpec]:
    python = environment.interpreter(OPENVINO, environments)
    folder = work_dir / f"openvino-{common['dtype']}"
    shutil.rmtree(folder, ignore_errors=True)  # weights of an earlier policy
    environment.run(
        [str(python), "-P", str(_PROCESSES / "openvino_export.py"), common["model"], str(folder), common["dtype"]],
        purpose="the conversion to OpenVINO",
    )
    return [_spec(OPENVINO.name, "openvino_llm.py", python, {**common, "weights": str(folder)})]


def _spec(name: str, file: str, python: Path, settings: Mapping[str, Any]) -> EngineSpec:
    variables = environment.variables(threads=settings["threads"])
    return EngineSpec(name, _PROCESSES / file, python, variables, settings, optional=True)
