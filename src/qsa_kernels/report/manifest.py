"""The record that every run leaves beside its tables."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from qsa_kernels.report.parameters import explain

_Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


def _nothing_blank(value: Any) -> Any:
    if value is None or value == "":
        raise ValueError("expected a value or 'not available'; got a blank")
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ():
        _nothing_blank(part)
    return value


Facts = Annotated[dict[str, Any], AfterValidator(_nothing_blank)]


class StoredFile(BaseModel):
    """A file of the run folder, by name relative to it."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    file: Annotated[str, Field(min_length=1)]
    sha256: _Sha256


class Manifest(BaseModel):
    """What ran, on what, from which sources, and what came out.

    Args:
        run_id: name of the run folder.
        chapter: name of the template or of the measurement.
        profile: name of the profile.
        parameters: all of them, resolved.
        commit: commit of the checkout, or "not available".
        dirty: whether the checkout differed from the commit, or "not available".
        package_sha256: hash of the source files of `qsa_kernels`.
        inputs: SHA-256 of each file that the run depends on, by path relative to the checkout.
        started: UTC, ISO 8601.
        wall_time_s: seconds from start to end.
        seed: of the random numbers, or "not available".
        executed_on: "interpreter" or "cuda".
        device: name, compute capability, clocks and so on.
        versions: of what decides about machine code and numbers.
        host: system, machine type, CPUs.
        glue: numbers and words that other pages quote.
        tables: stored tables by name of their schema.
        notebook: the executed notebook, None where the run is a measurement without one.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    run_id: Annotated[str, Field(min_length=1)]
    chapter: Annotated[str, Field(min_length=1)]
    profile: Annotated[str, Field(min_length=1)]
    parameters: dict[str, Any]
    commit: Annotated[str, Field(min_length=1)]
    dirty: bool | Annotated[str, Field(min_length=1)]
    package_sha256: _Sha256
    inputs: dict[str, _Sha256 | Literal["missing"]]
    started: Annotated[str, Field(pattern=r"^\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}Z$")]
    wall_time_s: Annotated[float, Field(ge=0)]
    seed: int | Annotated[str, Field(min_length=1)]
    executed_on: Annotated[str, Field(pattern="^(interpreter|cuda)$")]
    device: Facts
    versions: Facts
    host: Facts
    glue: dict[str, int | float | str]
    tables: dict[str, StoredFile]
    notebook: StoredFile | None

    def digest(self) -> str:
        """Hash of everything but the notebook, which names this digest itself."""
        text = json.dumps(self.model_dump(mode="json", exclude={"notebook"}), sort_keys=True, allow_nan=False)
        return hashlib.sha256(text.encode()).hexdigest()

    def write(self, path: Path) -> None:
        """Write as strict JSON: no NaN, sorted keys."""
        text = json.dumps(self.model_dump(mode="json"), indent=2, sort_keys=True, allow_nan=False)
        path.write_text(text + "\n", encoding="utf-8")


def make(**fields: Any) -> Manifest:
    """A manifest of these fields.

    Raises:
        ValueError: names each field that is unknown, missing, blank or of another type.
    """
    try:
        return Manifest(**fields)
    except ValidationError as error:
        raise ValueError(explain(error, Manifest, f"run {fields.get('run_id')}", "field")) from None


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def read(path: Path) -> Manifest:
    """Read and check a manifest.

    Raises:
        FileNotFoundError: no such file.
        ValueError: not strict JSON, or fields that are unknown, missing, blank or of another type.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no manifest: {path}")
    try:
        content = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse)
    except ValueError as error:
        raise ValueError(f"{path}: not strict JSON: {error}") from None
    try:
        return Manifest.model_validate(content)
    except ValidationError as error:
        raise ValueError(explain(error, Manifest, str(path), "field")) from None
