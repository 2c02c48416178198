"""Every Python that finds this folder on its path records a simulated V100: no node of the test has a GPU."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any


def pretend(recorder: ModuleType) -> None:
    """Replace the machine and the sessions, and nothing else, of the module that drives a recording."""
    from simulated_run import ceiling_record, record_of, search_record

    class Session:
        def __init__(self, plan: Any, run: Path, machine: None) -> None:
            self.plan = plan

        def search(self, workload: Any, code_path: str) -> dict[str, Any]:
            return search_record(workload, code_path, self.plan)

        def measure(self, unit: Any) -> dict[str, Any]:
            time.sleep(float(os.environ["QSA_SIMULATED_UNIT_S"]))
            return record_of(unit, self.plan)

    facts = recorder.environment.describe()
    facts["device"] |= {"name": "simulated V100", "driver": "1.2"}
    recorder.environment.describe = lambda: facts
    recorder.protocol.require_measurable = lambda: None
    recorder.check_device = lambda *_: None
    recorder.torch.cuda.get_device_capability = lambda: (7, 0)
    recorder.session.Machine.present = lambda: None
    recorder.ceiling.measure = ceiling_record
    recorder.session.compile_claimed = lambda *_: 0
    recorder.session.Session = Session


class Finder(importlib.abc.MetaPathFinder):
    """Finds the recorder as usual and changes it once it is loaded."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        if name != "qsa_kernels.measure.latency.recorder":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        load = spec.loader.exec_module

        def load_and_change(module: ModuleType) -> None:
            load(module)
            pretend(module)

        spec.loader.exec_module = load_and_change
        return spec


sys.meta_path.insert(0, Finder())
