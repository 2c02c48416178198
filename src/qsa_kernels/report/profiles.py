"""Profiles: which chapters run with which parameters on what kind of device; checked before anything runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from qsa_kernels.report import repository, yamlfile
from qsa_kernels.report.parameters import Device, explain


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class Recorded(_Strict):
    """`recorded: RUN_ID`: draw the stored tables of that run."""

    recorded: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]


def _check_origin(value: Any) -> Any:
    if value == "live" or isinstance(value, Recorded) or (isinstance(value, dict) and set(value) == {"recorded"}):
        return value
    raise ValueError("expected 'live' or 'recorded: RUN_ID'")


Origin = Annotated[Literal["live"] | Recorded, BeforeValidator(_check_origin)]


class ChapterPlan(_Strict):
    """What a profile says about one chapter.

    Args:
        source: "live", or `recorded: RUN_ID`; reaches the notebook as its parameter `source`.
        sections: the same for single sections; section `x` reaches the notebook as its parameter `x_source`.
        parameters: values that differ from those in the notebook's parameters cell.
        after: chapters whose results this one reads; "*" stands for all others.
        timeout_s: limit for one cell, in seconds, where it differs from the profile's.
    """

    source: Origin = "live"
    sections: dict[str, Origin] = {}
    parameters: dict[str, Any] = {}
    after: list[str] = []
    timeout_s: Annotated[int, Field(gt=0)] | None = None

    def values(self) -> dict[str, Any]:
        """Parameters of the notebook that this plan sets."""
        origins = {f"{section}_source": origin for section, origin in self.sections.items()}
        if self.source != "live":
            origins["source"] = self.source
        return {**self.parameters, **{name: _as_parameter(origin) for name, origin in origins.items()}}

    def recorded_runs(self) -> list[str]:
        """Ids of the recorded runs that the chapter draws."""
        origins = [self.source, *self.sections.values()]
        return sorted({origin.recorded for origin in origins if isinstance(origin, Recorded)})


class Profile(_Strict):
    """A whole profile.

    Args:
        device: what kernels run on; "auto" is the GPU where there is one.
        timeout_s: limit for one cell, in seconds.
        chapters: plan of each chapter, by name of its template.
        latency: what `qsa record` measures; `recording.plan_of` checks it.
    """

    device: Device
    timeout_s: Annotated[int, Field(gt=0)] = 900
    chapters: dict[str, ChapterPlan]
    latency: dict[str, Any] = {}


def _as_parameter(origin: Origin) -> str:
    return f"recorded:{origin.recorded}" if isinstance(origin, Recorded) else origin


def path_of(profile: str) -> Path:
    """The file of a profile that is given by name or by path."""
    given = Path(profile)
    return given if given.suffix in (".yaml", ".yml") else repository.root() / "notebooks/profiles" / f"{profile}.yaml"


def load(profile: str) -> Profile:
    """Read and check a profile.

    Args:
        profile: its name ("cpu"), or the path of a YAML file.

    Raises:
        FileNotFoundError: no such profile; names those that there are.
        ValueError: names every key that is unknown, mistyped, NaN or missing.
    """
    path = path_of(profile)
    if not path.is_file():
        known = sorted(file.stem for file in (repository.root() / "notebooks/profiles").glob("*.yaml"))
        raise FileNotFoundError(f"no profile {profile!r}; known: {', '.join(known) or 'none'}")
    content = yamlfile.load(path)
    if not isinstance(content, dict):
        raise ValueError(f"profile {path.name}: expected keys and values; got {type(content).__name__}")
    try:
        return Profile.model_validate(content)
    except ValidationError as error:
        raise ValueError(explain(error, Profile, f"profile {path.name}", "key")) from None
