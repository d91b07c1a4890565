"""Inputs on the GPU, and what every decode launch owes: the same bits again and clean counters."""

import math
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import cuda.bindings.driver as cu
import numpy as np

import ctm_rt
from ctm_rt import driver
from ctm_rt.decode import plan
from ctm_rt.memory import DeviceArray
from ctm_rt.modules.kernel import Kernel
from ctm_rt.modules.manifest import HOST
from ctm_rt.modules.store import find, list_modules, runnable_archs, store_roots
from ctm_rt.tensor import DType, TensorView, view
from tests.gpu.inputs import Inputs, Module

DEVICE = 0
# (num_groups, spare_groups): more groups than a short sequence has tiles, more than a long one has;
# so few spare ones that each has many tiles, so many that each has one.
DEALINGS = ((1, 0), (2, 0), (3, 0), (7, 0), (plan.MAX_GROUPS, 0), (1, 1), (1, 5), (1, 40))
TOLERANCE = 6e-4  # of a sequence's norm: f16 probabilities and output, nothing else
HALF_STEP = 2.0**-25  # of f16 next to zero, where a sink leaves next to nothing for the values


def decode_modules(family: str = "fmha_decode") -> list[Module]:
    """Return the decode modules in the store that this GPU can run; all, where there is no GPU."""
    try:
        archs = runnable_archs(driver.compute_capability(DEVICE))
    except ctm_rt.DriverError:
        archs = None
    found = set()
    for path in (entry.path for entry in list_modules(store_roots())):
        parts = re.fullmatch(family + r"_(f16|e4m3)_d(\d+)", path.stem)
        arch, host = path.parts[-3:-1]
        if parts and host == HOST and (archs is None or arch in archs):
            found.add(Module(path.stem, parts[1], int(parts[2])))
    return sorted(found)


def copy_module(module: Module, root: Path) -> Path:
    """Copy a module into another store, where nobody has loaded it; return its ``.json``."""
    source = find(module.name, driver.compute_capability(DEVICE), store_roots())
    target = root.joinpath(*source.parts[-3:])
    target.parent.mkdir(parents=True)
    for suffix in (".so", ".h", ".json"):
        shutil.copy(source.with_suffix(suffix), target.with_suffix(suffix))
    return target


