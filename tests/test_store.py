"""Where modules are found, which one is best, and what is refused before it is opened."""

import json
import re
import struct
from pathlib import Path

import pytest

from ctm_rt.errors import ModuleError
from ctm_rt.modules import store
from ctm_rt.modules.manifest import HOST
from ctm_rt.modules.store import find, list_modules, read_module, runnable_archs, store_roots
from tests import tiny


@pytest.mark.parametrize(
    ("capability", "archs"),
    [
        ((8, 0), ["sm_80a", "sm_80f", "sm_80"]),
        ((8, 6), ["sm_86a", "sm_86f", "sm_86", "sm_85f", "sm_85"]),
        ((9, 0), ["sm_90a", "sm_90f", "sm_90"]),
        ((10, 3), ["sm_103a", "sm_103f", "sm_103", "sm_102f", "sm_102"]),
    ],
)
def test_archs_best_first(capability, archs):
    got = runnable_archs(capability)
    assert got[: len(archs)] == archs
    assert got[-1] == f"sm_{capability[0]}0"
    assert f"sm_{capability[0]}{capability[1] + 1}" not in got
    assert not any(arch.endswith("a") for arch in got[1:])


def place(root: Path, arch: str, *suffixes: str, host: str = HOST) -> Path:
    folder = root / arch / host
    folder.mkdir(parents=True, exist_ok=True)
    for suffix in suffixes:
        (folder / f"k{suffix}").touch()
    return folder / "k.json"


def test_better_arch_wins_then_earlier_root(tmp_path):
    roots = [tmp_path / "packaged", tmp_path / "user"]
    plain = place(roots[0], "sm_90", ".json", ".so")
    place(roots[1], "sm_90", ".json", ".so")
    assert find("k", (9, 0), roots) == plain
    exact = place(roots[1], "sm_90a", ".json", ".so")
    assert find("k", (9, 0), roots) == exact


def test_lower_minor_serves_and_higher_does_not(tmp_path):
    place(tmp_path, "sm_89", ".json")
    older = place(tmp_path, "sm_80", ".json")
    assert find("k", (8, 6), [tmp_path]) == older


def test_absent_module_names_places_others_and_command(tmp_path):
    foreign = place(tmp_path, "sm_100a", ".json", ".so")
    with pytest.raises(ModuleError) as refusal:
        find("k", (9, 0), [tmp_path])
    message = str(refusal.value)
    assert f"no module k for sm_90a on {HOST} in {tmp_path}" in message
    assert str(foreign) in message
    assert f"python -m kernels.export --arch sm_90a --only k --out {tmp_path}" in message


def test_unfinished_export_is_no_module(tmp_path):
    place(tmp_path, "sm_90a", ".so", ".h")
    with pytest.raises(ModuleError, match=r"k\.json is missing.*--arch sm_90a --only k"):
        find("k", (9, 0), [tmp_path])


def test_default_roots_are_the_package_and_the_user():
    packaged, user = store_roots()
    assert packaged == store.PREBUILT
    assert user == Path.home() / ".local" / "share" / "ctm_rt" / "modules"
    assert store_roots("here") == (Path("here"),)


def halve(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def rewrite(path, **fields):
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


DAMAGE = {
    "so gone": (".so", lambda p: p.unlink(), "missing"),
    "h gone": (".h", lambda p: p.unlink(), "missing"),
    "json gone, so asked for by json": (".json", lambda p: p.unlink(), "cannot use"),
    "so cut in half": (".so", halve, "does not match"),
    "h edited": (".h", lambda p: p.write_text(p.read_text() + "\n"), "does not match"),
    "json cut in half": (".json", halve, "cannot use"),
    "foreign host": (".json", lambda p: rewrite(p, host="riscv64-linux-gnu"), "is for riscv64"),
    "older DSL": (".json", lambda p: rewrite(p, dsl_version="4.7.0"), "dsl_version"),
}


@pytest.mark.parametrize(("suffix", "damage", "reason"), DAMAGE.values(), ids=DAMAGE.keys())
def test_damage_is_refused_with_path_and_remedy(tmp_path, suffix, damage, reason):
    path = tiny.copy("tiny_a", tmp_path)
    assert read_module(path).manifest.name == "tiny_a"
    damage(path.with_suffix(suffix))
    with pytest.raises(ModuleError, match=reason) as refusal:
        read_module(path)
    assert str(path.with_suffix("")) in str(refusal.value)
    assert "--arch sm_90a --only tiny_a --out" in str(refusal.value)


@pytest.mark.parametrize("suffix", [".json", ".so", ".h"])
def test_any_file_of_a_module_stands_for_it(tmp_path, suffix):
    path = tiny.copy("tiny_a", tmp_path)
    assert read_module(path.with_suffix(suffix)) == read_module(path)


def stranger(folder: Path) -> Path:
    """Copy the stranger's kernel into ``folder``."""
    for suffix in (".so", ".h"):
        source = tiny.stranger().with_suffix(suffix)
        (folder / source.name).write_bytes(source.read_bytes())
    return folder / "scaled_add.so"


def flip_machine(path):
    image = bytearray(path.read_bytes())
    struct.pack_into("<H", image, 18, 183 if image[18] != 183 else 62)
    path.write_bytes(image)


STRANGER_DAMAGE = {
    "so gone": (".so", lambda p: p.unlink(), "missing"),
    "h gone": (".h", lambda p: p.unlink(), "missing"),
    "so cut in half": (".so", halve, "cut short"),
    "so cut in its first bytes": (".so", lambda p: p.write_bytes(b"\x7fELF"), "no shared library"),
    "so is text": (".so", lambda p: p.write_text("x" * 100), "no shared library"),
    "so of another machine": (".so", flip_machine, "for another machine"),
}


@pytest.mark.parametrize(
    ("suffix", "damage", "reason"), STRANGER_DAMAGE.values(), ids=STRANGER_DAMAGE.keys()
)
def test_a_strangers_files_are_looked_at_too(tmp_path, suffix, damage, reason):
    path = stranger(tmp_path)
    assert read_module(path) == (path, path.with_suffix(".h"), None)
    damage(path.with_suffix(suffix))
    with pytest.raises(ModuleError, match=f"{re.escape(str(tmp_path))}.*{reason}"):
        read_module(path)


def test_listing_tells_of_the_unusable_too(tmp_path):
    assert list(list_modules([tmp_path / "absent"])) == []
    good, bad = tiny.copy("tiny_a", tmp_path), tiny.copy("tiny_b", tmp_path)
    halve(bad.with_suffix(".so"))
    unfinished = place(tmp_path, "sm_80", ".so")
    entries = {entry.path: entry for entry in list_modules([tmp_path])}
    assert entries.keys() == {good, bad, unfinished}
    assert entries[good].manifest.name == "tiny_a"
    assert entries[good].error is None
    for path in (bad, unfinished):
        assert entries[path].manifest is None
        assert isinstance(entries[path].error, ModuleError)
