"""What the doctor finds, on this machine and on machines that the test makes up."""

import sys
from pathlib import Path

import pytest

from app import doctor
from app.demo_model import GGUF_NAME
from app.embedded_redis import NoRedisError
from app.kernels_package import OURS, find_kernels_clash
from tests.scripted_engine import make_byte_model

CPUINFO = "processor\t: 0\nmodel name\t: Some CPU\nflags\t\t: fpu avx2 avx512f {more}\n"


def answers(**known: str) -> doctor.Run:
    """A machine on which these programs (by the end of their path) answer, and no others."""

    def run(command: list[str]) -> str | None:
        return next((text for name, text in known.items() if Path(command[0]).name == name), None)

    return run


def test_everything_is_looked_at_on_this_machine(tmp_path: Path) -> None:
    python = Path(sys.executable).name
    run = answers(**{python: '["2.0", []]', "valkey-server": "Valkey 9", "redis-server": "Redis 8"})
    found = {f.what: f for f in doctor.examine(tmp_path, run)}
    first = ["python", "processor", "memory", "torch", "gpu", "compiler", "redis"]
    assert list(found) == [*first, "model", "threads", "kernels"]
    assert found["kernels"].state == "good"
    assert found["gpu"].text == "none: the processor is used"


def test_processors(tmp_path: Path) -> None:
    path = tmp_path / "cpuinfo"
    path.write_text(CPUINFO.format(more="avx512_bf16"))
    finding = doctor.find_processor(path)
    assert finding.state == "good"
    assert finding.text.startswith("Some CPU, ")
    assert finding.text.endswith("avx2 avx512f avx512_bf16: bfloat16")
    path.write_text(CPUINFO.format(more=""))
    assert doctor.find_processor(path).text.endswith("no bfloat16 in hardware, models run in float32")
    assert doctor.find_processor(tmp_path / "nothing").state == "note"


def test_memory(tmp_path: Path) -> None:
    path = tmp_path / "meminfo"
    path.write_text("MemTotal:       8388608 kB\nMemAvailable:    4194304 kB\n")
    assert doctor.find_memory(path) == doctor.Finding("memory", "good", "4.0 of 8.0 GiB available")
    assert doctor.find_memory(tmp_path / "nothing").state == "note"


@pytest.mark.parametrize(
    ("known", "states", "gpu"),
    [
        ({"python": '["2.13.0", ["H200"]]'}, ["good", "good"], "H200"),
        ({"python": '["2.13.0", []]', "nvidia-smi": "GPU 0"}, ["good", "note"], "cannot use it"),
        ({"python": '["2.13.0", []]'}, ["good", "good"], "none"),
        ({}, ["bad"], "cannot be loaded"),
    ],
)
def test_gpus(known: dict[str, str], states: list[str], gpu: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/usr/bin/python")
    findings = list(doctor.find_torch(answers(**known)))
    assert [f.state for f in findings] == states
    assert gpu in findings[-1].text


def test_compilers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}" if name == "g++" else None)
    assert doctor.find_compiler(answers(**{"g++": "g++ 14\nFree Software"})).text == "g++ 14"
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert doctor.find_compiler(answers()).state == "note"


def test_redis(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "find_server_program", lambda: Path("/bin/redis-server"))
    assert doctor.find_redis(answers(**{"redis-server": "Redis 8"})).text == "Redis 8 (/bin/redis-server)"
    assert doctor.find_redis(answers()).state == "bad"

    def nothing() -> Path:
        raise NoRedisError("no Redis: give --redis-url")

    monkeypatch.setattr(doctor, "find_server_program", nothing)
    assert doctor.find_redis(answers()).text == "no Redis: give --redis-url"


def test_models(tmp_path: Path) -> None:
    assert "the first start downloads" in doctor.find_models(tmp_path).text
    (tmp_path / "downloads").mkdir()
    (tmp_path / "downloads" / GGUF_NAME).touch()
    assert "prepared at the first start" in doctor.find_models(tmp_path).text
    make_byte_model(tmp_path / "models" / "m")
    assert doctor.find_models(tmp_path).text == f"byte-model in {tmp_path}"
    (tmp_path / "models" / "m" / "manifest.json").write_text("{}")
    assert doctor.find_models(tmp_path).state == "note"


@pytest.mark.parametrize(
    ("answer", "state", "text"),
    [
        ('{"rows": 8, "step_ms": {"1": 20.04, "2": 11.96}}', "good", "takes 12.0 ms with 2, 20.0 with 1"),
        ('{"rows": 8, "step_ms": {"1": 20.0, "2": 30.0}}', "note", "--threads 1 is better"),
        ("null", "good", "2, one for each core"),
    ],
)
def test_threads(answer: str, state: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "available_cpus", lambda: 2)
    asked: list[list[str]] = []

    def run(command: list[str]) -> str:
        asked.append(command)
        return answer

    assert doctor.find_threads(tmp_path, run).text == "2, one for each core"
    model = make_byte_model(tmp_path / "models" / "m")
    assert doctor.find_threads(tmp_path, run).text == "2, one for each core"
    assert asked == [], "there are no weights to time a step for"
    model.weights_path("float32").touch()
    finding = doctor.find_threads(tmp_path, run)
    assert finding.state == state
    assert finding.text.endswith(text)
    (command,) = asked
    assert command[-5:-3] == [str(tmp_path / "kernels"), "float32"]
    assert command[-2:] == ["1", "2"]
    monkeypatch.setattr(doctor, "available_cpus", lambda: 1)
    assert doctor.find_threads(tmp_path, run).text == "1, one for each core"


def test_a_step_that_cannot_be_timed_is_no_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "available_cpus", lambda: 2)
    make_byte_model(tmp_path / "models" / "m").weights_path("bfloat16").touch()
    assert doctor.find_threads(tmp_path, answers()) == doctor.Finding("threads", "good", "2, one for each core")


def test_a_command_that_fails_or_is_not_there_has_no_output() -> None:
    assert doctor.run_command(["/bin/echo", "hello"]) == "hello"
    assert doctor.run_command(["/bin/false"]) is None
    assert doctor.run_command(["/nowhere/program"]) is None


def test_the_package_kernels_is_ours_or_the_doctor_says_so(tmp_path: Path) -> None:
    assert find_kernels_clash() is None
    assert find_kernels_clash(OURS) is None
    clash = find_kernels_clash(tmp_path)
    assert clash is not None
    assert clash.startswith(f"`import kernels` finds {tmp_path}, expected {OURS}")
