"""All tests outside tests/gpu run against tests/fake_cuda."""

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests import fake_cuda

# What most tests make do with: between them both types of pool, and ratios up to 8 and 16.
MODULES = ("fmha_decode_e4m3_d64", "fmha_decode_f16_d128", "fmha_decode_f16_d64")
TREE_MODULES = ("fmha_decode_tree_e4m3_d64", "fmha_decode_tree_f16_d64")


def pytest_configure(config: pytest.Config) -> None:
    marks = config.option.markexpr
    if "gpu" not in marks or "not gpu" in marks:
        folder = tempfile.TemporaryDirectory(prefix="fake_cuda")
        config.add_cleanup(folder.cleanup)
        fake_cuda.load(fake_cuda.build(Path(folder.name)))


@pytest.hookimpl(tryfirst=True)  # before -m looks at the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "gpu" in item.path.relative_to(Path(__file__).parent).parts:
            item.add_marker("gpu")


@pytest.fixture
def fake() -> Iterator[ModuleType]:
    """Give the fake driver, as after start-up; what ctm_rt remembers of devices is forgotten."""
    from ctm_rt import driver

    for remembered in (driver.compute_capability, driver.num_sms):
        remembered.cache_clear()
    fake_cuda.reset()
    yield fake_cuda
    fake_cuda.reset()
    for remembered in (driver.compute_capability, driver.num_sms):
        remembered.cache_clear()


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Export a few of the decode modules for sm_90a; give the root of their store."""
    root = tmp_path_factory.mktemp("store")
    run_export(root, "sm_90a", *MODULES)
    return root


def run_export(root: Path, arch: str, *names: str) -> None:
    """Export modules as a user does."""
    command = [sys.executable, "-m", "kernels.export", "--arch", arch, "--out", str(root)]
    command += ["--only", *names]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=Path(__file__).parents[1])


@pytest.fixture
def decode_store(exported: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let names be looked up among the exported modules alone."""
    from ctm_rt.modules import store

    monkeypatch.setattr(store, "PREBUILT", exported)
    monkeypatch.setattr(store, "USER", exported / "none")
    return exported


@pytest.fixture(scope="session")
def exported_trees(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Export two modules of tree decode for sm_90a; give the root of their store."""
    root = tmp_path_factory.mktemp("trees")
    run_export(root, "sm_90a", *TREE_MODULES)
    return root


@pytest.fixture
def tree_store(
    exported_trees: Path, decode_store: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Path, Path]:
    """Let names be looked up among the trees too."""
    from ctm_rt.modules import store

    monkeypatch.setattr(store, "USER", exported_trees)
    return decode_store, exported_trees


@pytest.fixture
def computing(fake: ModuleType, decode_store: Path) -> Iterator[ModuleType]:
    """Give the fake driver on which decode launches compute, by the definition."""
    from ctm_rt.decode import binding, scratch
    from ctm_rt.memory import release_done
    from tests import decode_launch, tree_launch

    def compute(launch: Any) -> None:
        (tree_launch if tree_launch.is_tree(launch) else decode_launch).compute(launch)

    fake.on_launch(compute)
    binding._check.cache_clear()  # an address stands for another array in another test
    yield fake
    scratch._shared.clear()
    release_done()
