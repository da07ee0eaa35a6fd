"""The page of a run: all in one file, whatever the run has and lacks."""

import json
import re
from pathlib import Path

from conf.load import load
from tasks.report_page import page

_PIXEL = bytes.fromhex(  # a PNG of one pixel
    "89504e470d0a1a0a0000000d4948445200000001000000010806000000"
    "1f15c4890000000d49444154789c6360606060000000050001a5f645400000000049454e44ae426082"
)
_ROWS = [
    {"step": 0, "val-core/all/reward/greedy": 0.25},
    {
        **{"step": 1, "critic/rewards/mean": 0.1, "response_length/p50": 30.0},
        **{"timing_s/step": 10.0, "timing_s/gen": 4.0},
        **{"rollout/spec_speedup_est": 1.5, "rollout/spec_accept_length": 2.0},
        **{"idle/idle_s": 2.0, "idle/harvested_s": 1.0, "idle/streamed_s": 0.0, "idle/untrained_s/no_data": 1.0},
    },
    {"step": 2, "critic/rewards/mean": float("nan"), "timing_s/step": 10.0, "timing_s/gen": 4.0},
]


def _run_dir(folder: Path) -> Path:
    (folder / "figures").mkdir()
    for step in range(1, 6):
        (folder / "figures" / f"timeline_{step:06d}.png").write_bytes(_PIXEL)
    (folder / "figures" / "lengths_000005.png").write_bytes(_PIXEL)
    attempt = {"started": "2026-01-02T03:04:05+00:00", "argv": ["tlt", "<b>"], "machine": {"cpu": "Z80 & co"}}
    (folder / "run.json").write_text(json.dumps({"attempts": [{"argv": ["old"]}, attempt]}))
    return folder


def test_a_page_needs_no_other_file_escapes_what_it_quotes_and_has_seconds_and_pictures(tmp_path: Path) -> None:
    text = page(_run_dir(tmp_path), load("conf/demo.yaml"), _ROWS)
    sources = re.findall(r'src="([^"]{0,30})', text)
    assert all(source.startswith(("data:image/png;base64,", "data:image/svg+xml;base64,")) for source in sources)
    assert not re.search(r"<script|<link|href=|url\(|<b>", text)
    assert "Z80 &amp; co" in text
    assert "&lt;b&gt;" in text
    assert "4.0 s saved of about 24.0 s in 2 steps (17%, estimate)" in text  # 8 s of rollouts, half as fast again
    assert "<td class=n>+4.0</td><td class=n>17%</td>" in text
    assert "nothing to train on yet</td><td class=n>1.0</td><td class=n>50%</td>" in text
    captions = re.findall(r"<figcaption>(Timeline[^<]*)", text)
    assert captions == ["Timeline of step 5", "Timeline of step 4", "Timeline of step 3"]
    assert text.count("data:image/png") == 4
    assert text.count("data:image/svg+xml") == 5  # all curves


def test_a_run_with_hardly_anything_has_a_page(tmp_path: Path) -> None:
    rows = [{"step": 1, "timing_s/step": 5.0, "timing_s/gen": 2.0}]
    text = page(tmp_path, load("conf/ablation_no_spec.yaml"), rows)
    assert "nothing saved in 1 step of 5.0 s" in text
    assert "Acceptance length (1: no gain): nothing was recorded." in text
    assert "No timeline was kept." in text
    assert "No machine was recorded." in text
    assert "nothing to judge" in page(tmp_path, load("conf/demo.yaml"), [])
