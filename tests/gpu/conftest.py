"""The GPU, the modules to test on it, and one context for the session."""

from collections.abc import Iterator

import pytest

from ctm_rt import driver
from tests.gpu.device import DEVICE, decode_modules
from tests.gpu.inputs import Module


@pytest.fixture(scope="session", autouse=True)
def _context() -> Iterator[None]:
    """Keep the context current, so that a test may call the driver; no GPU is an error."""
    with driver.current(DEVICE):
        yield


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test that takes a ``module`` on each decode module that this GPU can run."""
    for name, family in (("module", "fmha_decode"), ("tree_module", "fmha_decode_tree")):
        if name in metafunc.fixturenames:
            modules = decode_modules(family) or [None]
            ids = [module.name if module else "none" for module in modules]
            metafunc.parametrize(name, modules, ids=ids, indirect=True)


@pytest.fixture
def module(request: pytest.FixtureRequest) -> Module:
    """A decode module; that there is none to test is a failure."""
    return _required(request)


@pytest.fixture
def tree_module(request: pytest.FixtureRequest) -> Module:
    """A module of tree decode; likewise."""
    return _required(request)


def _required(request: pytest.FixtureRequest) -> Module:
    if request.param is None:
        pytest.fail(
            "no decode module in the store that this GPU can run; `make kernels` exports them"
        )
    return request.param


@pytest.fixture
def any_module() -> Module:
    """A decode module, where it does not matter which."""
    return decode_modules()[-1]
