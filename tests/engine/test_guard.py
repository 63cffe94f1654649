"""A method that writes to its layer, changes the process or asks it to end fails alone."""

from __future__ import annotations

import gc
import io
import multiprocessing
import os
import random
import re
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.jobs import Echo, make_job, records_of
from support.method_layers import make_layer
from support.tiny import prompt_ids, tiny_model
from torch.overrides import BaseTorchFunctionMode
from torch.utils._python_dispatch import BaseTorchDispatchMode

from kvbench import compress
from kvbench.engine.guard import LayerDamaged, SharedStateChanged, settings_unchanged
from kvbench.engine.guard import compress as guarded
from kvbench.engine.process import interrupts_noted
from kvbench.kv import NORMALISERS, Budget, CompressedKV, KVError, LayerKV, gather_entries
from kvbench.methods import build_method
from kvbench.methods.base import SELF_DESCRIPTION, Held, Method, Repetition, Rescoring
from kvbench.methods.h2o import H2O
from kvbench.methods.kvzip import KVzip
from kvbench.methods.topk import TopK
from kvbench.probes.layer_error import LayerError
from kvbench.run.runner import run_job

BAD = "h2o_bad"
"""Methods run in the order of their names: h2o, which shares its attention mass, before it."""
OTHERS = ("snapkv", "h2o", "exact", "balancekv")


@dataclass(frozen=True, kw_only=True)
class Bad(H2O):
    """H2O, after a fault."""

    fault: Callable[[LayerKV, Budget], Any] = print

    def compress(self, layer: LayerKV, budget: Budget, generator: torch.Generator) -> CompressedKV:
        self.fault(layer, budget)
        return super().compress(layer, budget, generator)


def writes(layer: LayerKV, _: Budget) -> None:
    assert layer.queries is not None
    layer.keys.zero_()
    layer.values.data.neg_()
    layer.queries.numpy()[:] = 1.0
    layer.shared.clear()


def writes_what_is_shared(layer: LayerKV, _: Budget) -> None:
    layer.once(NORMALISERS, lambda: torch.zeros(1)).zero_()
    layer.attention_mass().numpy()[:] = 1.0


def sets_attributes(layer: LayerKV, budget: Budget) -> None:
    object.__setattr__(layer, "keys", torch.zeros_like(layer.keys))
    object.__setattr__(budget, "sink", 0)


HARMLESS = (writes, writes_what_is_shared, sets_attributes)
CHANGES: dict[str, Callable[[], Any]] = {
    "torch's default dtype at torch.float64 (it was torch.float32)": lambda: (
        torch.set_default_dtype(torch.float64)
    ),
    "torch's default device at meta (it was cpu)": lambda: torch.set_default_device("meta"),
    "torch's grad mode at True (it was False)": lambda: torch.set_grad_enabled(True),
    "torch's float32 matmul precision at medium (it was highest)": lambda: (
        torch.set_float32_matmul_precision("medium")
    ),
    "torch's deterministic algorithms at 2 (it was 0)": lambda: torch.use_deterministic_algorithms(
        True
    ),
    "torch's math attention at False (it was True)": lambda: torch.backends.cuda.enable_math_sdp(
        False
    ),
    "the working directory at /": lambda: os.chdir("/"),
    "the environment in another state": lambda: os.environ.update(KVBENCH_FAULT="1"),
    "torch's global generator in another state": lambda: torch.rand(1),
    "numpy's global generator in another state": lambda: np.random.rand(),
    "Python's global generator in another state": random.random,
    "Python's recursion limit at 900 (it was ": lambda: sys.setrecursionlimit(900),
    "Python's garbage collection at False (it was True)": gc.disable,
    "torch's default device at meta": lambda: torch.device("meta").__enter__(),
    "the number of torch's function modes at 1 (it was 0)": lambda: (
        BaseTorchFunctionMode().__enter__()
    ),
    "the number of torch's dispatch modes at 1 (it was 0)": lambda: (
        BaseTorchDispatchMode().__enter__()
    ),
    "torch's autocast at True (it was False)": lambda: torch.set_autocast_enabled("cpu", True),
    "torch's oneDNN at False (it was True)": lambda: setattr(
        torch.backends.mkldnn, "enabled", False
    ),
    "the flushing of the smallest numbers at True (it was False)": lambda: torch.set_flush_denormal(
        True
    ),
    "numpy's handling of errors at {'divide': 'raise'": lambda: np.seterr(all="raise"),
    "warnings that are errors in another state": lambda: warnings.simplefilter("error"),
    "the search path of modules in another state": lambda: setattr(sys, "path", []),
    "the handlers of signals in another state": lambda: signal.signal(
        signal.SIGTERM, signal.SIG_IGN
    ),
    "the alarm in another state": lambda: signal.alarm(60),
    "the file of the standard output in another state": lambda: open(1, "w").close(),
    "the file of the standard error in another state": lambda: os.dup2(
        os.open(os.devnull, os.O_WRONLY), 2
    ),
}


