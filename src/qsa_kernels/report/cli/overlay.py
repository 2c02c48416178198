"""`qsa overlay`: build, check and show the calibrated scales of a checkpoint."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from qsa_kernels.scales import Geometry, KVScales

app = typer.Typer(
    help="Calibrated K/V scales: build an overlay, check it as a loader would, show what is in it.",
    no_args_is_help=True,
)

Layers = Annotated[str, typer.Option(help="Layer ids with a quantised cache, separated by commas.")]
Prefix = Annotated[str, typer.Option(help="Name of the layers in the checkpoint, up to the layer id.")]
BaseIndex = Annotated[
    Path | None, typer.Option(help="Index of the base checkpoint, or its folder: the overlay must be bound to it.")
]
BaseDigest = Annotated[
    str | None, typer.Option("--base-index-sha256", metavar="HEX", help="The same, by the SHA-256 of the index.")
]

QWEN4_EXP_LAYERS = "3,7,11,15,19,23,27,31,35,39,43,47"
QWEN4_EXP_PREFIX = "model.language_model.layers"


def _geometry(layers: str, prefix: str) -> Geometry:
    from qsa_kernels.scales import Geometry

    try:
        ids = tuple(int(part) for part in layers.split(","))
    except ValueError:
        raise ValueError(f"--layers: expected layer ids like 3,7,11; got {layers!r}") from None
    return Geometry(ids, prefix)


def _base_digest(base_index: Path | None, digest: str | None) -> str | None:
    from qsa_kernels.weightfile import index_sha256

    if base_index is None:
        return digest
    found = index_sha256(base_index if base_index.is_dir() else base_index.parent)
    if digest not in (None, found):
        raise ValueError(f"--base-index-sha256: {digest} is not the SHA-256 {found} of {base_index}")
    return found


def _load(path: Path, geometry: Geometry, digest: str | None) -> tuple[KVScales, list[str]]:
    """The scales of an overlay file, a pack or a derived checkpoint, and the loader's notes."""
    from qsa_kernels import scales
    from qsa_kernels.weightfile import INDEX_NAME

    with warnings.catch_warnings(record=True) as notes:
        warnings.simplefilter("always", scales.UncalibratedScales)
        if not path.is_dir():
            loaded = scales.load_overlay(path, geometry, digest)
        elif (path / INDEX_NAME).exists() or not (path / scales.MANIFEST_NAME).exists():
            loaded = scales.load_checkpoint(path, geometry, digest)
        else:
            loaded = scales.load_pack(path, geometry, digest)
    return loaded, [str(note.message) for note in notes]


@app.command()
def check(
    path: Annotated[Path, typer.Argument(help="Overlay file, folder of a pack, or derived checkpoint.")],
    layers: Layers = QWEN4_EXP_LAYERS,
    prefix: Prefix = QWEN4_EXP_PREFIX,
    base_index: BaseIndex = None,
    base_index_sha256: BaseDigest = None,
) -> None:
    """Exit with 0 only if every expected scale loads; else one message lists all that is wrong."""
    loaded, notes = _load(path, _geometry(layers, prefix), _base_digest(base_index, base_index_sha256))
    count = len(loaded.geometry.names())
    binding = (
        f"bound to base index {loaded.base_index_sha256}" if loaded.base_index_sha256 else "bound to no base index"
    )
    typer.echo(f"{path}: {count}/{count} scales load, {binding}")
    for note in notes:
        typer.echo(f"warning: {note}", err=True)


