"""``python -m ctm_rt``: the command line."""

from ctm_rt.cli import main

main(prog_name="ctm-rt")
