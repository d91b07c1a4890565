"""What the device code of a decode kernel must not have lost."""

KV_NBYTES = {"f16": 2, "e4m3": 1}


def faults(manifest):
    """Return what is wrong with the kernels of a decode module, by their place in it."""
    found = {i: list(_faults(manifest, row)) for i, row in enumerate(manifest.config["kernels"])}
    return {i: wrong for i, wrong in found.items() if wrong}


def _faults(manifest, kernel):
    counts = kernel["instructions"]
    if kernel["spill_bytes"] or counts["LDL"] or counts["STL"]:
        # For sm_120 ptxas clears a word of the stack beside each UTMALDG, and nothing reads it.
        cleared = counts["UTMALDG"] if manifest.gpu_arch.startswith("sm_12") else 0
        if counts["LDL"] or counts["STL"] != cleared:
            yield "spills"
    if not counts["HMMA"]:
        yield "no tensor-core instructions"
    if not counts["LDSM"]:
        yield "operands not loaded as matrices"
    if counts["LDGSTS"]:
        yield "narrow copies"
    if kernel["tensor_copy"]:
        if not counts["UTMALDG"]:
            yield "no tensor copies"
    elif counts["LDGSTS.128"] < 2 * _copies(kernel, **manifest.key):  # in the loop and before it
        yield "no 16-byte copies"


def _copies(kernel, kv_dtype, head_dim, **_):
    """Return the 16-byte copies per lane of one tile of K and V; a warp has at most 128 dims."""
    row_nbytes = min(head_dim, 128) * KV_NBYTES[kv_dtype]
    return 2 * 16 * kernel["token_tiles"] * row_nbytes // (32 * 16)
