"""`doctor` tells the truth about the machine and names the way out of each hazard it knows."""

import json
import platform
import re
import types

import jax
import pytest

from openjet_jax import load
from openjet_jax.doctor import GIB, _hazards, examine, render
from openjet_jax.tiling import resolve_backend

CPU = [{"platform": "cpu", "kind": "cpu", "compute_capability": None, "memory": None}]
GPU = [{"platform": "gpu", "kind": "H200", "compute_capability": "9.0", "memory": 100 * GIB}]
MEMORY = {"total": 32 * GIB, "available": 16 * GIB}
CACHE = {"directory": "/cache", "bytes": 0, "free": 10 * GIB, "writable": True}


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch):
    for name in ("XLA_FLAGS", "XLA_PYTHON_CLIENT_PREALLOCATE"):
        monkeypatch.delenv(name, raising=False)


def test_the_facts_are_those_of_this_process():
    facts = examine()
    assert facts["versions"]["jax"] == jax.__version__
    assert facts["python"].startswith(platform.python_version())
    assert [device["platform"] for device in facts["devices"]] == ["cpu"] * len(jax.devices())
    assert facts["backend"]["name"] == "reference"
    assert json.loads(json.dumps(facts)) == facts


def test_every_fact_is_shown():
    text = render(examine(), width=400)
    for part in (
        jax.__version__,
        jax.devices()[0].device_kind,
        "will use",
        "reference",
        "GiB free",
    ):
        assert part in text
    assert render(examine() | {"hazards": []}).endswith("No known hazards.")


def test_a_roomy_cpu_machine_has_no_memory_or_cache_hazard():
    assert not [h for h in _hazards(CPU, MEMORY, CACHE) if "NVIDIA" not in h]


@pytest.mark.parametrize(
    ("devices", "memory", "cache", "hazard"),
    [
        (CPU, MEMORY | {"available": GIB}, CACHE, "Only 1.0 GiB of memory"),
        (CPU, MEMORY, CACHE | {"writable": False}, "set OPENJET_CACHE"),
        (CPU, MEMORY, CACHE | {"free": 1000}, "set OPENJET_CACHE"),
        (GPU, MEMORY, CACHE, "XLA_PYTHON_CLIENT_PREALLOCATE=false"),
    ],
)
def test_a_hazard_is_named_with_its_way_out(devices, memory, cache, hazard):
    assert [text for text in _hazards(devices, memory, cache) if hazard in text]


def test_disabled_command_buffers_are_a_hazard_on_a_gpu(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_command_buffer=")
    assert [text for text in _hazards(GPU, MEMORY, CACHE) if "command buffers" in text]


@pytest.mark.parametrize("capability", ["8.0", "8.6", "8.9", "12.0"])
def test_a_gpu_that_has_no_kernels_takes_the_reference_and_is_told_so(
    capability: str, monkeypatch: pytest.MonkeyPatch
):
    gpu = types.SimpleNamespace(
        platform="gpu",
        device_kind="some GPU",
        compute_capability=capability,
        memory_stats=lambda: {"bytes_limit": 20 * GIB},
    )
    monkeypatch.setattr(jax, "devices", lambda: [gpu])
    found = examine()["backend"]
    assert found["name"] == "reference" and "kernels for sm_90 GPUs only" in found["why"]
    assert resolve_backend("auto") == resolve_backend("reference") == "reference"
    text = f"needs an sm_90 GPU, not compute capability {capability}; use backend='reference'"
    with pytest.raises(ValueError, match=re.escape(text)):
        load("tiny", backend="mosaic")


def test_a_platform_that_cannot_start_is_reported_and_not_raised(monkeypatch: pytest.MonkeyPatch):
    def refuse():
        raise RuntimeError("no such platform: cuda")

    monkeypatch.setattr(jax, "devices", refuse)
    facts = examine()
    assert facts["devices"] == [] and "JAX cannot start" in facts["hazards"][0]
    assert "JAX cannot start" in render(facts, width=200)
