"""ctm_rt: attention-decode kernels, exported ahead of time, for hosts without a framework.

A name is imported from its module when it is first used: errors alone cost nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ctm_rt.errors import (
    ArgumentError,
    CapacityError,
    CtmError,
    DriverError,
    HeaderError,
    ModuleError,
)

if TYPE_CHECKING:
    from ctm_rt import paged_kv, reference, tree
    from ctm_rt.decode.attention import bind_decode, decode_attention
    from ctm_rt.decode.params import CtmDecodeParams
    from ctm_rt.decode.runner import CtmDecodeAttentionRunner
    from ctm_rt.decode.validate import validate
    from ctm_rt.memory import DeviceArray, Workspace, to_device, to_host
    from ctm_rt.modules.kernel import Kernel, Launch, load
    from ctm_rt.modules.staging import launch
    from ctm_rt.modules.strangers import Slots
    from ctm_rt.tensor import TensorView, view

__version__ = "0.1.0"

__all__ = [
    "ArgumentError",
    "CapacityError",
    "CtmDecodeAttentionRunner",
    "CtmDecodeParams",
    "CtmError",
    "DeviceArray",
    "DriverError",
    "HeaderError",
    "Kernel",
    "Launch",
    "ModuleError",
    "Slots",
    "TensorView",
    "Workspace",
    "bind_decode",
    "decode_attention",
    "launch",
    "load",
    "paged_kv",
    "reference",
    "to_device",
    "to_host",
    "tree",
    "validate",
    "view",
]

_PLACES = {
    "ctm_rt.decode.attention": ("bind_decode", "decode_attention"),
    "ctm_rt.decode.params": ("CtmDecodeParams",),
    "ctm_rt.decode.runner": ("CtmDecodeAttentionRunner",),
    "ctm_rt.decode.validate": ("validate",),
    "ctm_rt.memory": ("DeviceArray", "Workspace", "to_device", "to_host"),
    "ctm_rt.modules.kernel": ("Kernel", "Launch", "load"),
    "ctm_rt.modules.staging": ("launch",),
    "ctm_rt.modules.strangers": ("Slots",),
    "ctm_rt.tensor": ("TensorView", "view"),
}


def __getattr__(name: str) -> Any:
    """Import a public name, or a submodule, on first use."""
    for place, names in _PLACES.items():
        if name in names:
            value = globals()[name] = getattr(import_module(place), name)
            return value
    try:
        return import_module(f"ctm_rt.{name}")
    except ModuleNotFoundError as error:
        raise AttributeError(f"module 'ctm_rt' has no attribute {name!r}") from error


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
