"""Machine facts."""

from pathlib import Path

from tlt_core.machine import doctor


def test_processors_of_one_name_are_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "cpuinfo"
    path.write_text("processor\t: 0\ncpu family\t: 25\nmodel\t\t: 17\nmodel name\t: AMD EPYC\n\nmodel name\t: other\n")
    assert doctor.cpu_model(path) == "AMD EPYC, family 25, model 17"
    path.write_text("model name\t: One\n")
    assert doctor.cpu_model(path) == "One"
    assert doctor.cpu_model(tmp_path / "absent")
