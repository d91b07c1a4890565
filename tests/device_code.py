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
    multiplies = "HGMMA" if kernel.get("warpgroup") else "HMMA"
    if not counts[multiplies]:
        yield "no tensor-core instructions"
    # A warpgroup takes K and V, and q of more than 128 dimensions, from shared memory as they are.
    if not counts["LDSM"] and not (kernel.get("warpgroup") and manifest.key["head_dim"] > 128):
        yield "operands not loaded as matrices"
    if counts["WARPGROUP"] > counts["HGMMA"]:
        yield "a wait for every multiply"
    if counts["LDGSTS"]:
        yield "narrow copies"
    if kernel.get("tensor_copy") or kernel.get("warpgroup"):
        if not counts["UTMALDG"]:
            yield "no tensor copies"
    elif counts["LDGSTS.128"] < 2 * _copies(kernel, **manifest.key):  # in the loop and before it
        yield "no 16-byte copies"


def _copies(kernel, kv_dtype, head_dim, tree):
    """Return the 16-byte copies per lane of one tile of K and V."""
    if tree:  # a set of warps shares its tokens and all dimensions
        tokens, threads = kernel["tokens"], kernel["block"] // kernel["token_groups"]
    else:  # a warp has at most 128 dimensions
        tokens, threads, head_dim = 16 * kernel["token_tiles"], 32, min(head_dim, 128)
    return 2 * tokens * head_dim * KV_NBYTES[kv_dtype] // (threads * 16)
