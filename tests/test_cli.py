import json
import os
import shutil
import subprocess
import sys

import pytest
from click.testing import CliRunner

import ctm_rt
from ctm_rt import cli, demo, doctor, driver
from ctm_rt.modules.manifest import HOST
from tests.conftest import MODULES

NAMES = list(MODULES)


@pytest.fixture
def run(fake, decode_store):
    """Run a command; return its result, and its JSON if it was asked for."""

    def run(*arguments, exit_code=0):
        result = CliRunner().invoke(cli.main, list(map(str, arguments)))
        assert result.exit_code == exit_code, result.output
        assert "Traceback" not in result.output
        return json.loads(result.stdout) if "--json" in arguments else result

    return run


@pytest.fixture
def no_gpu(fake):
    driver.device_count()  # the driver is up: without a GPU it would not come up
    fake.set_devices(0)


@pytest.fixture
def small_demo(monkeypatch):
    """Three cases instead of all: every kind of option, in a second."""
    cases = [case for case in demo.CASES if case.sinks or case.name == "ragged, one empty"]
    monkeypatch.setattr(demo, "CASES", cases)
    return cases


# -- demo -----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_gpu")
def test_demo_on_the_host(run, small_demo, fake):
    found = run("demo", "--json")
    assert found["backend"] == "host"
    assert found["device"] is None
    assert found["linked"] == NAMES
    assert [case["name"] for case in found["cases"]] == [case.name for case in small_demo]
    for case in found["cases"]:
        assert case["passed"]
        assert 0 < case["error"] <= found["tolerance"]
    assert not fake.launches()


@pytest.mark.usefixtures("no_gpu", "small_demo")
def test_demo_says_that_nothing_was_launched(run):
    text = run("demo").output
    assert "host backend (NumPy): no GPU is visible" in text
    assert f"{len(NAMES)} modules found, parsed and linked, none launched" in text
    assert ", ".join(NAMES) in text
    assert "3 of 3 passed" in text


@pytest.mark.usefixtures("no_gpu")
def test_demo_fails_with_a_case(run, small_demo, monkeypatch):
    plain = ctm_rt.reference.decode_attention_plain
    wrong = lambda **arguments: plain(**arguments) * 1.001  # noqa: E731
    monkeypatch.setattr(ctm_rt.reference, "decode_attention_plain", wrong)
    assert "FAIL" in run("demo", exit_code=1).output
    assert not any(case["passed"] for case in run("demo", "--json", exit_code=1)["cases"])


@pytest.fixture
def few_repeats(monkeypatch):
    monkeypatch.setattr(demo, "NUM_TIMED", 5)


@pytest.mark.usefixtures("small_demo", "few_repeats")
def test_demo_on_a_gpu(run, computing):
    found = run("demo", "--json")
    assert found["backend"] == "gpu"
    assert found["device"]
    assert all(case["passed"] and case["us"] > 0 for case in found["cases"])
    assert len(computing.launches()) == 3 * 6
    assert "3 of 3 passed" in run("demo").output


@pytest.mark.usefixtures("small_demo", "few_repeats")
def test_demo_on_a_gpu_that_computes_nothing(run, fake):
    """Each case is launched, each comes back as NaN and fails."""
    found = run("demo", "--json", exit_code=1)
    assert {(case["error"], case["passed"]) for case in found["cases"]} == {(None, False)}
    assert len(fake.launches()) == 3 * 6


# -- list -----------------------------------------------------------------------------------------


def test_list(run, decode_store):
    rows = run("list", "--json")["modules"]
    assert [row["name"] for row in rows] == NAMES
    for row in rows:
        assert row["gpu_arch"] == "sm_90a"
        assert row["host"] == HOST
        assert row["usable"]
        assert 10_000 < row["size_nbytes"] < 1_000_000
        assert all(16 <= registers <= 255 for registers in row["registers"])
        assert row["path"].startswith(str(decode_store))
    text = run("list").output
    assert all(name in text for name in NAMES)
    assert text.count("yes") == len(NAMES)


def test_list_says_why_not(run, fake):
    fake.set_devices(1, (8, 0))
    assert {row["reason"] for row in run("list", "--json")["modules"]} == {
        "the GPUs here are sm_80"
    }
    fake.set_devices(0)
    assert {row["reason"] for row in run("list", "--json")["modules"]} == {"no GPU is visible"}


def test_list_shows_damage(run, decode_store, tmp_path):
    shutil.copytree(decode_store, tmp_path / "store")
    so = tmp_path / "store" / "sm_90a" / HOST / f"{NAMES[0]}.so"
    os.truncate(so, 5000)
    bad, *good = run("list", "--json", "--store", tmp_path / "store")["modules"]
    assert str(so) in bad["reason"]
    assert not bad["usable"]
    assert all(row["usable"] for row in good)


