"""What may import what, and what `import ctm_rt` costs."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import ctm_rt

ROOT = Path(ctm_rt.__file__).parent
MODULES = {path.name for path in ROOT.iterdir()}
FILES = sorted(path.relative_to(ROOT) for path in ROOT.rglob("*.py"))

# Each layer may import those above it, and itself.
LAYERS = (
    {"errors"},
    {"driver", "dlpack"},
    {"tensor"},
    {"memory"},
    {"descriptors"},
    {"modules"},
    {"paged_kv"},
    {"decode"},
    {"reference", "tree"},
    {"bench", "demo", "doctor"},
    {"cli"},
    {"__main__"},
)
FOREIGN = {"numpy", "cffi", "cuda", "click", "rich"}


def imports(path, *, top_level=False):
    """The absolute names that a file imports; with ``top_level`` those that its import runs."""
    tree = ast.parse((ROOT / path).read_text())
    for node in tree.body if top_level else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def layer(name):
    return next(i for i, names in enumerate(LAYERS) if name in names)


@pytest.mark.parametrize("path", FILES, ids=str)
def test_arrows_point_one_way(path):
    if path == Path("__init__.py"):
        return
    here = path.parts[0].removesuffix(".py")
    for name in imports(path):
        package, *rest = name.split(".")
        if package == "ctm_rt" and rest and {rest[0], f"{rest[0]}.py"} & MODULES:
            assert layer(rest[0]) <= layer(here), f"{path} imports {name}"


@pytest.mark.parametrize("path", FILES, ids=str)
def test_no_framework_is_imported(path):
    for name in imports(path):
        package = name.split(".")[0]
        assert package in FOREIGN | {"ctm_rt"} | sys.stdlib_module_names, f"{path} imports {name}"
        assert package not in {"click", "rich"} or path == Path("cli.py")
        assert package != "cuda" or path == Path("driver.py")


def loaded_by(statement):
    code = f"import sys; {statement}; import json; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return set(json.loads(done.stdout))


def test_import_is_light():
    """What a program pays that only wants a name: no driver, no parser of C, no command line."""
    assert not loaded_by("import ctm_rt") & {
        "click",
        "rich",
        "cuda.bindings.driver",
        "cffi",
        "numpy",
    }


def test_runtime_needs_no_command_line():
    modules = loaded_by("import ctm_rt; ctm_rt.decode_attention, ctm_rt.load, ctm_rt.reference")
    assert not modules & {"click", "rich", "cutlass", "torch", "cupy", "jax", "ml_dtypes"}
    assert "cuda.bindings.driver" in modules


PUBLIC = {
    *("load", "launch", "Kernel", "Launch", "Slots"),
    *("decode_attention", "bind_decode", "CtmDecodeParams", "CtmDecodeAttentionRunner"),
    *("Workspace", "DeviceArray", "to_device", "to_host", "view", "TensorView", "validate"),
    *("ArgumentError", "CapacityError", "CtmError", "DriverError", "HeaderError", "ModuleError"),
    *("paged_kv", "reference", "tree"),
}


def test_public_names():
    assert set(ctm_rt.__all__) == PUBLIC
    assert set(dir(ctm_rt)) >= PUBLIC
    for name in PUBLIC:
        assert getattr(ctm_rt, name).__name__.split(".")[-1] == name
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = ctm_rt.nonsense
