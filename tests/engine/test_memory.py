"""What a model needs is known beforehand; what does not fit is refused with what would."""

import ctypes
import dataclasses
import pathlib
import sys

import jax
import pytest

import openjet_jax as oj
from openjet_jax import device_memory, engine, startup
from openjet_jax.checkpoint import read_config
from openjet_jax.compiled import Programs
from openjet_jax.config import DecodeConfig
from openjet_jax.described import CARDS, can_compile, card_of
from openjet_jax.device_memory import Room, device_room, host_memory
from openjet_jax.inspection import inspect, render
from openjet_jax.loading import checkpoint_of, contents, load
from openjet_jax.memory import check_room, largest_context, loaded_specs, memory_plan, size_text
from openjet_jax.program_store import ProgramStore

DATA = pathlib.Path(__file__).parents[1] / "data" / "golden"
GIB = 2**30


@pytest.fixture(scope="module")
def tiny():
    return contents("tiny")


def room(free: int, host: bool = False) -> Room:
    return Room(device="a card", host=host, total=2 * free, free=free)


def test_what_does_not_fit_is_refused_with_the_largest_context_that_does(tiny):
    def plan_of(context: int):
        shapes = DecodeConfig(context=context)
        return memory_plan(tiny.model, tiny.tensors, shapes, host=False)

    free = plan_of(1000).total
    asked = DecodeConfig(context=4000)
    with pytest.raises(ValueError, match=r"context=4000 does not fit.*a card has") as refused:
        check_room(tiny.model, tiny.tensors, asked, room(free))
    largest = int(str(refused.value).rsplit(" ", 1)[1].replace(",", ""))
    assert 1000 <= largest < 4000
    fitting = DecodeConfig(context=largest)
    assert check_room(tiny.model, tiny.tensors, fitting, room(free)).total <= free
    assert plan_of(largest + 1).total > free
    assert largest_context(plan_of, room(free), 4000) == largest
    with pytest.raises(ValueError, match="no context fits"):
        check_room(tiny.model, tiny.tensors, asked, room(1000))


def test_loaded_weights_need_no_room(tiny):
    decode = DecodeConfig(context=1000)
    plan = memory_plan(tiny.model, tiny.tensors, decode, host=False)
    free = plan.state + plan.workspace
    assert check_room(tiny.model, tiny.tensors, decode, room(free), loaded=True) == plan
    with pytest.raises(ValueError, match=f"has {size_text(free - 1)} free; the largest") as refused:
        check_room(tiny.model, tiny.tensors, decode, room(free - 1), loaded=True)
    assert "no context" not in str(refused.value)


def test_a_table_that_is_mapped_needs_no_memory_of_the_host():
    found = contents(DATA.parent / "golden_qwen4exp" / "f32_mtp.gguf")
    plans = [
        memory_plan(found.model, found.tensors, DecodeConfig(), host=host) for host in (True, False)
    ]
    table = plans[0].weights["n-gram table"]
    assert (plans[0].mapped, plans[1].mapped) == (table, 0)
    assert plans[1].held - plans[0].held == table > 0


def test_the_engine_refuses_before_it_allocates(monkeypatch):
    model = load("tiny")
    monkeypatch.setattr(engine, "device_room", lambda: room(1000))
    with pytest.raises(ValueError, match="does not fit"):
        oj.generate(model, "x", context=777, max_new_tokens=1)
    assert DecodeConfig(context=777) not in model.programs


def test_the_plans_workspace_covers_what_the_compiler_asks_for(tiny):
    decode = DecodeConfig(context=256, chunks=(64,))
    weights = loaded_specs(tiny.model, tiny.tensors, "reference")
    programs = Programs(tiny.model, decode, weights, ProgramStore(None))
    programs.prefill(64)
    (found,) = programs.temporary_bytes().values()
    planned = memory_plan(tiny.model, tiny.tensors, decode).workspace
    assert 0 < found <= planned


def test_kernels_keep_rows_that_are_looked_up_beside_their_own_order(tiny):
    config = dataclasses.replace(tiny.model, vocab_used=tiny.model.vocab)
    specs = loaded_specs(config, tiny.tensors, "mosaic")
    plain = memory_plan(config, tiny.tensors, DecodeConfig())
    plan = memory_plan(config, tiny.tensors, DecodeConfig(), backend="mosaic")
    nbytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(specs))
    assert sum(plan.weights.values()) == max(nbytes, sum(plain.weights.values()))


@pytest.mark.parametrize("device", CARDS)
def test_a_card_that_is_not_here_is_planned_for(device):
    facts = inspect("tiny", context=1024, device=device)
    found = facts["memory"]["device"]
    assert found["fits"] and found["largest_context"] == facts["model"]["context"]
    backend = "mosaic" if device == "h200" else "reference"
    assert facts["memory"]["backend"] == backend
    assert CARDS[device].name in render(facts) and f"KV, {backend} backend" in render(facts)
    with pytest.raises(ValueError, match="'abacus' is not described; there are rtx3090"):
        card_of("abacus")


def test_inspecting_can_ask_the_compiler(monkeypatch):
    facts = inspect(DATA / "q8_0.gguf", context=256, compiling=True)
    assert facts["memory"]["compiled"] and "workspace, compiled" in render(facts)


