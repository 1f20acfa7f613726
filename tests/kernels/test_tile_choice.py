"""Winners are cuts that may stand in for the default: they fit, and they keep the parts of K."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import tile_choice
from pallas_kernels.decode_blocks import BLOCKS
from pallas_kernels.decode_cuts import SHARED_LIMIT, Tiles, default_tiles
from pallas_kernels.tile_choice import FOLDER, Product, Winner, read_winners, tiles_for

GATE_UP = Product(block="q4_k", outputs=34816, k=5120, rows=8, epilogue="silu_gate")
HEAD = Product(block="q6_k", outputs=248320, k=5120, rows=8, epilogue="choice")
ENTRY = {
    **dataclasses.asdict(GATE_UP),
    "tiles": {"warpgroups": 3, "stages": 3, "parts": 1, "sharers": 1, "grid": 132},
    "us": 24.0,
    "default_us": 25.0,
    "commit": "0123abc",
    "date": "2026-12-01T12:00:00+00:00",
}


def with_tiles(entry=ENTRY, **changes):
    return entry | {"tiles": entry["tiles"] | changes}


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.json")), ids=lambda path: path.stem)
def test_every_winner_that_is_shipped_fits_and_keeps_the_parts_of_k(path):
    content = json.loads(path.read_text())
    assert path.name == tile_choice.device_file(content["device"])
    assert content["about"]
    winners = read_winners(path)
    assert len(winners) == len(content["winners"])
    for product, winner in winners.items():
        tiles, default = (
            winner.tiles,
            default_tiles(BLOCKS[product.block], product.outputs, product.k, product.rows),
        )
        assert product.cut(tiles).shared_bytes <= SHARED_LIMIT
        assert tiles.parts == default.parts and tiles != default


def test_the_h200_has_a_file():
    assert (FOLDER / "nvidia_h200.json").exists()


def test_an_entry_is_read_back_as_it_was_written():
    winner = Winner.of(ENTRY)
    assert winner.product == GATE_UP and winner.tiles == Tiles(stages=3)
    assert winner.entry() == ENTRY == json.loads(json.dumps(winner.entry()))


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        (with_tiles(parts=2), "must be the default's 1, or bits change"),
        (with_tiles(stages=6), "bytes of shared memory exceed"),
        (with_tiles(warpgroups=5), "must be 1 to 4"),
        (with_tiles(overlap=True), "tiles must name"),
        (with_tiles(ENTRY | {"k": 17408, "epilogue": "none"}), "must be the default's 2"),
        (with_tiles(stages=2), "is the default"),
        (ENTRY | {"us": 26.0}, "must be less than"),
        (ENTRY | {"block": "q9_k"}, "must be one of q4_k"),
        (ENTRY | {"rows": 4}, "must be 8 or 16"),
        (ENTRY | {"outputs": 17}, "must be a positive multiple of 16"),
        (ENTRY | {"epilogue": "gelu"}, "must be 'none'"),
        (ENTRY | {"speed": 3}, "speed"),
        ({k: v for k, v in ENTRY.items() if k != "tiles"}, "tiles"),
        ({k: v for k, v in ENTRY.items() if k != "rows"}, "rows"),
        (
            with_tiles(ENTRY | dataclasses.asdict(HEAD), warpgroups=2),
            "the log-sum-exp would change",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_entry_that_may_not_stand_in_for_the_default_is_an_error(entry, reason, tmp_path):
    path = tmp_path / "nvidia_h200.json"
    path.write_text(json.dumps({"winners": [entry]}))
    with pytest.raises(ValueError, match=f"{path.name}: .*{reason}.*run bench/tune.py again"):
        read_winners(path)


def test_a_product_has_one_winner(tmp_path):
    path = tmp_path / "nvidia_h200.json"
    path.write_text(json.dumps({"winners": [ENTRY, with_tiles(sharers=2)]}))
    with pytest.raises(ValueError, match="has two winners"):
        read_winners(path)


@pytest.fixture
def one_winner(tmp_path, monkeypatch):
    (tmp_path / "nvidia_h200.json").write_text(json.dumps({"winners": [ENTRY]}))
    monkeypatch.setattr(tile_choice, "FOLDER", tmp_path)
    tile_choice.winners_on.cache_clear()
    yield
    tile_choice.winners_on.cache_clear()


def test_the_winner_is_taken_for_its_own_product_on_its_own_device(one_winner):
    block = BLOCKS["q4_k"]
    sizes = (block, 34816, 5120, 8, "silu_gate")
    default = default_tiles(block, 34816, 5120, 8)
    assert tiles_for(*sizes, "NVIDIA H200") == Tiles(stages=3) != default
    for device in ("NVIDIA H100 80GB HBM3", "cpu", "", "../NVIDIA H200"):
        assert tiles_for(*sizes, device) == default
    assert tiles_for(block, 34816, 5120, 8, "none", "NVIDIA H200") == default
    assert tiles_for(block, 34800, 5120, 8, "silu_gate", "NVIDIA H200") == default
    sixteen = default_tiles(block, 34816, 5120, 16)
    assert tiles_for(block, 34816, 5120, 16, "silu_gate", "NVIDIA H200") == sixteen


def test_winners_compile_to_machine_code_without_spills(h200):
    from bench import compile_kernels, tune
    from bench.tune_choice import SUBJECTS
    from pallas_kernels.decode_activations import prepare

    subjects = {subject.product: subject for subject in SUBJECTS}
    shipped = tile_choice.winners_on("NVIDIA H200").values()
    for winner in (Winner.of(ENTRY), *shipped):
        product, block = winner.product, BLOCKS[winner.product.block]
        x = jax.ShapeDtypeStruct((product.rows, product.k), jnp.float32)
        words = product.k // 256 * block.words
        weights = jax.ShapeDtypeStruct((2, product.outputs // 16, words), jnp.uint32)
        operands = jax.eval_shape(functools.partial(prepare, block=block), x), weights
        run = tune.every_layer(subjects[product], winner.tiles)
        for report in compile_kernels.compile_kernels(run, operands, h200):
            assert report.spilled_bytes == 0, winner


@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_is_found_by_the_name_of_its_format(name):
    assert BLOCKS[name].format.name == name


@pytest.mark.parametrize("text", ["{}", "[]", '{"winners": [1]}', '{"winners": 3}', "no JSON"])
def test_a_file_that_holds_no_winners_is_named(text, tmp_path):
    path = tmp_path / "nvidia_h200.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"nvidia_h200\.json: .*run bench/tune\.py again"):
        read_winners(path)
