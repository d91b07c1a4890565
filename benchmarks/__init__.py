"""Measurements on a GPU: scripts, not tests."""