def test_a_normal_number_that_numpy_has_left_counts_as_state() -> None:
    """They are drawn two at a time; the second is taken without a draw."""
    np.random.seed(0)
    first, second = np.random.randn(), np.random.randn()
    np.random.seed(0)
    assert np.random.randn() == first
    method = build_method("snapkv")
    for _ in range(2):
        with pytest.raises(SharedStateChanged, match="numpy's global generator in another state"):  # noqa: SIM117
            with settings_unchanged("m", method):
                assert np.random.randn() == second
    with settings_unchanged("m", method):
        np.random.get_state()
    assert np.random.randn() == second


def _calls(change: Callable[[], Any]) -> Callable[..., Any]:
    return lambda *_: change()


def raises(kind: type[BaseException]) -> Callable[..., None]:
    def fault(*_: Any) -> None:
        raise kind("stop")

    return fault


def records(folder: Path, *bad: Method) -> dict[str, Any]:
    methods = {name: build_method(name) for name in OTHERS}
    methods |= {f"{BAD}_{i}": method for i, method in enumerate(bad)}
    return records_of(run_job(make_job(folder, methods, echo=Echo(count=1))))


def errors_in(found: dict[str, Any]) -> list[str]:
    """Take the records of the bad methods out, in order: their errors, "" where there is none."""
    bad = [label for label in list(found) if label.startswith(BAD)]
    return [found.pop(label)[0]["error"] or "" for label in sorted(bad, key=lambda x: int(x[8:]))]


@pytest.fixture(scope="module")
def without(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The records of the others where there is no bad method."""
    return records(tmp_path_factory.mktemp("without"))


def check_others(found: dict[str, Any], without: dict[str, Any]) -> None:
    """The records of the others are as without a bad method, but that they may have been tried again."""
    for label, (record,) in without.items():
        assert {k: v for k, v in found[label][0].items() if k != "retried"} == record


def test_what_a_foreign_method_writes_to_is_its_own(tmp_path: Path, without: Any) -> None:
    found = records(tmp_path, *(Bad(fault=fault) for fault in HARMLESS))
    assert errors_in(found) == [""] * len(HARMLESS)
    assert found == without


def replaces_what_is_shared(layer: LayerKV, _: Budget) -> None:
    layer.attention_mass()
    for name, result in layer.shared.items():
        layer.shared[name] = replace(result, tensor=torch.zeros_like(result.tensor))


def writes_later(layer: LayerKV, budget: Budget) -> None:
    """Writes at the second layer alone."""
    if layer.layer_index == 1:
        layer.values.mul_(2.0)


IN_PLACE: list[tuple[Callable[[LayerKV, Budget], Any], str]] = [
    (lambda layer, _: layer.keys.zero_(), "wrote to the keys of layer 0 in place"),
    (lambda layer, _: layer.values.data.neg_(), "wrote to the values of layer 0"),
    (lambda layer, _: layer.queries.numpy().fill(1.0), "wrote to the queries of layer 0"),
    (writes_later, "wrote to the values of layer 1 in place"),
    (lambda layer, _: layer.keys.set_(layer.keys.clone()), "wrote to the keys of layer 0"),
    (lambda layer, _: layer.once("rank", lambda: None), "Bad: rank of layer 0"),
    (replaces_what_is_shared, "wrote to the normalisers of the attention of layer 0"),
]


def test_a_method_of_kvbench_that_writes_in_place_fails_alone(
    tmp_path: Path, without: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was put into kvbench/methods, as README says, gets no copies."""
    monkeypatch.setattr(Bad, "__module__", "kvbench.methods.bad")
    found = records(tmp_path, *(Bad(fault=fault) for fault, _ in IN_PLACE))
    for error, (_, message) in zip(errors_in(found), IN_PLACE, strict=True):
        assert message in error
        assert "allowed: to write to copies" in error
    for label, (record,) in without.items():
        for name in ("status", "prediction", "score", "entries", "cache_bytes"):
            assert found[label][0][name] == record[name], (label, name)


def test_a_method_from_outside_writes_to_copies() -> None:
    layer = replace(make_layer(40, kv_heads=2), log_weights=torch.zeros(1, 2, 40))
    tensors = {name: getattr(layer, name) for name in ("keys", "values", "queries", "log_weights")}
    before = {name: tensor.clone() for name, tensor in tensors.items()}

    def writes(layer: LayerKV, _: Budget) -> None:
        for name in tensors:
            getattr(layer, name).data.fill_(7.0)

    guarded("bad", Bad(fault=writes), layer, Budget(), torch.Generator(), {})
    for name, tensor in tensors.items():
        assert torch.equal(tensor, before[name]), name


def test_a_shared_result_is_not_written_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Bad, "__module__", "kvbench.methods.bad")
    layer = make_layer(40, kv_heads=2)
    layer.attention_mass()
    bad = Bad(fault=lambda layer, _: layer.attention_mass().zero_())
    with pytest.raises(
        LayerDamaged, match="'bad' wrote to the attention mass of 40 queries of layer"
    ):
        guarded("bad", bad, layer, Budget(), torch.Generator(), {})


