"""Programs are compiled once, ahead of time, kept safely, and recovered when the store is not."""

import dataclasses
import gc
import stat

import jax
import numpy as np
import pytest
from golden import DECODE, case

from openjet_jax import compiled, program_store
from openjet_jax.compiled import Programs, ProgramStore
from openjet_jax.conversation import Conversation
from openjet_jax.depth import parse_depth
from openjet_jax.settings import Sampling, SamplingKind
from pallas_kernels.tile_choice import FOLDER

GREEDY = SamplingKind()


@pytest.fixture
def model():
    return case("q4_1")  # the smallest; no MTP block


@pytest.fixture
def store(tmp_path):
    return ProgramStore(tmp_path / "programs")


def test_changing_depth_sampling_and_penalties_compiles_nothing_more():
    model = case("q8_0")
    programs = Programs(model.config, DECODE, model.weights, ProgramStore(None))
    requests = [
        (Sampling(temperature=0.8, top_k=10, seed=1), "auto"),
        (Sampling(temperature=1.2, top_k=40, top_p=0.9, seed=9), 5),
        (Sampling(temperature=0.5, top_k=1, min_p=0.1), "5/2"),
    ]
    for _ in range(2):
        for sampling, depth in requests:
            conversation = Conversation(model.weights, programs)
            conversation.read(model.answers["tokens"][:20].tolist())
            for _ in conversation.run(sampling, parse_depth(depth), max_new_tokens=70):
                pass
            assert conversation.stats.new_tokens == 70
    made = [event.name for event in programs.events]
    assert made == ["start", "prefill_192", "cycles_top_k_depth5"]
    with jax.log_compiles(False), _no_compilation():
        conversation = Conversation(model.weights, programs)
        conversation.read([1, 2, 3])
        asked = Sampling(temperature=1, top_k=3)
        for _ in conversation.run(asked, parse_depth(5), max_new_tokens=9):
            pass


class _no_compilation:
    """Fails if anything at all is compiled inside, small array operations included."""

    def __enter__(self):
        self.seen = []
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        if "backend_compile" in event:
            self.seen.append(event)

    def __exit__(self, *_):
        jax.monitoring.unregister_event_duration_listener(self._listen)
        assert not self.seen


def test_a_stored_program_is_found_and_gives_the_same(model, store):
    outs = []
    for _ in range(2):
        programs = Programs(model.config, DECODE, model.weights, store)
        conversation = Conversation(model.weights, programs)
        conversation.read(model.answers["tokens"].tolist())
        bursts = list(conversation.run(Sampling(), parse_depth(0), max_new_tokens=8))
        outs.append([token for burst in bursts for token in burst.token_ids])
    assert outs[0] == outs[1]
    assert programs.num_compiled == 0 and len(programs.events) == 3


def test_the_store_is_readable_by_its_owner_alone(store):
    assert stat.S_IMODE(store.directory.stat().st_mode) == 0o700


