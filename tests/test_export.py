"""The exporter: what it writes, what it says, and what it leaves when it fails."""

import hashlib
import re
import shutil
import struct
import subprocess
from pathlib import Path

import pytest

from ctm_rt.descriptors import read_header
from ctm_rt.modules.link import compiler
from ctm_rt.modules.manifest import HOST, read_manifest
from ctm_rt.modules.store import read_module
from kernels.cubin import kernel_usage
from kernels.export import export, main, source_sha256
from tests import tiny
from tests.tiny import ARCH, VARIANTS, Broken, Ready, Tiny

SUFFIXES = (".h", ".json", ".o", ".so")


def run(out: Path, *options: str, variants=VARIANTS) -> int:
    return main(["--arch", ARCH, "--out", str(out), *options], variants)


def ready(name: str = "tiny_a", **changed: bytes) -> Ready:
    """Return a variant that is compiled already: by ``tiny.store``."""
    return Ready(name, str(tiny.store() / ARCH / HOST))


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_a_module_says_what_it_is(variant):
    folder = tiny.store() / ARCH / HOST
    assert {p.suffix for p in folder.glob(f"{variant.name}.*")} == set(SUFFIXES)
    path = folder / f"{variant.name}.json"
    manifest = read_module(path).manifest
    assert (manifest.name, manifest.family, manifest.key) == (variant.name, "tiny", variant.key)
    assert (manifest.gpu_arch, manifest.host) == (ARCH, HOST)
    assert manifest.source_sha256 == source_sha256()
    for suffix in ("so", "h"):
        digest = hashlib.sha256(path.with_suffix(f".{suffix}").read_bytes()).hexdigest()
        assert manifest.sha256[suffix] == digest
    wrapper = read_header(path.with_suffix(".h"))
    assert wrapper.prefix == variant.name
    assert list(wrapper.names) == [parameter.name for parameter in manifest.parameters]


def test_the_manifest_tells_what_the_device_code_uses():
    manifest = read_manifest(tiny.store() / ARCH / HOST / "tiny_a.json")
    (kernel,) = manifest.config["kernels"]
    assert kernel["name"].startswith("kernel_")
    assert 8 <= kernel["registers"] <= 255
    assert (kernel["spill_bytes"], kernel["static_smem_nbytes"]) == (0, 0)
    assert kernel["block"] == [64, 1, 1]
    assert kernel["smem_nbytes"] == tiny.SMEM_NBYTES


