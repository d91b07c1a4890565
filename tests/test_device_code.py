"""The device code of the decode kernels: as meant, and how it is told from what is not."""

import subprocess
import sys
from pathlib import Path

import pytest

from ctm_rt.modules.store import list_modules, store_roots
from kernels.export import source_sha256
from tests.device_code import faults


def test_exported_modules_are_sound(exported):
    manifests = [entry.manifest for entry in list_modules([exported])]
    assert len(manifests) >= 3
    for manifest in manifests:
        assert not faults(manifest), manifest.name


def test_exported_trees_are_sound(exported_trees):
    manifests = [entry.manifest for entry in list_modules([exported_trees])]
    assert {manifest.family for manifest in manifests} == {"fmha_decode_tree"}
    for manifest in manifests:
        assert not faults(manifest), manifest.name


def test_modules_of_the_store_are_sound():
    """All that were made from these sources, of any arch."""
    manifests = [entry.manifest for entry in list_modules(store_roots()) if entry.manifest]
    current = [m for m in manifests if m.source_sha256 == source_sha256()]
    decoding = [m for m in current if m.family in ("fmha_decode", "fmha_decode_tree")]
    if not decoding:
        pytest.skip("no decode module of these sources in the store")
    for manifest in decoding:
        assert not faults(manifest), f"{manifest.name} of {manifest.gpu_arch}"


@pytest.fixture(scope="module")
def bent(tmp_path_factory):
    """The kernels of tests/bent.py."""
    out = tmp_path_factory.mktemp("bent")
    root = Path(__file__).parents[1]
    subprocess.run([sys.executable, "-m", "tests.bent", out], cwd=root, check=True)
    return out


@pytest.fixture(scope="module")
def faults_of(bent):
    """Return the faults of one of them."""
    found = {entry.manifest.family: entry.manifest for entry in list_modules([bent])}
    return lambda name: faults(found[name]).get(0, [])


def test_a_sound_kernel(faults_of):
    assert faults_of("straight") == []


def test_a_kernel_that_spills(faults_of):
    assert faults_of("crowded") == ["spills"]


def test_a_kernel_without_tensor_cores(faults_of):
    assert "no tensor-core instructions" in faults_of("no_mma")


def test_a_kernel_that_copies_8_bytes_at_a_time(faults_of):
    assert faults_of("narrow") == ["narrow copies", "no 16-byte copies"]


def test_a_kernel_whose_multiplies_ptxas_serialises(bent):
    report = (bent / "serialised.txt").read_text()
    assert "ptxas waits for every single multiply of a warpgroup in kernels [0]" in report


def test_a_kernel_of_warpgroups_that_spills(bent):
    report = (bent / "spilt.txt").read_text()
    assert "the registers of a warpgroup do not suffice for kernels [0]" in report
