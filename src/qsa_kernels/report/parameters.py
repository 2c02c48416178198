"""What each chapter can be asked: one strict model a chapter, shared by the runner, the profiles and the notebooks."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Device = Literal["auto", "interpreter", "cuda"]
Source = Annotated[str, Field(pattern=r"^(live|recorded:[A-Za-z0-9][A-Za-z0-9._-]*)$")]


class ChapterParameters(BaseModel):
    """Base of all parameter models: unknown names, other types, NaN and infinity are errors.

    A field has no default here: the parameters cell of the notebook holds it, so that it is written once.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class ExampleParameters(ChapterParameters):
    """The smallest chapter: what the tests of the runner execute."""

    rows: Annotated[int, Field(ge=1)]
    label: str


PARAMETERS: dict[str, type[ChapterParameters]] = {
    "example": ExampleParameters,
}
