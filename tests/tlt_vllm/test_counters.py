"""What an engine leaves for the server's /metrics page."""

from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from tests.tlt_vllm.test_draft_lengths import Engine, settings
from tlt_vllm.counters import FOLDER, Page, Writer


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(FOLDER, str(tmp_path))
    return tmp_path


def shown(folder: Path) -> dict[tuple[str, ...], float]:
    registry = CollectorRegistry()
    registry.register(Page(folder))
    families = text_string_to_metric_families(generate_latest(registry).decode())
    return {(s.name, *s.labels.values()): s.value for family in families for s in family.samples}


def test_the_page_is_what_the_engines_counted(folder: Path) -> None:
    engines = [Engine(settings(policy="fixed")), Engine(settings(policy="off"))]
    for number, engine in enumerate(engines):
        engine.survives = 3
        for _ in range(5):
            engine.step(["a", "b"])
        Writer(number).write(engine.lengths, is_idle=True)
    page = shown(folder)
    # The first step verifies nothing, since nothing had been drafted yet.
    assert page["tlt_rounds_total", "0", "7"] == 4
    assert page["tlt_round_requests_total", "0", "7"] == 8
    assert page["tlt_draft_tokens_total", "0", "7"] == 8 * 7
    assert page["tlt_accepted_tokens_total", "0", "7"] == 8 * 3
    assert page["tlt_rounds_total", "0", "0"] == 1
    assert page["tlt_rounds_total", "1", "0"] == 5
    spent_s = sum(value for (name, number, *_), value in page.items() if "seconds" in name and number == "0")
    assert spent_s == pytest.approx(engines[0].now_s, rel=0.1), "a draft counts with the step that verifies it"
    assert page["tlt_tuner_failed", "0"] == 0