def random_of(seed: int) -> Method:
    """A method of a class of its own that keeps tokens at random, remembered under a plain name; in
    kvbench, where methods share what a layer remembers."""

    class Random(Method):
        def compress(self, layer: LayerKV, budget: Budget, generator: torch.Generator) -> Any:
            made = torch.Generator().manual_seed(seed)
            scores = layer.once("scores", lambda: torch.rand(1, 2, layer.n, generator=made))
            return gather_entries(layer, scores.topk(budget.capacity(layer.n)).indices)

    Random.__module__, Random.__qualname__ = "kvbench.methods.random", f"Random{seed}"
    return Random()


def test_classes_that_use_one_name_remember_for_themselves(tmp_path: Path) -> None:
    methods = {f"random{seed}": random_of(seed) for seed in (1, 2)}
    together = records_of(run_job(make_job(tmp_path / "both", methods)))
    for label, method in methods.items():
        alone = records_of(run_job(make_job(tmp_path / label, {label: method})))
        assert together[label] == alone[label]
    answers = [[record["prediction"] for record in found] for found in together.values()]
    assert answers[0] != answers[1]


@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_a_closed_stream_is_opened_again_and_fails_its_method(
    name: str, tmp_path: Path, without: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, name, io.StringIO())
    found = records(tmp_path, Bad(fault=lambda *_: getattr(sys, name).close()))
    (error,) = errors_in(found)
    what = "output" if name == "stdout" else "error"
    assert error.startswith(f"SharedStateChanged: method '{BAD}_0' left the standard {what}")
    assert found == without
    assert not getattr(sys, name).closed


def test_a_thread_takes_no_keyboard_interrupt_for_ctrl_c() -> None:
    """Signals come to the main thread: elsewhere it is the method's own error."""

    def interrupted() -> bool:
        with interrupts_noted() as ctrl_c:
            return ctrl_c()

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(interrupted).result() is False


def test_a_stream_that_was_closed_is_closed_again() -> None:
    kept = os.dup(2)
    os.close(2)
    try:
        with pytest.raises(SharedStateChanged), settings_unchanged("m", build_method("snapkv")):
            os.dup2(kept, 2)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(2)
    finally:
        os.dup2(kept, 2)
        os.close(kept)


@pytest.mark.parametrize("name", [*SELF_DESCRIPTION, "quantization"])
def test_a_property_that_raises_is_refused_before_the_job(tmp_path: Path, name: str) -> None:
    boom = property(lambda self: {}[f"no {name}"])
    method = type("Boom", (H2O,), {name: boom, "__module__": "elsewhere"})()
    with pytest.raises(KVError) as refused:
        make_job(tmp_path, {"boom": method, "exact": build_method("exact")})
    assert str(refused.value).startswith(f"method 'boom': its {name} raises KeyError")


def settings() -> dict[str, Any]:
    """What of the process a method might change."""
    return {
        "torch's draws": torch.get_rng_state().tolist(),
        "numpy's draws": np.random.get_state()[1].tolist(),
        "Python's draws": random.getstate(),
        "folder": Path.cwd(),
        "environment": dict(os.environ),
    }