@pytest.mark.parametrize("damage", ["flipped bit", "cut", "empty", "not a program"])
def test_a_damaged_program_is_compiled_again_and_said_so(model, store, damage, capsys):
    first = Programs(model.config, DECODE, model.weights, store)
    first.start()
    (path,) = store.directory.glob("*.program")
    content = path.read_bytes()
    if damage == "flipped bit":
        path.write_bytes(content[:-5] + bytes([content[-5] ^ 1]) + content[-4:])
    elif damage == "cut":
        path.write_bytes(content[: len(content) // 2])
    elif damage == "empty":
        path.write_bytes(b"")
    else:
        store.write(path.stem, b"sound, but no program")
    second = Programs(model.config, DECODE, model.weights, store)
    state = second.start()()
    assert int(state.length) == 0
    assert second.num_compiled == 1
    said = capsys.readouterr().err.strip().splitlines()
    assert len([line for line in said if "compiling again" in line]) == 1
    third = Programs(model.config, DECODE, model.weights, store)
    third.start()
    assert third.num_compiled == 0


@pytest.mark.parametrize("fact", ["code", "jax", "jaxlib", "device", "cpu", "flags", "precision"])
def test_a_program_of_another_environment_is_not_used(model, store, fact, monkeypatch):
    Programs(model.config, DECODE, model.weights, store).start()
    changed = compiled.environment() | {fact: "another"}
    monkeypatch.setattr(compiled, "environment", lambda: changed)
    programs = Programs(model.config, DECODE, model.weights, store)
    programs.start()
    assert programs.num_compiled == 1


def test_a_program_that_is_begun_is_made_once_and_waited_for(model, store):
    programs = Programs(model.config, DECODE, model.weights, store)
    begun = programs.begin(programs.start, programs.start)
    first, second = programs.start(), programs.start()
    assert first is second is begun[0].result() is begun[1].result()
    assert [event.name for event in programs.events] == ["start"]


def test_a_program_that_failed_is_tried_again(model, store, monkeypatch):
    programs = Programs(model.config, DECODE, model.weights, store)
    monkeypatch.setattr(store, "write", lambda *_: 1 / 0)
    (begun,) = programs.begin(programs.start)
    assert isinstance(begun.exception(), ZeroDivisionError)
    monkeypatch.undo()
    assert int(programs.start()().length) == 0


def test_programs_that_the_last_process_needed_first_are_loaded_ahead(model, tmp_path):
    def run() -> tuple[list[int], list[str], int]:
        store = ProgramStore(tmp_path, "name")
        loading = sorted(store._ahead)
        programs = Programs(model.config, DECODE, model.weights, store)
        conversation = Conversation(model.weights, programs)
        conversation.read(model.answers["tokens"].tolist())
        bursts = list(conversation.run(Sampling(), parse_depth(0), max_new_tokens=8))
        assert not store._ahead  # each was asked for
        ids = [token for burst in bursts for token in burst.token_ids]
        return ids, loading, programs.num_compiled

    ids, ahead, compiled_first = run()
    assert (ahead, compiled_first) == ([], 3)
    again, ahead, compiled_then = run()
    assert again == ids and compiled_then == 0
    assert ahead == sorted(path.stem for path in tmp_path.glob("*.program"))
    assert not ProgramStore(tmp_path, "other")._ahead


def test_a_change_of_measured_cuts_is_a_change_of_the_code(tmp_path):
    for pattern in program_store.SOURCES:
        path = tmp_path / pattern.replace("*", "one")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("1")
        before = program_store.hash_of_sources(tmp_path)
        path.write_text("2")
        assert program_store.hash_of_sources(tmp_path) != before
    root = FOLDER.parents[1]
    files = {path for pattern in program_store.SOURCES for path in root.glob(pattern)}
    assert set(FOLDER.iterdir()) <= files


def test_programs_of_another_environment_are_not_loaded_ahead(model, tmp_path, monkeypatch):
    Programs(model.config, DECODE, model.weights, ProgramStore(tmp_path, "name")).start()
    assert len(ProgramStore(tmp_path, "name")._ahead) == 1
    changed = program_store.environment() | {"jaxlib": "another"}
    monkeypatch.setattr(program_store, "environment", lambda: changed)
    assert not ProgramStore(tmp_path, "name")._ahead


@pytest.mark.parametrize("content", ["", "{", "7", "[1]", '["../../etc/passwd"]', '["0", "1"]'])
def test_a_damaged_list_of_recent_programs_does_no_harm(model, tmp_path, content, capsys):
    (tmp_path / "name.recent").write_text(content)
    store = ProgramStore(tmp_path, "name")
    programs = Programs(model.config, DECODE, model.weights, store)
    assert int(programs.start()().length) == 0
    assert programs.num_compiled == 1
    assert len(ProgramStore(tmp_path, "name")._ahead) == 1


def test_a_damaged_program_loaded_ahead_is_compiled_again(model, tmp_path, capsys):
    Programs(model.config, DECODE, model.weights, ProgramStore(tmp_path, "name")).start()
    (path,) = tmp_path.glob("*.program")
    path.write_bytes(path.read_bytes()[:-1])
    programs = Programs(model.config, DECODE, model.weights, ProgramStore(tmp_path, "name"))
    programs.start()
    assert programs.num_compiled == 1
    assert capsys.readouterr().err.count("compiling again") == 1


def test_a_program_of_other_shapes_is_not_used(model, store):
    Programs(model.config, DECODE, model.weights, store).start()
    other = dataclasses.replace(DECODE, context=600)
    programs = Programs(model.config, other, model.weights, store)
    assert programs.start()().kv.k.shape[1] == 768
    assert programs.num_compiled == 1


def test_the_state_is_donated_no_second_copy_is_alive(model):
    def live(shape: tuple[int, ...]) -> int:
        gc.collect()
        return sum(x.nbytes for x in jax.live_arrays() if x.shape == shape)

    shape = model.programs.state_specs.kv.k.shape
    before = live(shape)
    state = model.programs.start()()
    run = model.programs.prefill(192)
    after, _ = run(model.weights, state, np.zeros(193, np.int32), np.int32(5))
    leaves = jax.tree.leaves(state)
    assert all(leaf.is_deleted() for leaf in leaves if leaf.nbytes > 64)
    assert live(shape) - before == 2 * after.kv.k.nbytes  # keys and values, once


def test_programs_are_made_from_shapes_alone(model, store):
    specs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), model.weights)
    ahead = Programs(model.config, DECODE, specs, store)
    ahead.prepare(ahead.start, lambda: ahead.cycles(GREEDY, 0))
    later = Programs(model.config, DECODE, model.weights, store)
    later.cycles(GREEDY, 0)
    assert later.num_compiled == 0


def test_programs_never_come_from_a_cache_of_jax_since_those_cannot_be_stored(model, store):
    jax.jit(lambda x: x + 1)(np.float32(1))  # JAX looks at its cache's switch until first used
    seen: list[str] = []

    def listen(event: str, **_) -> None:
        seen.append(event)

    jax.monitoring.register_event_listener(listen)
    try:
        Programs(model.config, DECODE, model.weights, store).logits(192)
    finally:
        jax.monitoring.unregister_event_listener(listen)
    assert not [event for event in seen if "compile_requests_use_cache" in event]
