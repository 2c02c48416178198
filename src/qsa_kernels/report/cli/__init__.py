"""The `qsa` command: one module a command, mounted here by one line each."""

from __future__ import annotations

import os
import signal
import sys

import typer

from qsa_kernels.report.cli import (
    archive,
    batch,
    book,
    capacity,
    codegen,
    doctor,
    overlay,
    record,
    record_quality,
    report,
    run,
    verify,
)

app = typer.Typer(
    name="qsa",
    help="Measure, run and publish the report on sparse paged attention with an E4M3 K/V cache.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)


@app.callback()
def _prepare() -> None:
    """Commands may import kernels, so the interpreter is chosen before any of them does."""
    from qsa_kernels.report import device

    device.prepare("auto")


app.command("run")(run.run)
app.command("record")(record.record)
app.command("record-quality")(record_quality.record_quality)
app.command("job", hidden=True)(run.job)
app.command("report")(report.report)
app.command("book")(book.book)
app.command("archive")(archive.archive)
app.command("batch")(batch.batch)
app.command("doctor")(doctor.doctor)
app.command("verify")(verify.verify)
app.add_typer(capacity.app, name="capacity")
app.add_typer(overlay.app, name="overlay")
app.command("codegen")(codegen.codegen)


def main() -> None:
    """Entry point: bad input ends with one line on standard error and exit status 1."""
    # As an exception, so that what is half done is cleared away.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        app()
    except (ValueError, TypeError, OSError, RuntimeError) as error:
        if os.environ.get("QSA_TRACEBACK"):
            raise
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(1) from None
