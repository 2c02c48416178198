"""What the runner tells the kernel of a notebook."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

RUN_VARIABLE = "QSA_RUN"


class RunContext(BaseModel):
    """What the runner tells the kernel about the run, in one environment variable.

    Args:
        run_id: name of the run folder.
        notebook: name of the template, relative to the checkout.
        profile: name of the profile.
        folder: where tables and figures go.
        commit: commit of the checkout.
        dirty: whether the checkout differs from it, "not available" outside of git.
        package_sha256: hash of the package's source files.
        executable: the Python that has to run the kernel.
        version: version of the package that the runner imports.
        date: UTC start, ISO 8601.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    run_id: str
    notebook: str
    profile: str
    folder: str
    commit: str
    dirty: bool | str
    package_sha256: str
    executable: str
    version: str
    date: str
