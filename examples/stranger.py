"""Launch a kernel that ctm_rt did not write, of which it has the library and the header alone.

``python -m examples.stranger DIR/scaled_add.so``, as ``examples/stranger_kernel.py`` wrote it.
Needs a GPU, and neither the DSL nor a C compiler.
"""

import sys

import numpy as np

import ctm_rt

library = sys.argv[1]
a, b = np.random.default_rng(0).standard_normal((2, 1000, 64), np.float32)
expected = a + np.float32(0.5) * b


def rows(array: object) -> ctm_rt.Slots:
    """Fill the one slot of a tensor: that it is the number of rows only the author knows."""
    return ctm_rt.Slots(array, shape=(0,), strides=())


for parameter in ctm_rt.load(library).wrapper.parameters:
    print(f"{parameter.name}: {parameter.kind}, {parameter.ctype}")

# NumPy arrays are copied to the GPU. No manifest says what the kernel writes, so the caller does.
out = np.full_like(a, np.nan)
ctm_rt.launch(library, a=rows(a), b=rows(b), out=rows(out), scale=0.5, outputs=["out"])
print("largest error with NumPy arrays:", np.abs(out - expected).max())

# Device arrays are used where they are, and a Launch again and again.
device_a, device_b, device_out = map(ctm_rt.to_device, (a, b, np.full_like(a, np.nan)))
launch = ctm_rt.load(library).bind(
    a=rows(device_a), b=rows(device_b), out=rows(device_out), scale=0.5
)
launch()
print("largest error with device arrays:", np.abs(ctm_rt.to_host(device_out) - expected).max())