def place(array: np.ndarray, dtype: str | None = None) -> TensorView:
    """Upload the whole buffer that ``array`` is a view of; return the same view of the copy."""
    base = array
    while isinstance(base.base, np.ndarray):
        base = base.base
    buffer = view(ctm_rt.to_device(base, dtype=dtype))
    strides = tuple(nbytes // array.itemsize for nbytes in array.strides)
    ptr = buffer.ptr + array.ctypes.data - base.ctypes.data
    return buffer._replace(ptr=ptr, shape=array.shape, strides=strides)


def write(target: TensorView, array: np.ndarray) -> None:
    """Overwrite a packed device array."""
    array = np.ascontiguousarray(array)
    driver.copy_to_device(target.ptr, array.ctypes.data, array.nbytes, 0)
    driver.synchronize(0, DEVICE)


def fill_nan(ptr: int, nbytes: int) -> None:
    """Fill with 0x7fff, which is NaN as f16, as f32 and as a pair of e4m3."""
    driver.check("cuMemsetD16", cu.cuMemsetD16(ptr, 0x7FFF, nbytes // 2))


@contextmanager
def new_stream() -> Iterator[int]:
    """A stream that does not wait for the legacy default stream."""
    flags = cu.CUstream_flags.CU_STREAM_NON_BLOCKING.value
    stream = driver.check("cuStreamCreate", cu.cuStreamCreate(flags))
    yield int(stream)
    driver.check("cuStreamDestroy", cu.cuStreamDestroy(stream))


@contextmanager
def capturing(stream: int) -> Iterator[list[object]]:
    """Capture what the block queues; the list then holds the graph."""
    mode = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL  # refuses whatever may break one
    driver.check("cuStreamBeginCapture", cu.cuStreamBeginCapture(stream, mode))
    graphs: list[object] = []
    try:
        yield graphs
    finally:
        graphs.append(driver.check("cuStreamEndCapture", cu.cuStreamEndCapture(stream)))


def capture(stream: int, *launches: Callable[[int], object]) -> Callable[[], None]:
    """Capture the launches, in order; return what replays them on ``stream``."""
    with capturing(stream) as graphs:
        for launch in launches:
            launch(stream)
    executable = driver.check("cuGraphInstantiate", cu.cuGraphInstantiate(graphs[0], 0))
    return lambda: driver.check("cuGraphLaunch", cu.cuGraphLaunch(executable, stream))


class Call:
    """One decode call on the device, with guards around ``out``.

    Parameters
    ----------
    module : Module
    inputs : Inputs
    workspace : Workspace, optional
        By default one of its own, grown beforehand so that its buffers can be looked at.
    """

    def __init__(
        self, module: Module, inputs: Inputs, workspace: ctm_rt.Workspace | None = None
    ) -> None:
        self.module, self.inputs = module, inputs
        pool_dtype = "e4m3" if module.kv_dtype == "e4m3" else None
        self.arrays = {
            name: None if array is None else place(array, pool_dtype if name == "kv_pool" else None)
            for name, array in inputs.arrays.items()
        }
        self.guarded_out = place(np.zeros((inputs.batch + 2, *inputs.q.shape[1:]), np.float16))
        row = math.prod(inputs.q.shape[1:])
        self.out = self.guarded_out._replace(
            ptr=self.guarded_out.ptr + 2 * row, shape=inputs.q.shape
        )
        self.workspace = ctm_rt.Workspace(DEVICE) if workspace is None else workspace
        self.kernel = ctm_rt.load(module.name)
        elems, counters = self.sizes()
        self.scratch = self.workspace.scratch(elems)
        self.semaphores = self.workspace.semaphores(counters)

    def sizes(self) -> tuple[int, int]:
        """Return how much scratch and how many counters hold every plan."""
        inputs = self.inputs
        elems = plan.workspace_elems(inputs.batch, inputs.num_q_heads, self.module.head_dim)
        return elems, plan.semaphore_elems(inputs.batch, inputs.num_kv_heads)

    def bind(self, **changed: object) -> Callable[..., object]:
        """Bind through the public function, with some of its arguments changed."""
        arguments = self.arrays | self.inputs.scalars | {"out": self.out}
        return ctm_rt.bind_decode(**arguments | {"workspace": self.workspace} | changed)

    def kernels(self, *, skips: bool = False) -> dict[int, Any]:
        """Return the module's kernels that can serve the call, by their index.

        ``skips``: those for skip-softmax. Of those for fewer heads two CTAs share a KV head.
        """
        ratio = self.inputs.num_q_heads // self.inputs.num_kv_heads
        table = plan.decode_kernels(self.kernel.manifest.config)
        tiles = -(-ratio // plan.HEADS_PER_TILE)
        return {
            i: kernel
            for i, kernel in enumerate(table)
            if kernel.head_tiles <= tiles and kernel.skips == skips
        }

    def bind_kernel(
        self,
        index: int,
        num_groups: int,
        spare_groups: int,
        module: Kernel | None = None,
        **more: object,
    ) -> Callable[..., object]:
        """Bind a kernel of the module, or of a copy of it, dealt as a plan may not choose."""
        inputs = self.inputs
        rows = self.partial_rows(num_groups, spare_groups)
        partial = plan.partial_elems(
            self.module.head_dim, self.kernel.manifest.config["kernels"][index]["cluster"]
        )
        self.scratch = view(DeviceArray.empty((rows * partial,), DType("f32"), DEVICE))
        return (module or self.kernel).bind(
            **self.arrays,
            out=self.out,
            workspace=self.scratch,
            semaphores=self.semaphores,
            scale_log2=inputs.scale * inputs.k_scale * math.log2(math.e),
            v_scale=inputs.v_scale,
            sliding_window=inputs.sliding_window,
            kernel=index,
            num_groups=num_groups,
            spare_groups=spare_groups,
            **self.more_scalars,
            **more,
        )

    @property
    def more_scalars(self) -> dict[str, int]:
        """The module's own."""
        return {}

    def partial_rows(self, num_groups: int, spare_groups: int) -> int:
        """Return how many rows of partial results a launch may leave."""
        return (self.inputs.batch * num_groups + spare_groups) * self.inputs.num_q_heads

    def possible(
        self, dealings: Sequence[tuple[int, int]], cluster: int
    ) -> Sequence[tuple[int, int]]:
        """Return those that a kernel knows: clusters have no spare groups."""
        return [(groups, spare) for groups, spare in dealings if cluster == 1 or not spare]

    def run_kernels(
        self, dealings: Sequence[tuple[int, int]] = DEALINGS
    ) -> Iterator[tuple[str, np.ndarray]]:
        """Run each kernel that can serve the call, dealt in each way; yield what and ``out``."""
        for index, kernel in self.kernels().items():
            for dealing in self.possible(dealings, kernel.cluster):
                got = self.run(self.bind_kernel(index, *dealing))
                yield f"kernel {index}, (num_groups, spare_groups) {dealing}", got

    def poison(self) -> None:
        """Fill with NaN what the launch must write before it reads, or not touch."""
        for buffer in (self.guarded_out, self.scratch):
            fill_nan(buffer.ptr, math.prod(buffer.shape) * buffer.dtype.itemsize)

    def result(self) -> np.ndarray:
        """Return ``out`` of the launches so far; counters and guards must be as they were."""
        driver.check("cuCtxSynchronize", cu.cuCtxSynchronize())
        assert not ctm_rt.to_host(self.semaphores).any(), "a counter was left set"
        guarded = ctm_rt.to_host(self.guarded_out)
        assert (guarded[[0, -1]].view(np.uint16) == 0x7FFF).all(), "written outside of out"
        return guarded[1:-1]

    def run(self, launch: Callable[..., object] | None = None, stream: int = 0) -> np.ndarray:
        """Launch twice on poison; return ``out``, equal in every bit."""
        launch = launch or self.bind()
        outs = []
        for _ in range(2):
            self.poison()
            driver.check("cuCtxSynchronize", cu.cuCtxSynchronize())
            launch(stream)
            outs.append(self.result())
        assert_same(*outs)
        return outs[0]


def decode(module: Module, inputs: Inputs) -> np.ndarray:
    """Run one call with buffers of its own."""
    return Call(module, inputs).run()


def reference(inputs: Inputs) -> np.ndarray:
    """Return the float64 definition; scores and values past float16 do not warn."""
    with np.errstate(all="ignore"):
        return ctm_rt.reference.decode_attention(**inputs.arrays, **inputs.scalars)


def assert_same(got: np.ndarray, expected: np.ndarray) -> None:
    """Equal in every bit."""
    np.testing.assert_array_equal(got.view(np.uint16), expected.view(np.uint16))


def assert_matches(
    got: np.ndarray, inputs: Inputs, exact: np.ndarray | None = None, what: str = ""
) -> None:
    """Match the reference in each sequence, so that no long one hides a short one.

    ``exact`` is the reference's answer, where the caller has it already; ``what`` is shown.
    """
    exact = reference(inputs) if exact is None else exact
    axes = tuple(range(1, exact.ndim))
    wrong = (np.isnan(got) != np.isnan(exact)).any(axis=axes)
    assert not wrong.any(), f"NaN, or none, in sequences of {inputs.seq_lens[wrong]} tokens; {what}"
    error = np.sqrt(np.nansum((got - exact) ** 2, axis=axes))
    allowed = TOLERANCE * np.sqrt(np.nansum(exact**2, axis=axes))
    allowed += HALF_STEP * math.sqrt(math.prod(exact.shape[1:]))
    worst = int(np.argmax(error - allowed))
    assert (error <= allowed).all(), (
        f"sequence {worst} of {inputs.seq_lens[worst]} tokens: "
        f"error {error[worst]:.3g}, allowed {allowed[worst]:.3g}; {what}"
    )
