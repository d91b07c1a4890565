"""The document beside a module: what is written is read back, anything else is refused."""

import json
import re
from pathlib import Path

import pytest

from ctm_rt.errors import ModuleError
from ctm_rt.modules.manifest import (
    DSL_VERSION,
    FORMAT,
    HOST,
    Manifest,
    ParameterSpec,
    read_manifest,
)

MANIFEST = Manifest(
    format=FORMAT,
    name="tiny",
    family="tiny",
    key={"head_dim": 64},
    gpu_arch="sm_90a",
    host=HOST,
    dsl_version=DSL_VERSION,
    ctm_rt_version="0.1.0",
    sha256={"so": "0" * 64, "h": "1" * 64},
    source_sha256="2" * 64,
    config={"kernels": [{"name": "k", "registers": 32}]},
    parameters=(
        ParameterSpec("q", "tensor", "in", "f16", ("batch", "num_q_heads", 64), 16),
        ParameterSpec("sinks", "tensor", "in", "f32", ("num_q_heads",), 4, optional=True),
        ParameterSpec("out", "tensor", "out", "f16", ("batch", "num_q_heads", 64), 16),
        ParameterSpec("scale", "scalar", dtype="f32"),
        ParameterSpec("stream", "stream"),
    ),
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    folder = tmp_path / "sm_90a" / HOST
    folder.mkdir(parents=True)
    return folder / "tiny.json"


def test_reads_what_it_wrote(path):
    path.write_text(MANIFEST.as_json())
    assert read_manifest(path) == MANIFEST


def test_scalars_may_leave_out_what_tensors_need(path):
    document = json.loads(MANIFEST.as_json())
    document["parameters"] = [{"name": "scale", "kind": "scalar", "dtype": "f32"}]
    path.write_text(json.dumps(document))
    assert read_manifest(path).parameters == (ParameterSpec("scale", "scalar", dtype="f32"),)


def test_dsl_version_is_the_one_that_the_project_pins():
    project = Path(__file__).parents[1].joinpath("pyproject.toml").read_text()
    assert re.findall(r"nvidia-cutlass-dsl==([\d.]+)", project) == [DSL_VERSION]


def tensor(**fields):
    return {"parameters": [{"name": "q", "kind": "tensor", "dtype": "f16", "axes": [1]} | fields]}


DAMAGE = {
    "another format": {"format": 2},
    "another DSL": {"dsl_version": "4.7.0"},
    "no digest of the header": {"sha256": {"so": ""}},
    "a word too many": {"colour": "red"},
    "name of another type": {"name": 7},
    "key of another type": {"key": []},
    "parameters of another type": {"parameters": 1},
    "parameter of another type": {"parameters": ["q"]},
    "parameter without name": {"parameters": [{"kind": "stream"}]},
    "unknown kind": tensor(kind="matrix"),
    "unknown role": tensor(role="inout"),
    "unknown dtype": tensor(dtype="f8"),
    "alignment no power of two": tensor(alignment=3),
    "alignment of another type": tensor(alignment=True),
    "tensor without axes": tensor(axes=[]),
    "scalar with axes": tensor(kind="scalar"),
    "fractional axis": tensor(axes=[1.5]),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_refuses_what_it_does_not_know(path, damage):
    path.write_text(json.dumps(json.loads(MANIFEST.as_json()) | damage))
    with pytest.raises(ModuleError) as refusal:
        read_manifest(path)
    assert str(path) in str(refusal.value)
    command = f"python -m kernels.export --arch sm_90a --only tiny --out {path.parents[2]}"
    assert command in str(refusal.value)


@pytest.mark.parametrize("missing", [*json.loads(MANIFEST.as_json())])
def test_refuses_what_lacks_a_word(path, missing):
    document = json.loads(MANIFEST.as_json())
    del document[missing]
    path.write_text(json.dumps(document))
    with pytest.raises(ModuleError, match=f"{missing}|no manifest"):
        read_manifest(path)


@pytest.mark.parametrize("text", [None, "", "{", "[]", "3", "\0"])
def test_refuses_what_is_no_document(path, text):
    if text is not None:
        path.write_text(text)
    with pytest.raises(ModuleError, match=re.escape(str(path))):
        read_manifest(path)


def test_repair_names_the_foreign_host(tmp_path):
    path = tmp_path / "sm_80" / "riscv64-linux-gnu" / "tiny.json"
    with pytest.raises(ModuleError, match="--arch sm_80 --host riscv64-linux-gnu --only tiny"):
        read_manifest(path)


def test_repair_outside_a_store_names_the_program():
    with pytest.raises(ModuleError, match=r"export x again with `python -m kernels\.export`"):
        read_manifest(Path("/x.json"))