def test_usage_agrees_with_the_assembler(tmp_path):
    """Two kernels, one with static shared memory and an array in local memory, by ptxas."""
    if shutil.which("ptxas") is None:
        pytest.skip("no ptxas")
    head = ".version 8.0\n.target sm_90\n.address_size 64\n"
    big = """.visible .entry big_1(.param .u64 p, .param .u64 q) .reqntid 96, 2 {
        .shared .align 4 .b8 s[4096]; .local .align 8 .b8 l[64];
        .reg .u64 %p, %q, %a; .reg .u32 %t;
        ld.param.u64 %p, [p]; ld.param.u64 %q, [q]; mov.u64 %a, l; add.u64 %q, %q, %a;
        mov.u32 %t, %tid.x; st.local.u32 [%q], %t; st.local.u32 [%a], %t; st.shared.u32 [s], %t;
        ld.local.u32 %t, [%q+4]; st.global.u32 [%p], %t; ld.shared.u32 %t, [s+4];
        st.global.u32 [%p+4], %t; ret; }\n"""
    small = ".visible .entry small_0() { ret; }\n"
    (tmp_path / "k.ptx").write_text(head + big + small)
    command = ["ptxas", "-arch=sm_90", "-v", "-o", tmp_path / "k.cubin", tmp_path / "k.ptx"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    used = re.findall(r"function '(\w+)'.*?Used (\d+) registers", said, re.DOTALL)
    frames = dict(re.findall(r"properties for (\w+)\s+(\d+) bytes stack frame", said))
    got = kernel_usage(b"front" + (tmp_path / "k.cubin").read_bytes(), "sm_90")
    assert [kernel.name for kernel in got] == ["small_0", "big_1"]  # in order of their numbers
    assert {k.name: (k.registers, k.spill_bytes) for k in got} == {
        name: (int(registers), int(frames[name])) for name, registers in used
    }
    assert got[1].spill_bytes == 64
    assert [kernel.static_smem_nbytes for kernel in got] == [0, 4096]
    assert (got[0].block, got[1].block) == (None, (96, 2, 1))


def test_an_object_without_one_cubin_is_refused():
    with pytest.raises(ValueError, match="one uncompressed cubin in the object, got 0"):
        kernel_usage(b"\x7fELF" + bytes(60), ARCH)


COUNTED = """.version 8.7
.target {arch}
.address_size 64
.visible .entry counted_0(.param .u64 p, .param .u32 n) {{
    .shared .align 128 .b8 s[4096]; .local .align 16 .b8 l[256];
    .reg .u64 %p, %l, %q; .reg .u32 %s, %n; .reg .b32 %r<6>; .reg .f32 %f<4>;
    ld.param.u64 %p, [p]; ld.param.u32 %n, [n]; mov.u32 %s, s;
    cp.async.ca.shared.global [%s], [%p], 4; cp.async.ca.shared.global [%s], [%p], 8;
    cp.async.ca.shared.global [%s], [%p], 16; cp.async.cg.shared.global [%s], [%p], 16;
    cp.async.cg.shared.global [%s], [%p], 16, %n;
    cp.async.commit_group; cp.async.wait_group 0; {bulk}
    mov.u64 %l, l; cvt.u64.u32 %q, %n; add.u64 %l, %l, %q;
    st.local.u32 [%l], %n; st.local.v4.u32 [%l+16], {{%n, %n, %n, %n}}; bar.sync 0;
    ld.local.u32 %r4, [%l+4]; mov.b32 %r5, %r4;
    ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{%r0, %r1, %r2, %r3}}, [%s];
    mov.f32 %f0, 0f00000000; mov.f32 %f1, %f0; mov.f32 %f2, %f0; mov.f32 %f3, %f0;
    mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {{%f0, %f1, %f2, %f3}},
        {{%r0, %r1, %r2, %r3}}, {{%r4, %r5}}, {{%f0, %f1, %f2, %f3}};
    st.global.f32 [%p], %f0; ret; }}
"""
BULK = """cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%s], [%p], 1024, [%s];
    cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes
        [%s], [%p, {%n, %n}], [%s];"""


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90a", "sm_100a", "sm_120a"])
def test_instructions_are_counted(tmp_path, arch):
    if shutil.which("ptxas") is None:
        pytest.skip("no ptxas")
    bulk = int(arch.endswith("a"))  # of these, the ones from sm_90 on
    text = COUNTED.format(arch=arch, bulk=BULK if bulk else "")
    (tmp_path / "k.ptx").write_text(text)
    command = ["ptxas", f"-arch={arch}", "-o", tmp_path / "k.cubin", tmp_path / "k.ptx"]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip(f"this ptxas does not know {arch}")
    (kernel,) = kernel_usage((tmp_path / "k.cubin").read_bytes(), arch)
    counts = kernel.instructions
    assert counts.pop("STL") >= 2  # one more that clears, on some
    expected = {"LDGSTS": 2, "UBLKCP": bulk, "UTMALDG": bulk, "HMMA": 1, "LDSM": 1, "LDL": 1}
    assert counts == expected | {"LDGSTS.128": 3, "HGMMA": 0, "WARPGROUP": 0}


def avx(path: Path) -> list[str]:
    """Return the instructions of an x86-64 object that a machine without AVX lacks."""
    command = ["objdump", "-d", "--no-show-raw-insn", "-M", "intel", path]
    lines = subprocess.check_output(command, text=True).splitlines()
    code = [line.split("\t", 1)[1] for line in lines if re.match(r"\s+[0-9a-f]+:\t", line)]
    assert code
    return [line for line in code if re.match(r"v(?!err|erw)", line) or re.search("[yz]mm", line)]


@pytest.mark.skipif(HOST != "x86_64-linux-gnu", reason="an x86-64 matter")
def test_no_object_holds_avx(tmp_path):
    source = tmp_path / "avx.c"
    source.write_text("void f(float *a) { for (int i = 0; i < 64; i++) a[i] *= 2; }")
    command = [*compiler(), "-O3", "-mavx2", "-c", "-o", tmp_path / "avx.o", source]
    subprocess.run(command, check=True)
    assert avx(tmp_path / "avx.o")  # the test can fail
    for path in (tiny.store() / ARCH / HOST).glob("*.*o"):
        assert avx(path) == []


def test_a_variant_of_another_arch_is_skipped_and_named(tmp_path, capsys):
    assert run(tmp_path, variants=[ready(), Tiny("other", only_arch="sm_80")]) == 0
    assert "skipped other: not for sm_90a" in capsys.readouterr().out
    assert {path.name for path in tmp_path.rglob("*.json")} == {"tiny_a.json"}


def test_nothing_to_export_is_a_failure(tmp_path, capsys):
    assert run(tmp_path, variants=[Tiny("other", only_arch="sm_80")]) == 1
    assert "skipped other" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--only", "tiny_a", "nope"], "no nope; there are tiny_a, tiny_b"),
        (["--host", "riscv64-linux-gnu"], "--host"),
        (["--arch", "90"], "expected an architecture as in sm_90a, got 90"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_done(tmp_path, capsys, options, reason):
    with pytest.raises(SystemExit) as stop:
        run(tmp_path / "out", *options)
    assert stop.value.code == 2
    assert reason in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_another_dsl_is_refused_with_the_remedy(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("kernels.export.version", lambda name: "4.7.0")
    with pytest.raises(SystemExit):
        run(tmp_path)
    assert "pip install nvidia-cutlass-dsl==4.8.1" in capsys.readouterr().err


def test_only_takes_several_names(tmp_path):
    variants = [ready(), ready("tiny_b"), Broken("broken")]
    assert run(tmp_path, "--only", "tiny_a", "tiny_b", variants=variants) == 0
    assert {path.stem for path in tmp_path.rglob("*.json")} == {"tiny_a", "tiny_b"}


def test_one_failure_does_not_stop_the_others(tmp_path, capsys):
    assert run(tmp_path, variants=[Broken("broken"), ready()]) == 1
    out = capsys.readouterr().out
    assert "FAILED broken: RuntimeError: no such instruction" in out
    assert "exported tiny_a" in out
    assert not list(tmp_path.rglob("*broken*"))


def test_no_compiler_leaves_object_and_header_and_no_stale_library(tmp_path, capsys, monkeypatch):
    path = tiny.copy("tiny_a", tmp_path)
    monkeypatch.setenv("CC", "/absent/cc")
    assert run(tmp_path, variants=[ready()]) == 0
    assert f"no C compiler for {HOST}" in capsys.readouterr().out
    assert {file.suffix for file in path.parent.iterdir()} == {".o", ".h"}


def test_a_symbol_that_the_shim_lacks_is_named(tmp_path):
    source = tmp_path / "alien.c"
    source.write_text("void _cudaMemsetAsync(void); void f(void) { _cudaMemsetAsync(); }")
    subprocess.run([*compiler(), "-c", "-fPIC", "-o", tmp_path / "alien.o", source], check=True)
    (tmp_path / "alien.h").touch()
    result = export(Ready("alien", str(tmp_path)), ARCH, HOST, tmp_path / "out")
    assert not result.ok
    assert "needs _cudaMemsetAsync" in result.report
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("stop_at", SUFFIXES)
def test_an_export_that_is_cut_off_is_no_module(tmp_path, monkeypatch, stop_at):
    replace = Path.replace

    def cut_off(self, target):
        if Path(target).suffix == stop_at and Path(target).is_relative_to(tmp_path):
            raise KeyboardInterrupt
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", cut_off)
    with pytest.raises(KeyboardInterrupt):
        export(ready(), ARCH, HOST, tmp_path)
    folder = tmp_path / ARCH / HOST
    assert not (folder / "tiny_a.json").exists()
    assert not [file.name for file in folder.iterdir() if file.name.startswith(".")]
    monkeypatch.undo()
    assert export(ready(), ARCH, HOST, tmp_path).ok
    assert read_module(folder / "tiny_a.json").manifest.name == "tiny_a"


def test_a_manifest_that_tells_of_other_kernels_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(Tiny, "config", lambda self, gpu_arch: {"kernels": [{}, {}]})
    result = export(ready(), ARCH, HOST, tmp_path)
    assert (result.ok, "tells of 2 kernels, the object holds 1" in result.report) == (False, True)


def test_the_other_host_gets_its_own_object(tmp_path, capsys):
    host, machine = {
        "x86_64-linux-gnu": ("aarch64-linux-gnu", 183),
        "aarch64-linux-gnu": ("x86_64-linux-gnu", 62),
    }[HOST]
    assert run(tmp_path, "--host", host, "--only", "tiny_a") == 0
    folder = tmp_path / ARCH / host
    linked = compiler(host) is not None
    assert (f"no C compiler for {host}" in capsys.readouterr().out) is not linked
    assert {path.suffix for path in folder.iterdir()} == set(SUFFIXES if linked else (".o", ".h"))
    for suffix in (".o", ".so") if linked else (".o",):
        image = (folder / f"tiny_a{suffix}").read_bytes()
        assert struct.unpack_from("<H", image, 18) == (machine,)
    here = tiny.store() / ARCH / HOST / "tiny_a.h"
    assert (folder / "tiny_a.h").read_text() == here.read_text()
