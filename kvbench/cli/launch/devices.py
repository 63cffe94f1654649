"""Which GPU a worker of ``launcher=gpus`` runs on."""

from __future__ import annotations

import os

from omegaconf import DictConfig

from kvbench.errors import UserError

CPU = ""
"""The device of a worker without a GPU, as CUDA_VISIBLE_DEVICES has it."""


class DeviceError(UserError, ValueError):
    """A user-facing error: one line naming the thing, its value and what is allowed."""


def visible_gpus() -> list[str]:
    """The GPUs of this machine that CUDA_VISIBLE_DEVICES leaves, as that variable names them."""
    from torch.cuda import device_count

    count = device_count()  # asks the driver, and starts nothing on a GPU
    named = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    named = [name for name in named if name]
    if count and named[:1] and named[0].startswith("MIG-"):  # a process sees one of several
        return [name for name in named if name.startswith("MIG-")]
    return named[:count] if named else [str(index) for index in range(count)]


def worker_devices(workers: int | None, device: str, gpus_per_worker: int = 1) -> list[str]:
    """One entry per worker: its GPUs as CUDA_VISIBLE_DEVICES names them, or `CPU`.

    Args:
        workers: how many; None: as many as the visible GPUs are enough for. More share them in turn.
        device: the config's device.
        gpus_per_worker: more than one for a model that is spread over several.

    Raises:
        DeviceError: no GPU and no number of workers on the CPU; a device that names one GPU; fewer
            GPUs than one worker needs.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise DeviceError(f"device is {device!r}; allowed with launcher=gpus: auto, cuda, cpu")
    gpus = [] if device == "cpu" else visible_gpus()
    if not gpus:
        if device == "cuda" or workers is None:
            raise DeviceError(
                "launcher=gpus finds no GPU; allowed: a machine with GPUs, or device=cpu and "
                "launcher.workers=N for N workers on its CPUs"
            )
        return [CPU] * workers
    if gpus_per_worker > len(gpus):
        raise DeviceError(
            f"launcher.gpus_per_worker is {gpus_per_worker}; this machine has {len(gpus)} GPUs"
        )
    starts = range(0, len(gpus) - gpus_per_worker + 1, gpus_per_worker)
    groups = [",".join(gpus[start : start + gpus_per_worker]) for start in starts]
    return [groups[index % len(groups)] for index in range(workers or len(groups))]


def devices_of(config: DictConfig) -> list[str]:
    """`worker_devices` of a config with ``launcher=gpus``."""
    launcher = config.launcher
    return worker_devices(launcher.workers, config.device, launcher.gpus_per_worker)


def see_only(device: str, workers: int = 1) -> None:
    """Leave this process one worker's device; to be called before torch is asked for one.

    Args:
        workers: how many processes share the CPU cores.
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = device
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // workers)))
