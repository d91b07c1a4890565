"""Tests; ``tests/gpu`` needs a CUDA device."""
