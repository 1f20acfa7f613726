"""The tuner drops what is wrong, wants two rounds, and files what the engine will take."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench import tune, tune_choice
from bench.kernels import Case
from bench.summary import RESULTS
from bench.tune_choice import SUBJECTS, Comparison, Subject, candidates, choose, from_sweeps, spread
from pallas_kernels.decode_cuts import Tiles
from pallas_kernels.tile_choice import FOLDER, Product, read_winners

SMALL = Subject(case=Case(name="small", block="q4_k", outputs=64, k=512))


def cut(stages, us, default_us):
    return Comparison(tiles=Tiles(stages=stages), us=us, default_us=default_us)


def test_a_winner_beats_the_default_of_its_moment_in_both_rounds():
    once, twice = cut(1, (9.0,), (10.0,)), cut(3, (9.7, 9.7), (10.0, 10.0))
    lucky, slow = cut(4, (8.0, 9.9), (10.0, 10.0)), cut(5, (10.1, 10.1), (10.0, 10.0))
    assert choose([once, twice, lucky, slow]) == twice
    assert choose([once, lucky, slow]) is None
    assert choose([]) is None
    assert choose([once], rounds=1) == once
    drifting = cut(6, (9.7, 10.7), (10.0, 11.0))
    assert choose([drifting]) == drifting


def test_two_percent_are_needed_and_more_where_the_default_differs_from_itself():
    assert choose([cut(3, (9.81, 9.81), (10.0, 10.0))]) is None
    assert choose([cut(3, (9.79, 9.79), (10.0, 10.0))]) is not None
    assert choose([cut(3, (9.79, 9.79), (10.0, 10.0))], noise=0.03) is None
    assert spread([10.0, 10.3, 9.9, 10.0]) == pytest.approx(0.04)


def test_of_several_winners_the_one_with_the_best_worst_round_is_taken():
    steady, jumpy = cut(3, (9.5, 9.5), (10.0, 10.0)), cut(4, (8.0, 9.7), (10.0, 10.0))
    assert choose([jumpy, steady]) == steady


@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda s: s.case.name)
def test_every_cut_that_is_tried_may_stand_in_for_the_default(subject):
    product = subject.product
    tried = candidates(product)
    assert tried and len(tried) == len(set(tried)) and product.default not in tried
    for tiles in tried:
        assert product.objection(tiles) is None
        assert tiles.parts == product.default.parts


def test_no_two_cases_ask_for_the_same_product():
    products = [subject.product for subject in SUBJECTS]
    assert len(set(products)) == len(products)
    assert Product(block="q6_k", outputs=248320, k=5120, rows=8, epilogue="choice") in products


def test_what_the_recorded_sweeps_say_is_what_is_shipped():
    paths = sorted(RESULTS.glob("h200/products_sweep_*.json"))
    device, about, winners = from_sweeps(paths)
    shipped = json.loads((FOLDER / "nvidia_h200.json").read_text())
    assert device == "NVIDIA H200" and winners == []
    if "products_sweep_1.json" in shipped["about"]:  # until a card has been tuned
        assert (shipped["about"], shipped["winners"]) == (about, [])


def sweep(*rows, **facts):
    names = ("warpgroups", "stages", "parts", "sharers", "grid", "overlap")
    return facts | {
        "rows": [
            dict(name=name, right=right, us=us, tiles=dict(zip(names, tiles, strict=True)))
            for name, tiles, us, right in rows
        ]
    }


def test_a_sweep_with_a_winner_files_it_with_its_origin(tmp_path):
    default, three = (3, 2, 1, 1, 132, False), (3, 3, 1, 1, 132, False)
    facts = {"manifest": {"device": "NVIDIA H200", "commit": "c0ffee", "date": "2026-12-01"}}
    one = sweep(
        ("q4k_out", default, 8.0, True),
        ("q4k_out", three, 7.5, True),
        ("q4k_out", (2, 2, 1, 1, 132, False), 1.0, False),  # wrong
        ("q4k_out", (3, 2, 2, 1, 132, False), 1.0, True),  # other parts of K
        ("q4k_attn_in", default, 8.0, True),
        ("q4k_attn_in", three, 7.9, True),  # not enough
        ("q4k_gdn_in", three, 1.0, True),  # nothing to compare with
        **facts,
    )
    paths = [tmp_path / "products_sweep_1.json", tmp_path / "products_sweep_2.json"]
    paths[0].write_text(json.dumps(one))
    _, about, (winner,) = from_sweeps(paths[:1])
    assert winner.product.outputs == 5120 and winner.tiles == Tiles(stages=3)
    assert (winner.us, winner.default_us, winner.commit) == (7.5, 8.0, "c0ffee")
    assert "Swept without the default of today: q4k_gdn_in." in about
    path = tmp_path / "nvidia_h200.json"
    path.write_text(tune_choice.document("NVIDIA H200", about, [winner]))
    assert read_winners(path) == {winner.product: winner}
    # A second sweep that says otherwise takes it back.
    other = sweep(("q4k_out", default, 8.0, True), ("q4k_out", three, 8.1, True), **facts)
    paths[1].write_text(json.dumps(other))
    assert from_sweeps(paths)[2] == []


@pytest.fixture
def card(monkeypatch):
    """Stands in for a GPU: a product that some cuts get wrong, and a clock for each cut."""
    times, cuts_of = {}, {}
    every_layer = tune.every_layer

    def product(x, weights, layer, block, tiles, epilogue):
        if tiles.stages == 4:
            raise ValueError("this cut does not compile")
        wrong = 1.0 if tiles.stages == 1 else 0.0
        return x[:, :4] * layer.astype(jnp.float32)[:, None] + wrong

    def watched(subject, tiles):
        run = every_layer(subject, tiles)
        cuts_of[run] = tiles
        return run

    def clock(run, *_, name):
        assert name == "decode_product"
        return [times.get(cuts_of[run], 10.0)] * 3

    monkeypatch.setattr(tune, "prepare", lambda x, block: x)
    monkeypatch.setattr(tune, "decode_product", product)
    monkeypatch.setattr(tune, "every_layer", watched)
    monkeypatch.setattr(tune, "kernel_times_us", clock)
    monkeypatch.setattr(tune, "is_right", lambda *_: True)
    layers = jnp.zeros((3, 4, 2), jnp.uint32)
    monkeypatch.setattr(tune, "make_layers", lambda *_: layers)
    return times


def test_cuts_with_other_bits_are_dropped_and_reported_however_fast(card, capsys):
    card |= {Tiles(stages=1): 1.0, Tiles(warpgroups=2, stages=2): 9.0}
    rows, winner = tune.tune(SMALL, deadline=np.inf)
    assert winner is not None and winner.tiles == Tiles(warpgroups=2, stages=2)
    assert winner.us == (9.0, 9.0) and winner.default_us == (10.0, 10.0)
    by_stages = {row["tiles"]["stages"]: row for row in rows}
    assert by_stages[1]["same_bits"] is False and "us" not in by_stages[1]
    assert "does not compile" in by_stages[4]["same_bits"]
    slow = next(row for row in rows if row["tiles"]["stages"] == 3)
    assert slow["us"] == (10.0,)  # no second round for what lost the first
    printed = capsys.readouterr().out
    assert f"small: dropped {Tiles(stages=1)}: other bits" in printed
    json.dumps(rows)


def test_nothing_is_tuned_where_the_default_is_wrong(card, monkeypatch):
    monkeypatch.setattr(tune, "is_right", lambda *_: False)
    with pytest.raises(ValueError, match="small: the default .* is wrong; nothing is tuned"):
        tune.tune(SMALL, deadline=np.inf)


def test_what_time_does_not_reach_is_said_and_the_default_stays(card, capsys):
    assert tune.tune(SMALL, deadline=-np.inf) == ([], None)
    assert "small: out of time" in capsys.readouterr().out


def test_winners_are_filed_and_those_of_other_products_stay(card, tmp_path, monkeypatch):
    kind = jax.devices()[0].device_kind
    monkeypatch.setattr(tune, "FOLDER", tmp_path)
    path = tmp_path / tune.device_file(kind)
    large = Subject(case=dataclasses.replace(SMALL.case, name="large", outputs=128))
    card |= {Tiles(warpgroups=2): 9.0}
    tune._tune_all([SMALL, large], np.inf, tmp_path, tmp_path)
    assert set(read_winners(path)) == {SMALL.product, large.product}
    tune._tune_all([SMALL, large], -1.0, tmp_path, tmp_path)
    tried = json.loads((tmp_path / "tune.json").read_text())["rows"]
    assert {row["name"] for row in tried} == {"small", "large"}  # no time, so nothing was written
    with monkeypatch.context() as patch:
        # What was not tried again is not taken back.
        patch.setattr(tune, "candidates", lambda product: [Tiles(stages=3)])
        tune._tune_all([large], np.inf, tmp_path, tmp_path)
    assert set(read_winners(path)) == {SMALL.product, large.product}
    card.clear()
    tune._tune_all([large], np.inf, tmp_path, tmp_path)
    (winner,) = read_winners(path).values()
    assert winner.product == SMALL.product and winner.tiles == Tiles(warpgroups=2)
    measured = json.loads((tmp_path / "tune.json").read_text())
    assert {row["name"] for row in measured["rows"]} == {"large"}
    assert json.loads(path.read_text())["device"] == kind
