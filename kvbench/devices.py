"""Which GPU a worker of ``launcher=gpus`` runs on."""

from __future__ import annotations

import os

CPU = ""
"""The device of a worker without a GPU, as CUDA_VISIBLE_DEVICES has it."""


class DeviceError(ValueError):
    """A user-facing error: one line naming the thing, its value and what is allowed."""


def visible_gpus() -> list[str]:
    """The GPUs of this machine that CUDA_VISIBLE_DEVICES leaves, as that variable names them."""
    from torch.cuda import device_count

    count = device_count()  # asks the driver, and starts nothing on a GPU
    named = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return named[:count] if named else [str(index) for index in range(count)]


def worker_devices(workers: int | None, device: str) -> list[str]:
    """One entry per worker: its GPU as CUDA_VISIBLE_DEVICES names it, or `CPU`.

    Args:
        workers: how many; None: one per visible GPU. More than there are GPUs share them in turn.
        device: the config's device.

    Raises:
        DeviceError: no GPU and no number of workers on the CPU; a device that names one GPU.
    """
    if workers is not None and (
        not isinstance(workers, int) or isinstance(workers, bool) or workers < 1
    ):
        raise DeviceError(f"launcher.workers is {workers!r}; allowed: a positive integer or null")
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
    return [gpus[index % len(gpus)] for index in range(workers or len(gpus))]


def see_only(device: str, workers: int = 1) -> None:
    """Leave this process one device; to be called before torch is asked for one.

    Args:
        workers: how many processes share the CPU cores.
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = device
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // workers)))
