"""Kernels in CuTe DSL, and what exports them; never imported by ctm_rt."""