def test_a_program_for_an_absent_card_is_compiled_without_it():
    if not can_compile():
        with pytest.raises(ValueError, match="needs JAX's CUDA plugin"):
            inspect(DATA / "q8_0.gguf", context=256, device="rtx3090", compiling=True)
        return
    found = inspect(DATA / "q8_0.gguf", context=256, device="rtx3090", compiling=True)["memory"]
    assert found["compiled"] and 0 < found["workspace"] < 2**26


@pytest.mark.gpu
def test_the_driver_of_a_gpu_says_what_is_free():
    found, room = device_memory._driver_memory(0), device_room()
    assert found is not None and room is not None and not room.host
    assert 0 < found[0] <= found[1] == room.total and 0 < room.free <= room.total


class Device:
    platform, device_kind, local_hardware_id = "gpu", "a card", 0

    def __init__(self, **stats: int):
        self.memory_stats = lambda: stats


@pytest.mark.parametrize(
    ("driver", "stats", "free"),
    [
        (None, {}, 90),
        ((200, 300), {}, 90),
        ((50, 300), {}, 50),  # others hold most of it
        ((20, 300), {"pool_bytes": 70}, 80),  # JAX holds 60 that it has not given out
        ((0, 300), {}, 0),
    ],
)
def test_what_is_free_on_a_gpu_is_what_jax_may_take_and_the_driver_has(
    monkeypatch, driver, stats, free
):
    device = Device(bytes_limit=100, bytes_in_use=10, **stats)
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    monkeypatch.setattr(device_memory, "_driver_memory", lambda ordinal: driver)
    found = device_room()
    assert found is not None and not found.host
    assert (found.free, found.total) == (free, 300 if driver else 100)


def test_a_gpu_that_tells_nothing_is_not_asked(monkeypatch):
    monkeypatch.setattr(jax, "local_devices", lambda: [Device()])
    assert device_room() is None


class Cuda:
    """A driver that counts what it is asked, and fails where it is told to."""

    def __init__(self, failing: str = ""):
        self.failing, self.contexts, self.pushed = failing, 0, 0

    def __getattr__(self, name: str):
        def call(*args) -> int:
            if name == self.failing:
                return 1
            self.contexts += {"Retain": 1, "Release_v2": -1}.get(name[18:], 0)
            self.pushed += {"cuCtxPushCurrent_v2": 1, "cuCtxPopCurrent_v2": -1}.get(name, 0)
            if name == "cuMemGetInfo_v2":
                for pointer, value in zip(args, (7, 9), strict=True):
                    pointer._obj.value = value
            return 0

        return call


def test_the_driver_is_asked_in_its_own_context_which_is_given_back(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: cuda)
    cuda = Cuda()
    assert device_memory._driver_memory(0) == (7, 9)
    assert (cuda.contexts, cuda.pushed) == (0, 0)
    for failing in ("cuInit", "cuDevicePrimaryCtxRetain", "cuCtxPushCurrent_v2", "cuMemGetInfo_v2"):
        cuda = Cuda(failing)
        assert device_memory._driver_memory(0) is None
        assert (cuda.contexts, cuda.pushed) == (0, 0)


def test_a_containers_limit_counts(tmp_path: pathlib.Path, monkeypatch):
    real = host_memory()
    assert 0 < real["available"] <= real["total"]
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:   1000 kB\nMemAvailable:  600 kB\nSwapTotal: 0 kB\n")
    monkeypatch.setattr(device_memory, "_MEMINFO", meminfo)
    monkeypatch.setattr(device_memory, "_CGROUP", tmp_path)
    assert host_memory() == {"total": 1024000, "available": 614400}
    for name, text in {"max": "500", "current": "300", "stat": "anon 1\ninactive_file 50"}.items():
        (tmp_path / f"memory.{name}").write_text(f"{text}\n")
    assert host_memory() == {"total": 500, "available": 250}
    (tmp_path / "memory.max").write_text("max\n")
    assert host_memory()["available"] == 614400


def test_memory_is_shared_unless_the_user_or_jax_has_decided(monkeypatch):
    names = ("XLA_PYTHON_CLIENT_PREALLOCATE", *startup._FRACTIONS)
    for name in names:
        monkeypatch.delenv(name, raising=False)

    def environment(fraction=None):
        startup.share_memory(fraction)
        return [startup.os.environ.get(name) for name in names]

    assert environment(0.5) == [None] * 3  # JAX is imported here
    monkeypatch.delitem(sys.modules, "jax")
    assert environment() == ["false", "0.92", None]
    assert environment(0.5) == ["false", "0.5", None]
    monkeypatch.setenv(names[0], "true")
    monkeypatch.delenv(names[1])
    monkeypatch.setenv(names[2], "0.3")
    assert environment() == ["true", None, "0.3"]
    assert environment(0.6) == ["true", "0.6", None]
    for fraction in (0.0, -1.0, 1.5, float("nan")):
        with pytest.raises(ValueError, match="must be above 0"):
            startup.share_memory(fraction)


def test_the_plan_is_of_the_weights_that_are_loaded():
    tensors = read_config(checkpoint_of("tiny")).tensors
    model = load("tiny")
    plan = memory_plan(model.config, tensors, DecodeConfig())
    assert sum(plan.weights.values()) == sum(x.nbytes for x in jax.tree.leaves(model.weights))
