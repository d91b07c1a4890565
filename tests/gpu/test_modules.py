"""Loading on a device: the first use, damaged files, several modules in one process."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import ctm_rt
from tests.gpu.device import Call, assert_same, copy_module, decode
from tests.gpu.inputs import Module, make

FIRST_CALL = """
import sys
import numpy as np
import ctm_rt

head_dim = int(sys.argv[1])
rng = np.random.default_rng(0)
arrays = (
    rng.standard_normal((1, 4, head_dim)).astype(np.float16),
    rng.standard_normal((4, 128, 2, head_dim)).astype(np.float16),
    np.array([[[1, 0], [2, 3]]], np.int32),
    np.array([200], np.int32),
)
out = ctm_rt.decode_attention(*map(ctm_rt.to_device, arrays), scale=0.1)
exact = ctm_rt.reference.decode_attention(*arrays, scale=0.1)
assert np.linalg.norm(ctm_rt.to_host(out) - exact) <= 6e-4 * np.linalg.norm(exact)
assert not {"torch", "cupy", "jax", "cutlass"} & set(sys.modules)
"""


def test_first_call_of_a_process(any_module: Module) -> None:
    """Case 27. No framework, no context, no set-up: the first call is right."""
    if any_module.kv_dtype == "e4m3":
        pytest.skip("the script has an f16 cache")
    subprocess.run([sys.executable, "-c", FIRST_CALL, str(any_module.head_dim)], check=True)


def halve(path: Path) -> None:
    so = path.with_suffix(".so")
    so.write_bytes(so.read_bytes()[: so.stat().st_size // 2])


def touch_header(path: Path) -> None:
    header = path.with_suffix(".h")
    header.write_text(header.read_text() + "\n")


def rewrite(**changed: object) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        path.write_text(json.dumps(json.loads(path.read_text()) | changed))

    return change


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(halve, id="half a library"),
        pytest.param(touch_header, id="another header"),
        pytest.param(rewrite(gpu_arch="sm_80"), id="another arch"),
        pytest.param(rewrite(host="aarch64-linux-gnu"), id="another host"),
        pytest.param(rewrite(dsl_version="4.7.0"), id="another exporter"),
        pytest.param(lambda path: path.with_suffix(".so").unlink(), id="no library"),
        pytest.param(lambda path: path.unlink(), id="no manifest"),
    ],
)
def test_damaged_module(any_module: Module, tmp_path: Path, damage: Callable[[Path], None]) -> None:
    """Case 28. A typed error names the file and the command that makes it again."""
    path = copy_module(any_module, tmp_path)
    damage(path)
    with pytest.raises(ctm_rt.ModuleError, match=r"kernels\.export") as raised:
        ctm_rt.load(any_module.name, store=tmp_path)
    assert str(path.parent) in str(raised.value)


def test_two_copies_of_a_module(any_module: Module, tmp_path: Path) -> None:
    """Case 31. Two libraries with the same symbols do not disturb each other."""
    call = Call(any_module, make(any_module, [1000, 3], max_pages=9))
    ours = call.bind_kernel(0, 2, 0)
    expected = call.run(ours)
    theirs = call.bind_kernel(0, 2, 0, ctm_rt.load(copy_module(any_module, tmp_path)))
    for launch in (theirs, ours, theirs):
        assert_same(call.run(launch), expected)


def test_every_module_in_turn(module: Module, any_module: Module) -> None:
    """Case 31. Loading one module leaves the other as it was."""
    calls = [Call(m, make(m, [1000, 3], max_pages=9)) for m in (module, any_module)]
    launches = [call.bind() for call in calls]
    expected = [decode(call.module, call.inputs) for call in calls]
    for _ in range(2):
        for call, launch, out in zip(calls, launches, expected, strict=True):
            assert_same(call.run(launch), out)
