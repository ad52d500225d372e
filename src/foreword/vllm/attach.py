"""Check steps in vLLM's workers, by a patch of the class that starts them, or as a separate worker class."""

from __future__ import annotations

import dataclasses
from typing import Any

import vllm
from vllm.platforms import current_platform
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.worker_base import WorkerWrapperBase

from foreword.check_options import CheckOptions
from foreword.vllm.follower import LOGGER
from foreword.vllm.runners import FollowedRunner, checked_class
from foreword.vllm.window import check_parallel, check_version, unknown_fields

WORKERS = {"cpu": "vllm.v1.worker.cpu_worker.CPUWorker", "xpu": "vllm.v1.worker.xpu_worker.XPUWorker"}
"""Type of device → vLLM's worker class of this platform."""
GPU_WORKER = "vllm.v1.worker.gpu_worker.Worker"


def attach(worker: Any, options: CheckOptions) -> None:
    """Follow the model runner of a worker whose device is initialized. If that is impossible, log the reason once."""
    runner = worker.model_runner
    if isinstance(runner, FollowedRunner):
        return
    try:
        check_version(vllm.__version__)
        check_parallel(worker.vllm_config.parallel_config)
        if worker.rank != 0:
            return  # the others have the same inputs
        runner_class: type = type(runner)
        kind = checked_class(runner_class)
    except Exception as error:  # the engine must serve also if the check fails
        LOGGER.error("foreword: the steps are not checked: %s", error)
        return
    if unknown := unknown_fields(field.name for field in dataclasses.fields(SchedulerOutput)):
        LOGGER.warning("foreword: what these fields of a SchedulerOutput change is not checked: %s", ", ".join(unknown))
    runner.__class__ = kind
    runner.check_options = options
    worker.foreword_report = runner.foreword_report
    shutdown = worker.shutdown

    def close() -> None:  # a process that multiprocessing started does not call the functions of atexit
        if runner.follower is not None:
            runner.follower.close()
        shutdown()

    worker.shutdown = close


def watch_workers(options: CheckOptions) -> None:
    """Follow the model runner of every worker that this process starts, whatever its platform. A second call changes
    nothing.
    """
    original = WorkerWrapperBase.init_device
    if original.__module__ == __name__:
        return

    def init_device(self: Any) -> None:
        original(self)
        attach(self.worker, options)

    WorkerWrapperBase.init_device = init_device


def checked_worker() -> type:
    """Return a subclass of vLLM's worker of this platform that checks its steps, for ``--worker-cls``.

    FOREWORD_CHECK has the options; without it they are "full".
    """
    base: type = resolve_obj_by_qualname(WORKERS.get(current_platform.device_type, GPU_WORKER))

    class CheckedWorker(base):  # type: ignore[misc]
        def init_device(self) -> None:
            super().init_device()
            options = CheckOptions.of_environment("full")
            if options is not None:
                attach(self, options)

    return CheckedWorker