def test_list_of_an_empty_store(run, tmp_path):
    assert run("list", "--json", "--store", tmp_path)["modules"] == []
    assert f"no modules in {tmp_path}" in run("list", "--store", tmp_path).output.replace("\n", "")


# -- inspect --------------------------------------------------------------------------------------


def test_inspect_a_name(run):
    found = run("inspect", NAMES[0], "--json")
    assert found["wrapper"] == f"cute_dsl_{NAMES[0]}_wrapper"
    assert found["prefix"] == NAMES[0]
    assert [p["name"] for p in found["parameters"]][:3] == ["q", "kv_pool", "page_table"]
    q = found["parameters"][0]
    assert q == {
        "name": "q",
        "kind": "tensor",
        "ctype": f"{NAMES[0]}_Tensor_q_t *",
        "shape_slots": 2,
        "shape_bits": 32,
        "stride_slots": 2,
        "stride_bits": 64,
    }
    text = run("inspect", NAMES[0]).output
    assert "registers" in text
    assert "workspace" in text


def test_inspect_files(run, decode_store, tmp_path):
    folder = decode_store / "sm_90a" / HOST
    expected = run("inspect", NAMES[0], "--json")
    for suffix in (".h", ".so", ".json"):
        assert run("inspect", folder / (NAMES[0] + suffix), "--json") == expected
    shutil.copy(folder / f"{NAMES[0]}.h", tmp_path / "stranger.h")
    assert run("inspect", tmp_path / "stranger.h", "--json") == expected
    assert "kv_pool" in run("inspect", tmp_path / "stranger.h").output


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("nonsense", "no module nonsense"),
        ("missing.h", "missing.h"),
        ("broken.h", "broken.h"),
    ],
)
def test_inspect_refuses(run, tmp_path, what, words):
    (tmp_path / "broken.h").write_text("int main;")
    path = tmp_path / what if "." in what else what
    result = run("inspect", path, exit_code=1)
    assert result.stderr.startswith("Error: ")
    assert words in result.stderr
    assert result.stderr.count("\n") == 1


# -- doctor ---------------------------------------------------------------------------------------


def test_doctor_is_content(run):
    found = run("doctor", "--json")
    assert found["ok"]
    assert {f["what"] for f in found["findings"]} == {
        "driver",
        "GPU 0",
        "modules for sm_90a",
        "exporter",
        "C compiler",
    }
    assert run("doctor").output.count("OK") >= 3


def findings(document):
    return {f["what"]: f for f in document["findings"]}


def test_doctor_finds_what_is_missing(run, fake, tmp_path):
    found = findings(run("doctor", "--json", "--store", tmp_path, exit_code=1))
    modules = found["modules for sm_90a"]
    assert not modules["ok"]
    assert modules["remedy"] == f"run `python -m kernels.export --arch sm_90a --out {tmp_path}`"
    fake.set_devices(0)
    assert not findings(run("doctor", "--json", exit_code=1))["GPU"]["ok"]
    assert "problem" in run("doctor", exit_code=1).output


def test_doctor_names_a_damaged_module(run, decode_store, tmp_path):
    shutil.copytree(decode_store, tmp_path / "store")
    (tmp_path / "store" / "sm_90a" / HOST / f"{NAMES[0]}.h").unlink()
    found = findings(run("doctor", "--json", "--store", tmp_path / "store", exit_code=1))
    damaged = found[f"module {NAMES[0]}"]
    assert f"{NAMES[0]}.h is missing" in damaged["detail"]
    assert damaged["remedy"].startswith("run `python -m kernels.export")
    assert found["modules for sm_90a"]["ok"]


def test_doctor_can_do_without_the_exporter(run, monkeypatch):
    def missing(package):
        raise doctor.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(doctor.metadata, "version", missing)
    monkeypatch.setattr(doctor, "compiler", lambda: None)
    found = findings(run("doctor", "--json"))
    assert "pip install nvidia-cutlass-dsl==" in found["exporter"]["remedy"]
    assert not found["C compiler"]["ok"]
    assert "absent" in run("doctor").output


# -- the whole ------------------------------------------------------------------------------------


def test_without_a_driver(tmp_path):
    """No libcuda at all: a child process that finds none still answers, in one line each."""
    done = subprocess.run(
        [sys.executable, "-m", "ctm_rt", "doctor", "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    if findings(json.loads(done.stdout))["driver"]["ok"]:
        pytest.skip("this machine has a driver")
    assert done.returncode == 1
    assert "install" in findings(json.loads(done.stdout))["driver"]["remedy"]
    assert not done.stderr


def test_usage(run):
    assert run("nonsense", exit_code=2).stderr.count("Traceback") == 0
    assert ctm_rt.__version__ in run("--version").output
    for command in ("demo", "list", "inspect", "doctor", "bench"):
        assert command in run("--help").output
        assert "--json" in run(command, "--help").output
