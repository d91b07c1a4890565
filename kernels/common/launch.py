"""How kernels are launched, but for their grid, block and shared memory."""


def options(*, overlaps: bool, cluster: int = 1, ctas_per_sm: int = 0):
    """Return the options of a launch in clusters of ``cluster`` CTAs.

    One that ``overlaps`` begins before the kernel in front of it has ended, whose results it may
    read after ``griddepcontrol_wait``: from sm_90 on. So many registers are used that
    ``ctas_per_sm`` have room, if that is not 0; they may have all of the SM's shared memory (else
    the compiler asks a GPU how much that is).
    """
    found = {"use_pdl": True} if overlaps else {}
    if cluster > 1:
        found["cluster"] = (cluster, 1, 1)
    if ctas_per_sm:
        found |= {"min_blocks_per_mp": ctas_per_sm, "preferred_smem_carveout": 100}
    return found
