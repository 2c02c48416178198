"""What each chapter can be asked: one strict model a chapter, shared by the runner, the profiles and the notebooks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from qsa_kernels.arms import ARMS

if TYPE_CHECKING:  # imports torch
    from qsa_kernels.measure.quality import Plan

Device = Literal["auto", "interpreter", "cuda"]
Source = Annotated[str, Field(pattern=r"^(live|recorded:[A-Za-z0-9][A-Za-z0-9._-]*)$")]


class ChapterParameters(BaseModel):
    """Base of all parameter models: unknown names, other types, NaN and infinity are errors.

    A field has no default here: the parameters cell of the notebook holds it, so that it is written once.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class CalibrationParameters(ChapterParameters):
    """How much text is seen, and on which texts the scales are judged."""

    tokens: Annotated[int, Field(ge=64, le=8192)]
    similar_text: str
    second_text: str
    kernel_layer: Annotated[int, Field(ge=0)]
    kernel_topk: Annotated[int, Field(ge=1)]

    @model_validator(mode="after")
    def _can_be_measured(self) -> CalibrationParameters:
        from qsa_kernels.measure import smollm2

        known = list(smollm2.texts("evaluation"))
        for name in ("similar_text", "second_text"):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}: expected an evaluation text, one of {', '.join(known)}")
        if self.similar_text == self.second_text:
            raise ValueError("similar_text, second_text: expected two different texts")
        if self.kernel_layer >= smollm2.LAYERS:
            raise ValueError(f"kernel_layer: expected a layer from 0 to {smollm2.LAYERS - 1}")
        if self.kernel_topk > self.tokens:
            raise ValueError(f"kernel_topk: expected at most the {self.tokens} tokens of a text")
        return self


class CapacityParameters(ChapterParameters):
    """The deployment of the reader; what the capacity model does not cover is refused with its reason."""

    tp: int
    mtp: int
    prefix_caching: bool
    max_model_len: int
    pool_gib: float
    kv_cache_dtype: str
    share_topk_workspace: bool

    @model_validator(mode="after")
    def _inside_the_model(self) -> CapacityParameters:
        from qsa_kernels.measure import capacity

        capacity.plan(**self.model_dump())
        return self


class ClaimsParameters(ChapterParameters):
    """The ledger decides what is checked; there is nothing to choose."""


class CodegenParameters(ChapterParameters):
    """The geometry whose kernels are compiled, and the workload whose bound is computed."""

    q_heads: Annotated[int, Field(ge=1)]
    kv_heads: Annotated[int, Field(ge=1)]
    head_dim: Annotated[int, Field(ge=16)]
    topk: Annotated[int, Field(ge=1)]
    page_size: Annotated[int, Field(ge=1)]
    rows: Annotated[int, Field(ge=1)]
    source: Source


class EnvironmentParameters(ChapterParameters):
    """The page of versions, runs and checksums has nothing to choose."""


class ErrorParameters(ChapterParameters):
    """Shapes, draws and arms of the random cases, and which part of a real model's cache is added."""

    rows: Annotated[int, Field(ge=1, le=64)]
    q_heads: Annotated[int, Field(ge=1, le=16)]
    head_dim: Annotated[int, Field(ge=16, le=256)]
    topk: Annotated[int, Field(ge=1, le=8192)]
    splits: Annotated[int, Field(ge=2, le=256)]
    seed: Annotated[int, Field(ge=0)]
    seeds: Annotated[int, Field(ge=1, le=1000)]
    arms: Annotated[list[str], Field(min_length=1)]
    text: str
    tokens: Annotated[int, Field(ge=16, le=8192)]
    real_rows: Annotated[int, Field(ge=1, le=64)]
    real_topk: Annotated[int, Field(ge=1, le=4096)]
    real_layers: Annotated[list[int], Field(min_length=1)]
    real_splits: Annotated[int, Field(ge=2, le=256)]

    @field_validator("arms")
    @classmethod
    def _known_arms(cls, names: list[str]) -> list[str]:
        unknown = [name for name in names if name not in ARMS]
        missing = [name for name in ("in_loop/bitcast", "hoisted/bitcast") if name not in names]
        if unknown or missing:
            raise ValueError(
                f"expected names among {', '.join(ARMS)}, with in_loop/bitcast and hoisted/bitcast, which the headline "
                f"figures compare; unknown: {unknown}, missing: {missing}"
            )
        return names


