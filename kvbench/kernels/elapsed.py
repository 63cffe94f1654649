from __future__ import annotations

import time

import torch


class Elapsed:
    """A clock that runs from its construction to `stop`, once the work has been launched. On CUDA it
    records two events on the device's current stream, and the host waits for the second only when
    `seconds` is read."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._begun = self._ended = self._mark()

    def _mark(self) -> float | torch.cuda.Event:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def stop(self) -> Elapsed:
        self._ended = self._mark()
        return self

    @property
    def seconds(self) -> float:
        if isinstance(self._begun, float) or isinstance(self._ended, float):
            return float(self._ended) - float(self._begun)  # type: ignore[arg-type]
        if not self._ended.query():
            self._ended.synchronize()
        return self._begun.elapsed_time(self._ended) / 1e3
