"""The command line: ``demo``, ``list``, ``inspect``, ``doctor`` and ``bench``."""

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

import ctm_rt
from ctm_rt import demo as demos
from ctm_rt.bench import grid
from ctm_rt.bench import run as benchmark
from ctm_rt.descriptors.header import read_header
from ctm_rt.doctor import Gpu, findings, links, visible_gpus
from ctm_rt.errors import CtmError, ModuleError
from ctm_rt.modules.manifest import Manifest, read_manifest
from ctm_rt.modules.store import Entry, list_modules, native_arch, runnable_archs, store_roots

_YES, _PASS, _OK = (Text(word, "green") for word in ("yes", "pass", "OK"))
_FAIL, _PROBLEM = (Text(word, "bold red") for word in ("FAIL", "problem"))


class _Group(click.Group):
    """Turns an error raised on purpose into one line and exit code 1."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except CtmError as error:
            raise click.ClickException(str(error)) from error


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(ctm_rt.__version__)
def main() -> None:
    """Attention-decode kernels, exported ahead of time, for hosts without a framework."""


_json = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
_store = click.option(
    "--store",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Folder of exported modules.  [default: the packaged and the user's]",
)


@main.command()
@_json
def demo(as_json: bool) -> None:
    """Run decode attention on this machine and check it against the reference.

    On the first GPU if there is one, else on the host backend. Exit code 1 when a case fails.
    """
    gpus, why = visible_gpus()
    linked = (
        [] if gpus else [entry.path.stem for entry in list_modules(store_roots()) if links(entry)]
    )
    backend = f"GPU 0, {gpus[0].name}" if gpus else f"host backend (NumPy): {why}"
    results = [demos.run_case(case, 0 if gpus else None) for case in demos.CASES]
    if as_json:
        rows = [
            {**r.case._asdict(), "us": r.us, "passed": r.passed}
            | {"error": r.error if math.isfinite(r.error) else None}
            | {"plan": asdict(r.plan) if r.plan else None}
            for r in results
        ]
        _print_json(
            backend="gpu" if gpus else "host",
            device=gpus[0].name if gpus else None,
            linked=linked,
            tolerance=demos.TOLERANCE,
            cases=rows,
        )
    else:
        click.echo(f"Decode attention on the {backend}")
        if not gpus:
            click.echo(
                f"{len(linked)} modules found, parsed and linked, none launched: "
                f"{', '.join(linked) or 'run `python -m kernels.export`'}"
            )
        _print_results(results, "us/launch" if gpus else "us/call")
    if not all(result.passed for result in results):
        raise SystemExit(1)


def _print_results(results: list[demos.Result], unit: str) -> None:
    table = _table(
        "case", "heads", "dim", "lengths", "partials", "error", unit, "", fold=("lengths",)
    )
    for result in results:
        case = result.case
        lengths = (
            ", ".join(map(str, case.seq_lens))
            if len(set(case.seq_lens)) > 1
            else (f"{len(case.seq_lens)} x {case.seq_lens[0]}")
        )
        table.add_row(
            case.name,
            f"{case.num_q_heads}/{case.num_kv_heads}",
            str(case.head_dim),
            lengths,
            str(result.plan.max_partials) if result.plan else "",
            f"{result.error:.1e}",
            f"{result.us:,.1f}",
            _PASS if result.passed else _FAIL,
        )
    _print_table(table)
    passed = sum(result.passed for result in results)
    click.echo(f"{passed} of {len(results)} passed (relative error <= {demos.TOLERANCE:g})")


@main.command("list")
@_store
@_json
def list_(store: Path | None, as_json: bool) -> None:
    """List the modules of the store and whether they run here."""
    gpus, why = visible_gpus()
    rows = [_row(entry, gpus, why) for entry in list_modules(store_roots(store))]
    if as_json:
        _print_json(modules=rows)
        return
    table = _table(
        "module", "arch", "host", "KiB", "registers", "usable here", fold=("usable here",)
    )
    for row in rows:
        size = f"{row['size_nbytes'] / 1024:.0f}" if row["size_nbytes"] else ""
        registers = ", ".join(map(str, row["registers"]))
        usable = _YES if row["usable"] else row["reason"]
        table.add_row(row["name"], row["gpu_arch"], row["host"], size, registers, usable)
    _print_table(table)
    if not rows:
        click.echo(f"no modules in {', '.join(map(str, store_roots(store)))}")


def _row(entry: Entry, gpus: list[Gpu], why: str) -> dict[str, Any]:
    so = entry.path.with_suffix(".so")
    arch, host = entry.path.parts[-3:-1]
    manifest = entry.manifest
    if entry.error is not None:
        reason = str(entry.error)
    elif not gpus:
        reason = why
    else:
        able = any(arch in runnable_archs(gpu.capability) for gpu in gpus)
        here = ", ".join(sorted({native_arch(gpu.capability) for gpu in gpus}))
        reason = "" if able else f"the GPUs here are {here}"
    return {
        "name": entry.path.stem,
        "gpu_arch": arch,
        "host": host,
        "size_nbytes": so.stat().st_size if so.is_file() else 0,
        "registers": [kernel["registers"] for kernel in _kernels(manifest)],
        "usable": not reason,
        "reason": reason,
        "path": str(entry.path),
    }


@main.command()
@click.argument("what")
@_store
@_json
def inspect(what: str, store: Path | None, as_json: bool) -> None:
    """Show the parameters of a kernel, recovered from its header.

    WHAT is the name of a module in the store, or a path to the .h, .so or .json of any exported
    kernel.
    """
    path = _header(what, store)
    wrapper = read_header(path)
    if as_json:
        click.echo(json.dumps(wrapper.as_dict(), indent=1))
        return
    document = path.with_suffix(".json")
    manifest = read_manifest(document) if document.exists() else None
    specs = {spec.name: spec for spec in manifest.parameters} if manifest else {}
    click.echo(f"{wrapper.name}  ({path})")
    columns = "parameter", "kind", "shape", "strides", "role", "dtype and axes", "C type"
    table = _table(*columns, fold=columns[-2:])
    for parameter in wrapper.parameters:
        spec = specs.get(parameter.name)
        axes = f"{spec.dtype} ({', '.join(map(str, spec.axes))})" if spec and spec.axes else ""
        table.add_row(
            parameter.name,
            parameter.kind,
            _slots(parameter.shape_slots, parameter.shape_bits),
            _slots(parameter.stride_slots, parameter.stride_bits),
            spec.role if spec and spec.kind == "tensor" else "",
            axes or (spec.dtype if spec else ""),
            parameter.ctype,
        )
    _print_table(table)
    for kernel in _kernels(manifest):
        click.echo(", ".join(f"{key} {value}" for key, value in kernel.items() if key != "name"))


def _slots(count: int, bits: int) -> str:
    return f"{count} x int{bits}" if count else ""


def _header(what: str, store: Path | None) -> Path:
    """Return the header that ``what`` means."""
    if Path(what).suffix in (".h", ".so", ".json"):
        return Path(what).with_suffix(".h")
    found = [entry for entry in list_modules(store_roots(store)) if entry.path.stem == what]
    if not found:
        places = ", ".join(map(str, store_roots(store)))
        raise ModuleError(f"no module {what} in {places}; `ctm-rt list` shows what there is")
    return found[0].path.with_suffix(".h")


@main.command()
@_store
@_json
def doctor(store: Path | None, as_json: bool) -> None:
    """Check what running and exporting need; exit code 1 when something needed is missing."""
    found = list(findings(store))
    missing = [finding for finding in found if finding.needed and not finding.ok]
    if as_json:
        _print_json(ok=not missing, findings=[finding._asdict() for finding in found])
    else:
        table = _table("", "what", "found", "remedy", fold=("found", "remedy"))
        for f in found:
            mark = _OK if f.ok else _PROBLEM if f.needed else "absent"
            table.add_row(mark, f.what, f.detail, f.remedy)
        _print_table(table)
    if missing:
        raise SystemExit(1)


@main.command()
@click.option(
    "--only",
    multiple=True,
    metavar="WORDS",
    help="Cells whose name has these words, such as 'f16 b1'; may be repeated.  [default: all]",
)
@_json
def bench(only: tuple[str, ...], as_json: bool) -> None:
    """Time decode attention on the first GPU, beside a kernel that only loads what it reads.

    With all cells also what a call costs the host. Exit code 1 when a cell could not be measured,
    or its output is wrong.
    """
    gpus, why = visible_gpus()
    if not gpus:
        raise click.ClickException(f"a benchmark needs a GPU: {why}")
    cells = grid.select(only)
    if not cells:
        raise click.BadParameter("no such cell; names are like " + grid.CELLS[0].name)
    report = {} if only else benchmark.run_host(sorted({cell.module for cell in cells}), 0)
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=len(cells))
        report |= benchmark.run_cells(cells, 0, lambda: progress.advance(task))
    if as_json:
        _print_json(**report)
    else:
        click.echo(f"{report['device']}, {report['num_sms']} SMs")
        table = _table(*benchmark.COLUMNS, fold=benchmark.COLUMNS[-1:])
        for row in report["cells"]:
            table.add_row(*benchmark.table_row(row))
        _print_table(table)
        for figure in ("host_us", "first_result_s", "module_nbytes"):
            for name, value in report.get(figure, {}).items():
                click.echo(f"{figure} {name}: {value:,.3f}".removesuffix(".000"))
    if any(row["problem"] for row in report["cells"]):
        raise SystemExit(1)


def _kernels(manifest: Manifest | None) -> list[dict[str, Any]]:
    return manifest.config.get("kernels", []) if manifest else []


def _print_json(**document: Any) -> None:
    click.echo(json.dumps(document, indent=1, allow_nan=False))


def _table(*columns: str, fold: tuple[str, ...] = ()) -> Table:
    """Return a table whose columns keep their width, but those that may break across lines."""
    table = Table(box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, no_wrap=column not in fold, overflow="fold")
    return table


def _print_table(table: Table) -> None:
    # Markup off: brackets in a cell are brackets. Into a file or a pipe, lines may be long.
    console = Console(markup=False, highlight=False)
    if not console.is_terminal:
        console.width = 200
    console.print(table)