class ExampleParameters(ChapterParameters):
    """The smallest chapter: what the tests of the runner execute."""

    rows: Annotated[int, Field(ge=1)]
    label: str


class LatencyParameters(ChapterParameters):
    """Which recorded run is drawn, or what is measured live.

    "recorded:newest" is the newest run under data/runs that holds latency tables.
    """

    source: Source
    profile: str
    cells: list[str]
    budget_s: Annotated[int, Field(ge=1)]


class QualityParameters(ChapterParameters):
    """Which texts go through the model, how long, and what is selected and asked for.

    `gpu_source` is the recorded run that stands beside the measurement: "recorded:newest", "recorded:RUN_ID", or "live"
    for none.
    """

    calibration_tokens: Annotated[int, Field(ge=64, le=8192)]
    other_text: str
    context_tokens: Annotated[list[Annotated[int, Field(ge=64, le=8192)]], Field(min_length=1)]
    documents_per_text: Annotated[int, Field(ge=1)]
    topk_blocks: Annotated[int, Field(ge=1)]
    needle_texts: Annotated[list[str], Field(min_length=1)]
    needle_tokens: Annotated[list[Annotated[int, Field(ge=64, le=7680)]], Field(min_length=1)]
    depth_percent: Annotated[list[Annotated[int, Field(ge=0, le=100)]], Field(min_length=1)]
    resamples: Annotated[int, Field(ge=100)]
    seed: Annotated[int, Field(ge=0)]
    kernel_layers: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
    kernel_tokens: Annotated[int, Field(ge=16)]
    gpu_source: Source

    def plan(self) -> Plan:
        """The same as the measurement takes it.

        Raises:
            ValueError: a text, layer, depth or number of blocks that cannot be.
        """
        from qsa_kernels.measure.quality import Plan

        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in self.model_dump(exclude={"gpu_source"}).items()
        }
        return Plan(**values)

    @model_validator(mode="after")
    def _can_be_measured(self) -> QualityParameters:
        self.plan()
        return self


PARAMETERS: dict[str, type[ChapterParameters]] = {
    "calibration": CalibrationParameters,
    "capacity": CapacityParameters,
    "claims": ClaimsParameters,
    "codegen": CodegenParameters,
    "environment": EnvironmentParameters,
    "error": ErrorParameters,
    "example": ExampleParameters,
    "latency": LatencyParameters,
    "quality": QualityParameters,
}


def validated(model: type[ChapterParameters], values: Mapping[str, Any], where: str) -> ChapterParameters:
    """`values` as `model`, with one readable error for all that is wrong."""
    try:
        return model.model_validate(dict(values))
    except ValidationError as error:
        raise ValueError(explain(error, model, where)) from None


def explain(error: ValidationError, model: type[BaseModel], where: str, word: str = "parameter") -> str:
    """A validation error as one line that names each key, what was expected and what came."""
    lines = []
    for problem in error.errors(include_url=False):
        key = ".".join(str(part) for part in problem["loc"]) or "(whole)"
        if problem["type"] == "extra_forbidden":
            lines.append(f"unknown {word} {key!r}; allowed: {_allowed(model, problem['loc'][:-1])}")
        elif problem["type"] == "missing":
            lines.append(f"{word} {key!r} is missing")
        else:
            lines.append(f"{word} {key!r}: {problem['msg']}; got {problem['input']!r}")
    return f"{where}: " + "; ".join(lines)


def _allowed(model: type[BaseModel], location: tuple[str | int, ...]) -> str:
    """Names and types of the fields at a place inside a model of models."""
    annotation: Any = model
    for part in location:
        fields = getattr(annotation, "model_fields", None)
        annotation = fields[part].annotation if fields else next(iter(get_args(annotation)[-1:]), None)
    fields = getattr(annotation, "model_fields", None) or {}
    return ", ".join(f"{name}: {type_name(info.annotation)}" for name, info in fields.items()) or "nothing"


def type_name(annotation: Any) -> str:
    """A type as people write it: `int`, `list[int]`, `Literal['a', 'b']`."""
    if isinstance(annotation, type) and not get_args(annotation):
        return annotation.__name__
    return str(annotation).replace("typing.", "")