@app.command()
def show(
    path: Annotated[Path, typer.Argument(help="Overlay file, folder of a pack, or derived checkpoint.")],
    layers: Layers = QWEN4_EXP_LAYERS,
    prefix: Prefix = QWEN4_EXP_PREFIX,
) -> None:
    """Print every scale with the envelope that it implies, and warn of unit scales."""
    from rich.console import Console
    from rich.table import Table

    from qsa_kernels.scales import E4M3_MAX

    loaded, notes = _load(path, _geometry(layers, prefix), None)
    table = Table()
    table.add_column("layer", justify="right")
    for kind in ("K", "V"):
        table.add_column(f"{kind} scale", justify="right")
        table.add_column(f"{kind} envelope", justify="right")
    for layer, pair in loaded.layers.items():
        cells = (f"{value:.10g}" for scale in (pair.k_scale, pair.v_scale) for value in (scale, E4M3_MAX * scale))
        table.add_row(str(layer), *cells)
    console = Console(highlight=False)
    console.print(table)
    values = [scale for _, _, scale in loaded.items()]
    typer.echo(
        f"{len(values)} scales from {min(values):.10g} to {max(values):.10g}; "
        f"the envelope {E4M3_MAX} x scale runs from {E4M3_MAX * min(values):.10g} to {E4M3_MAX * max(values):.10g}"
    )
    typer.echo(f"SHA-256 {loaded.sha256}; base index {loaded.base_index_sha256 or 'not named'}")
    units = [loaded.geometry.key(layer, kind) for layer, kind, scale in loaded.items() if scale == 1.0]
    if loaded.negative_control:
        typer.echo("warning: the file declares itself a unit-scale negative control", err=True)
    for note in notes:
        typer.echo(f"warning: {note}", err=True)
    if units and not notes:
        typer.echo(f"warning: {len(units)} scales are exactly 1.0: {', '.join(units)}", err=True)


@app.command()
def build(
    output: Annotated[Path, typer.Option(help="Folder to make; it must not exist.")],
    base: Annotated[Path | None, typer.Option(help="Base checkpoint; it is only read.")] = None,
    shard: Annotated[
        list[Path] | None, typer.Option(help="Observations of one shard or rank; repeat to merge them.")
    ] = None,
    report: Annotated[
        list[Path] | None, typer.Option(help="Calibration report of one run; repeat for the envelope of several.")
    ] = None,
    pack: Annotated[Path | None, typer.Option(help="Published pack, which must be bound to this base.")] = None,
    example: Annotated[
        bool, typer.Option("--example", help="The example pack of this repository, no checkpoint.")
    ] = False,
    unit_scale_negative_control: Annotated[
        bool, typer.Option("--unit-scale-negative-control", help="1.0 for every scale, marked as a negative control.")
    ] = False,
    layers: Layers = QWEN4_EXP_LAYERS,
    prefix: Prefix = QWEN4_EXP_PREFIX,
) -> None:
    """Make a derived checkpoint from a calibration or a published pack: links to the base, an overlay, a new index."""
    from qsa_kernels.measure import calibration
    from qsa_kernels.weightfile import INDEX_NAME

    chosen = [
        name
        for name, given in (("--shard", shard), ("--report", report), ("--pack", pack), ("--example", example))
        if given
    ]
    if len(chosen) != 1:
        raise ValueError(
            f"expected exactly one of --shard, --report, --pack and --example; got {', '.join(chosen) or 'none'}"
        )
    if unit_scale_negative_control and not shard:
        raise ValueError("--unit-scale-negative-control: only together with --shard")
    if example:
        loaded = calibration.build_example(output)
    elif base is None:
        raise ValueError(f"--base: expected the checkpoint (with its {INDEX_NAME}) that the scales are bound to")
    elif pack is not None:
        loaded = calibration.materialise_pack(base, output, pack, _geometry(layers, prefix))
    else:
        if shard:
            result = calibration.summarize(
                [calibration.Observer.read(path) for path in shard],
                source=f"{len(shard)} shards",
                unit_scale_negative_control=unit_scale_negative_control,
            )
        else:
            runs = [calibration.CalibrationReport.read(path) for path in report or []]
            result = runs[0] if len(runs) == 1 else calibration.envelope(runs)
        loaded = calibration.derive_checkpoint(base, output, result)
    count = len(loaded.geometry.names())
    typer.echo(
        f"{output}: {count} scales under {loaded.geometry.prefix}, bound to base index {loaded.base_index_sha256}"
    )
