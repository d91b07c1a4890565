"""How kernels are launched, but for their grid, block and shared memory."""


def options(*, overlaps: bool, cluster: int = 1):
    """Return the options of a launch in clusters of ``cluster`` CTAs.

    One that ``overlaps`` begins before the kernel in front of it has ended, whose results it may
    read after ``griddepcontrol_wait``: from sm_90 on.
    """
    found = {"use_pdl": True} if overlaps else {}
    return found | ({"cluster": (cluster, 1, 1)} if cluster > 1 else {})
