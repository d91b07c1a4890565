"""Every kernel against its reference, on a CUDA device."""
