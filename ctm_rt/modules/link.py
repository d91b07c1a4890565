"""Link an object exported from CuTe DSL into a module's shared library."""

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

from ctm_rt.errors import ModuleError
from ctm_rt.modules.manifest import HOST

SHIM = Path(__file__).with_name("driver_shim.c")

# Own symbols first (-Bsymbolic, hidden): a process may hold several modules, or the DSL itself.
# Initial-exec storage and no stack protector: both would need the dynamic loader's library too.
_FLAGS = (
    *("-std=c11", "-O2", "-fPIC", "-fvisibility=hidden", "-fno-stack-protector"),
    *("-ftls-model=initial-exec", "-shared", "-s", "-Wl,-z,defs", "-Wl,-z,noexecstack"),
    *("-Wl,-Bsymbolic", "-Wl,--as-needed", "-Wl,--build-id=none"),
)
_UNDEFINED = re.compile(r"undefined (?:reference to|symbol:?) [`'\"]?(\w+)")


def compiler(host: str = HOST) -> list[str] | None:
    """Return the command of a C compiler for ``host``, or None where there is none.

    On this machine's own triple that is ``$CC`` or ``cc``, else ``<host>-gcc``.
    """
    command = shlex.split(os.environ.get("CC", "cc")) if host == HOST else [f"{host}-gcc"]
    return command if command and shutil.which(command[0]) else None


def link(object_path: str | Path, out_path: str | Path, *, host: str | None = None) -> Path:
    """Link ``object_path`` with the driver shim; write ``out_path`` whole or not at all.

    Parameters
    ----------
    object_path : path
        A ``.o`` written by ``export_to_c``.
    out_path : path
        The ``.so`` to write; it needs libc, and the CUDA driver when it is used.
    host : str, optional
        Triple that the object is for, as in ``aarch64-linux-gnu``; default this machine's.

    Returns
    -------
    Path
        ``out_path``.

    Raises
    ------
    ModuleError
        There is no compiler for ``host``, or the object needs a symbol that the shim lacks.
    """
    command, out = compiler(host or HOST), Path(out_path)
    if command is None:
        raise ModuleError(f"no C compiler for {host or HOST}; install one, or name it in $CC")
    aside = out.with_name(f".{out.name}.{os.getpid()}")
    done = subprocess.run(
        [*command, *_FLAGS, "-o", str(aside), str(SHIM), str(object_path), "-ldl"],
        env={**os.environ, "LC_ALL": "C"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        aside.unlink(missing_ok=True)
        missing = ", ".join(sorted(set(_UNDEFINED.findall(done.stderr))))
        reason = f"it needs {missing}, which {SHIM.name} lacks" if missing else done.stderr
        raise ModuleError(f"cannot link {object_path}: {reason}")
    aside.replace(out)
    return out
