"""The exported entry and the parameters of each row of kernels/variants.py that is of the cache."""

import re

from kernels.kv_cache import append, copy_pages, gather, lengths
from kernels.kv_cache.dealing import dealing

OVERLAP_SINCE = 90  # griddepcontrol


def parameters(family: str, kv_dtype: str):
    if family == "kv_append":
        return append.parameters(kv_dtype)
    return _MODULES[family][0]()


def entry(family: str, kv_dtype: str, gpu_arch: str):
    dealt = dealing(family, kv_dtype)
    overlaps = int(re.sub(r"\D", "", gpu_arch)) >= OVERLAP_SINCE
    if family == "kv_append":
        return append.KvAppend(kv_dtype, dealt, overlaps=overlaps)
    return _MODULES[family][1](dealt, overlaps=overlaps)


_MODULES = {
    "kv_append_lengths": (lengths.parameters, lengths.KvLengths),
    "kv_copy_pages": (copy_pages.parameters, copy_pages.KvCopyPages),
    "kv_gather": (gather.parameters, gather.KvGather),
}
