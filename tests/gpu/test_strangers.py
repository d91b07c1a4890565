"""A kernel that this project did not write goes through the same path, on the device."""

import re
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

import ctm_rt
from ctm_rt import driver
from tests.gpu.device import DEVICE, Call, assert_same, capture, new_stream, place, write
from tests.gpu.inputs import Module, make

ROOT = Path(__file__).parents[2]
BUILT = ROOT / "build" / "stranger" / "scaled_add.so"  # by `make kernels`, where there is the DSL
SCALE = 0.5


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if BUILT.exists():
        return BUILT
    if find_spec("cutlass") is None:
        pytest.skip(f"neither {BUILT} nor the DSL to export it is there")
    folder = tmp_path_factory.mktemp("stranger")
    run_python("-m", "examples.stranger_kernel", str(folder))
    return folder / BUILT.name


@pytest.fixture
def arrays() -> dict[str, np.ndarray]:
    a, b = np.random.default_rng(0).standard_normal((2, 700, 64), np.float32)
    return {"a": a, "b": b, "out": np.full_like(a, np.nan)}


def rows(arrays: Mapping[str, object]) -> dict[str, ctm_rt.Slots]:
    """The kernel fixes all but the number of rows."""
    return {name: ctm_rt.Slots(array, shape=(0,), strides=()) for name, array in arrays.items()}


def assert_added(out: np.ndarray, arrays: dict[str, np.ndarray]) -> None:
    np.testing.assert_allclose(out, arrays["a"] + SCALE * arrays["b"], rtol=1e-6, atol=1e-6)


def test_numpy_arrays(library: Path, arrays: dict[str, np.ndarray]) -> None:
    """They are staged, and the output that the caller names is copied back."""
    before = {name: array.copy() for name, array in arrays.items()}
    ctm_rt.launch(library, **rows(arrays), scale=SCALE, outputs=["out"])
    assert_added(arrays["out"], before)
    for name in ("a", "b"):
        np.testing.assert_array_equal(arrays[name], before[name])


def test_device_arrays(library: Path, arrays: dict[str, np.ndarray]) -> None:
    """They are used in place, launch after launch, in a graph too."""
    placed = {name: place(array) for name, array in arrays.items()}
    launch = ctm_rt.load(library).bind(**rows(placed), scale=SCALE)
    launch()
    assert_added(ctm_rt.to_host(placed["out"]), arrays)
    write(placed["out"], arrays["out"])
    with new_stream() as stream:
        replay = capture(stream, launch, launch)
        assert np.isnan(ctm_rt.to_host(placed["out"])).all()
        replay()
        driver.synchronize(stream, DEVICE)
    assert_added(ctm_rt.to_host(placed["out"]), arrays)


def test_wrong_arguments(library: Path, arrays: dict[str, np.ndarray]) -> None:
    """Slots that the header does not have, and an argument left out, are refused by name."""
    placed = {name: place(array) for name, array in arrays.items()}
    kernel = ctm_rt.load(library)
    with pytest.raises(ctm_rt.ArgumentError, match=r"^b: .*Slots"):
        kernel.bind(**rows(placed) | {"b": placed["b"]}, scale=SCALE)
    with pytest.raises(ctm_rt.ArgumentError, match=r"^scale: "):
        kernel.bind(**rows(placed))


def test_beside_ours(library: Path, arrays: dict[str, np.ndarray], any_module: Module) -> None:
    """Case 31."""
    call = Call(any_module, make(any_module, [300, 5]))
    launch = call.bind()
    expected = call.run(launch)
    ctm_rt.launch(library, **rows(arrays), scale=SCALE, outputs=["out"])
    assert_added(arrays["out"], arrays)
    assert_same(call.run(launch), expected)


def test_example(library: Path) -> None:
    """The example prints two small errors."""
    printed = run_python("-m", "examples.stranger", str(library))
    errors = [float(number) for number in re.findall(r": (\S+)$", printed, re.MULTILINE)]
    assert len(errors) == 2
    assert max(errors) < 1e-5


def test_readme() -> None:
    """The ten lines of the README run, and print a small error last."""
    code = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert float(run_python("-c", code[1]).split()[-1]) < 1e-3


def run_python(*arguments: str) -> str:
    """Run Python in the project's root; return what it prints."""
    command = [sys.executable, *arguments]
    return subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.PIPE, text=True).stdout