def test_a_setting_that_is_left_changed_fails_its_method(tmp_path: Path, without: Any) -> None:
    before = settings()
    found = records(tmp_path, *(Bad(fault=_calls(change)) for change in CHANGES.values()))
    for i, (error, change) in enumerate(zip(errors_in(found), CHANGES, strict=True)):
        assert error.startswith(f"SharedStateChanged: method '{BAD}_{i}' left {change}")
        assert "; allowed: " in error
    assert found == without
    assert settings() == before
    assert (torch.get_default_dtype(), torch.get_default_device().type) == (torch.float32, "cpu")
    assert (torch.is_grad_enabled(), torch.backends.cuda.math_sdp_enabled()) == (True, True)


@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_a_standard_stream_goes_again_where_it_went(
    name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    number = {"stdout": 1, "stderr": 2}[name]
    closes = Bad(fault=lambda *_: open(number, "w").close())
    with pytest.raises(SharedStateChanged):
        guarded("bad", closes, make_layer(40), Budget(), torch.Generator(), {})
    os.write(number, b"still here")
    assert "still here" in "".join(capfd.readouterr())


EXITS: list[tuple[Callable[..., Any], str]] = [
    (raises(SystemExit), "raised SystemExit"),
    (raises(GeneratorExit), "raised GeneratorExit"),
    (raises(KeyboardInterrupt), "raised KeyboardInterrupt"),
    (lambda *_: os._exit(0), "called os._exit(0); allowed: to raise an exception"),
    (lambda *_: os.close(1), "called os.close(1), of a standard stream; allowed: to leave it open"),
    (lambda *_: os.close(2), "called os.close(2), of a standard stream; allowed: to leave it open"),
    (lambda *_: os.closerange(3, 64), "called os.closerange(3, 64), of files that others opened"),
]


def test_a_method_that_asks_the_program_to_end_fails_alone(tmp_path: Path, without: Any) -> None:
    found = records(tmp_path, *(Bad(fault=fault) for fault, _ in EXITS))
    for error, (_, says) in zip(errors_in(found), EXITS, strict=True):
        assert error.startswith("MethodExit: ")
        assert says in error
    assert found == without


def test_the_process_can_end_again_after_methods_ran_in_several_threads() -> None:
    """Whichever of two ends first."""
    real = os._exit, os.close, os.closerange
    begun, over = threading.Barrier(2), threading.Event()

    def first(*_: Any) -> None:
        begun.wait(20)
        over.wait(20)

    def second(*_: Any) -> None:
        begun.wait(20)

    def compress_by(fault: Callable[..., None]) -> None:
        guarded("bad", Bad(fault=fault), make_layer(40), Budget(), torch.Generator(), {})

    thread = threading.Thread(target=compress_by, args=(first,))
    thread.start()
    compress_by(second)
    over.set()
    thread.join()
    assert (os._exit, os.close, os.closerange) == real


def test_a_ctrl_c_ends_the_job(tmp_path: Path) -> None:
    """Even if the method catches it and raises one of its own."""

    def interrupted(*_: Any) -> None:
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            raise KeyboardInterrupt from None

    with pytest.raises(KeyboardInterrupt):
        records(tmp_path, Bad(fault=interrupted))
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def forks(*_: Any) -> None:
    os.fork()


def forks_a_worker(*_: Any) -> None:
    worker = multiprocessing.get_context("fork").Process(target=int)
    worker.start()
    worker.join()


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_a_process_that_a_method_forks_writes_no_records(tmp_path: Path, without: Any) -> None:
    found = records(tmp_path, Bad(fault=forks), Bad(fault=forks_a_worker))
    assert errors_in(found) == ["", ""]
    assert found == without


def odd(**answers: Any) -> Method:
    """H2O of a class from elsewhere with other answers."""
    method: Method = type("Odd", (H2O,), {**answers, "__module__": "elsewhere"})()
    return method


def raising_from(reading: int, answer: Any) -> property:
    """A property that raises from its nth reading on."""
    readings: list[int] = []

    def read(_: Method) -> Any:
        readings.append(1)
        if len(readings) >= reading:
            raise KeyError("later")
        return answer

    return property(read)


def records_without_refused(folder: Path, reading: int) -> tuple[list[str], dict[str, Any]]:
    """Run one job with a method for each attribute of `SELF_DESCRIPTION`, which raises from its nth
    reading on. A method that is refused before the job is left out, and the job begun anew.

    Returns:
        the attributes whose methods were refused, and the records.
    """
    names, refused = list(SELF_DESCRIPTION), []
    while True:
        answers = {name: getattr(build_method("h2o"), name) for name in names}
        methods = [odd(**{name: raising_from(reading, answers[name])}) for name in names]
        try:
            return refused, records(folder / f"without {len(refused)}", *methods)
        except KVError as refusal:
            says = re.match(rf"method '{BAD}_(\d+)': its .* raises KeyError: 'later'", str(refusal))
            if says is None:
                raise
            refused.append(names.pop(int(says[1])))


@pytest.mark.parametrize("reading", [2, 3, 5])
def test_a_property_that_raises_later_fails_its_method_alone(
    reading: int, tmp_path: Path, without: Any
) -> None:
    refused, found = records_without_refused(tmp_path, reading)
    errors = errors_in(found)
    assert len(errors) + len(refused) == len(SELF_DESCRIPTION)
    assert set(errors) <= {"", "KeyError: 'later'"}
    check_others(found, without)


ANSWERS: list[tuple[dict[str, Any], str]] = [
    ({"version": None}, "its version is a NoneType; allowed: int"),
    ({"saves_memory": 3.5}, "its saves_memory is a float; allowed: bool"),
    ({"recompression": "often"}, "its recompression is a str; allowed: Recompression or NoneType"),
    ({"eviction": raises(SystemExit)}, "its evicts raises SystemExit: stop"),
    ({"rescoring": Rescoring(8)}, "it has a rescoring and does not implement rescore"),
]


@pytest.mark.parametrize(("answers", "says"), ANSWERS)
def test_answers_of_another_kind_are_refused_before_the_job(
    tmp_path: Path, answers: dict[str, Any], says: str
) -> None:
    with pytest.raises(KVError) as refused:
        make_job(tmp_path, {"odd": odd(**answers)})
    assert str(refused.value).startswith(f"method 'odd': {says}")


EXTRAS: list[tuple[Callable[..., Any], str]] = [
    (lambda *_: {"pages": object()}, "have pages of a value that is no number; allowed: numbers"),
    (lambda *_: {"pages": float("nan")}, "have pages of a value that is no number"),
    (lambda *_: {"pages": 10**5000}, "have pages of a value that is no number"),
    (lambda *_: {1: 2}, "have the name 1; allowed: text"),
    (lambda *_: {"length": 9}, "have 'length'; allowed: names that the task does not use"),
    (lambda *_: {"status": 1}, "have 'status', which every record has; allowed: other names"),
    (lambda *_: os._exit(0), "a method called os._exit(0)"),
    (lambda *_: os.chdir("/") or {}, "left the working directory at /"),
    (raises(KeyboardInterrupt), "raised KeyboardInterrupt"),
]


def test_extras_are_new_numbers(tmp_path: Path, without: Any) -> None:
    found = records(tmp_path, *(odd(extras=extras) for extras, _ in EXTRAS))
    for error, (_, says) in zip(errors_in(found), EXTRAS, strict=True):
        assert says in error
    check_others(found, without)


HELD: list[tuple[Callable[[CompressedKV], Any], str]] = [
    (lambda held: None, "compress returned a NoneType; allowed: a CompressedKV"),
    (
        lambda held: type("Small", (CompressedKV,), {"nbytes": 0})(**vars(held)),
        "compress returned a Small; allowed: a CompressedKV",
    ),
    (lambda held: replace(held, keys=[1]), "keys are a list; allowed: a tensor"),
    (lambda held: replace(held, keys=held.keys.half()), "keys are .*torch.float16"),
    (lambda held: replace(held, keys=held.keys[None]), "keys are .*; allowed: "),
    (lambda held: replace(held, positions=held.positions.float()), "positions are .*float32"),
    (lambda held: replace(held, keys_only="all"), "keys_only is 'all'; allowed: 0 to "),
    (lambda held: replace(held, keys_only=-1), "keys_only is -1; allowed: 0 to "),
    (lambda held: replace(held, value_range=(1, 2)), "value_range is not of two tensors"),
    (
        lambda held: replace(held, lengths=torch.zeros(1, 2).long()),
        "lengths are 0 to 0; allowed: 1",
    ),
    (lambda held: replace(held, lengths=torch.full((1, 2), 999)), "lengths are 999 to 999; allow"),
    (lambda held: replace(held, lengths=torch.ones(1, 2)), "lengths are .*torch.float32"),
]


@pytest.mark.parametrize(("change", "says"), HELD)
def test_what_cannot_be_held_is_refused(change: Callable[[CompressedKV], Any], says: str) -> None:
    layer = make_layer(40, kv_heads=2)
    held = gather_entries(layer, torch.arange(20).expand(1, 2, 20))
    method = odd(compress=lambda *_: change(held))
    with pytest.raises((TypeError, ValueError), match=says):
        guarded("odd", method, layer, Budget(), torch.Generator(), {})


def test_positions_outside_the_prompt_and_missing_scores_are_refused(
    tmp_path: Path, without: Any
) -> None:
    def changed(**changes: Callable[[CompressedKV], Any]) -> Method:
        def compress(self: Any, layer: LayerKV, budget: Budget, generator: torch.Generator) -> Any:
            held = H2O.compress(self, layer, budget, generator)
            return replace(held, **{name: change(held) for name, change in changes.items()})

        return odd(compress=compress)

    beyond = changed(positions=lambda held: held.positions + 10**9)
    found = records(tmp_path, beyond, changed(scores=lambda held: None))
    first, second = errors_in(found)
    assert f"method '{BAD}_0' holds position 10000000" in first
    assert "lets entries go by their scores and compress gave none" in second
    check_others(found, without)


@dataclass(frozen=True, kw_only=True)
class BadEviction(H2O):
    """H2O with a fault at a decoded token."""

    fault: Callable[[], Any] = print

    def eviction(self, capacity: int, sink: int) -> None:
        return None

    def evict(self, held: Held, attention: torch.Tensor) -> Any:
        self.fault()
        return held.scores, None


@dataclass(frozen=True, kw_only=True)
class BadRestriction(TopK):
    """TopK with a fault at a decoded token."""

    fault: Callable[[], Any] = print

    def restrict(self, held: Held, logits: torch.Tensor) -> Any:
        self.fault()
        return super().restrict(held, logits)


def test_faults_while_decoding(tmp_path: Path, without: Any) -> None:
    faults = {
        "left torch's global generator": lambda: torch.rand(1),
        "raised SystemExit": raises(SystemExit),
    }
    kinds = (BadEviction, BadRestriction)
    found = records(tmp_path, *(kind(fault=fault) for fault in faults.values() for kind in kinds))
    expected = [(kind, says) for says in faults for kind in kinds]
    for error, (kind, says) in zip(errors_in(found), expected, strict=True):
        assert f"method '{kind.__name__}' {says}" in error
    assert found == without


@dataclass(frozen=True, kw_only=True)
class BadRescoring(KVzip):
    """KVzip that writes to what it is shown."""

    def rescore(self, layer: LayerKV, repeated: Repetition, budget: Budget) -> None:
        super().rescore(layer, repeated, budget)
        for part in (layer.keys, layer.values, repeated.keys, repeated.values, repeated.queries):
            part.zero_()


def test_faults_while_the_prompt_is_repeated(tmp_path: Path) -> None:
    ours = build_method("kvzip", instructed=False)
    methods = {"a": BadRescoring(instructed=False), "b": ours}
    found = records_of(run_job(make_job(tmp_path, methods, echo=Echo(count=1))))
    alone = records_of(run_job(make_job(tmp_path / "alone", {"b": ours}, echo=Echo(count=1))))
    for record in found["a"] + found["b"] + alone["b"]:
        assert record["status"] == "ok"
        record.pop("config_hash", None)
    assert found["b"] == alone["b"]
    assert found["a"][0]["prediction"] == found["b"][0]["prediction"]


def test_faults_around_generate_and_in_probes(tmp_path: Path) -> None:
    model: Any = tiny_model("llama")
    bad = Bad(fault=lambda *_: random.random())
    with pytest.raises(SharedStateChanged, match="'Bad' left Python's global generator"):  # noqa: SIM117
        with compress(model, bad, sink=4, window=4):
            model.generate(torch.tensor([prompt_ids(60)]), max_new_tokens=2, do_sample=False)
    probe = LayerError(rates=(0.5,), layers=(1, 4), seeds=1, exact=20, prompts=Echo(count=1))
    others = {"balancekv": build_method("balancekv"), "uniform": build_method("uniform")}
    methods = {"bad": bad, "bold": Bad(fault=writes), **others}
    found = records_of(run_job(make_job(tmp_path, methods, plan=probe)))
    assert all("SharedStateChanged: method 'bad'" in r["error"] for r in found.pop("bad"))
    assert all(record["status"] == "ok" for record in found.pop("bold"))
    assert found == records_of(run_job(make_job(tmp_path / "alone", others, plan=probe)))
