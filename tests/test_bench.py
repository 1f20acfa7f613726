"""Intervals hold what they say, pictures show what was measured, and llama.cpp is driven fairly."""

import argparse
import json
import pathlib
import socket
import stat
import sys
import threading
import xml.etree.ElementTree
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import openjet_jax as oj
from bench import fidelity, phases, plots
from bench.article import GREEDY, runs
from bench.decode import Run, beside
from bench.intervals import median, share
from bench.peers.llama_cpp import LlamaServer, flags_for, running
from openjet_jax.convert.pipeline import convert_gguf

SERVER = """#!{python}
import json, sys
if "--version" in sys.argv:
    print("version: 7777 (abcdef)", file=sys.stderr)
    sys.exit()
if "--spec-type" in sys.argv and "{failing}":
    print("error: unknown argument: --spec-type")
    sys.exit(1)
sys.path.insert(0, "{root}")
from tests.test_bench import Handler
from http.server import ThreadingHTTPServer
port = int(sys.argv[sys.argv.index("--port") + 1])
ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


class Handler(BaseHTTPRequestHandler):
    """Answers as llama-server does; it is loading when it is asked the first time."""

    asked = 0

    def log_message(self, *args):
        pass

    def reply(self, code: int, content: dict) -> None:
        self.send_response(code)
        self.end_headers()
        self.wfile.write(json.dumps(content).encode())

    def do_GET(self):
        if self.path == "/health":
            type(self).asked += 1
            loading = type(self).asked == 1
            return self.reply(503 if loading else 200, {"status": "ok"})
        return self.reply(200, {"build_info": "b7777-abcdef"})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        wanted = {"temperature": 0.0, "cache_prompt": False, "ignore_eos": True}
        if any(body[key] != value for key, value in wanted.items()) or 13 in body["prompt"]:
            return self.reply(400, {"error": {"message": "unlucky"}})
        if 14 in body["prompt"]:
            return self.reply(200, {"content": "no times"})
        count = body["n_predict"]
        times = {"prompt_n": len(body["prompt"]), "prompt_ms": 500.0}
        times |= {"predicted_n": count, "predicted_ms": 250.0}
        times |= {"draft_n": 8, "draft_n_accepted": 6}
        return self.reply(200, {"tokens": list(range(count)), "timings": times})


@pytest.fixture
def url():
    Handler.asked = 1
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def program(folder: pathlib.Path, failing: str = "") -> str:
    path = folder / "llama-server"
    root = pathlib.Path(__file__).parents[1]
    path.write_text(SERVER.format(python=sys.executable, root=root, failing=failing))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_a_completion_has_the_servers_own_times(url):
    with running(url, ()) as server:
        answer = server.complete([1, 2, 3], 10)
    assert (answer.prefill_rate, answer.decode_rate) == (6.0, 40.0)
    assert (answer.drafted, answer.accepted, answer.token_ids) == (8, 6, list(range(10)))
    assert server.facts() == {"version": None, "build": "b7777-abcdef", "flags": []}
    with pytest.raises(RuntimeError, match=r"completion: 400: .*unlucky"):
        server.complete([13], 1)
    with pytest.raises(RuntimeError, match="the answer has no times: KeyError"):
        server.complete([14], 1)


def test_a_program_is_started_waited_for_and_stopped(tmp_path):
    flags = flags_for("model.gguf", 100, 4, "q8_0")
    with running(program(tmp_path), flags) as server:
        assert server.complete([1], 2).new_tokens == 2
        assert server.version == "version: 7777 (abcdef)"
        assert server.facts()["flags"] == list(flags)
        port = int(server.url.rsplit(":", 1)[1])
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0


def test_a_program_that_is_missing_or_refuses_its_flags_is_an_error_with_its_words(tmp_path):
    with pytest.raises(RuntimeError, match="no such program"), running("llama-absent", ()):
        pass
    flags = flags_for("model.gguf", 100, 4, "f16")
    refusing = program(tmp_path, failing="yes")
    with pytest.raises(RuntimeError, match="unknown argument: --spec-type"):
        with running(refusing, flags):
            pass
    with pytest.raises(RuntimeError, match="Connection refused"):
        LlamaServer(url="http://127.0.0.1:9").complete([1], 1)


def test_drafts_are_asked_of_the_peer_only_where_they_are_ours(url):
    assert "--spec-type" not in flags_for("m", 10, 0, "f16")
    text = " ".join(flags_for("m", 10, 3, "f16"))
    assert "--spec-type draft-mtp --spec-draft-n-max 3 --spec-draft-p-min 0" in text
    assert "-ctk f16 -ctv f16" in text and "-fa on" in text


def test_the_peers_rows_have_its_rates(url, monkeypatch):
    monkeypatch.setattr("bench.decode.prompt_of", lambda model, count: list(range(20, 20 + count)))
    settings = {"contexts": [4], "depths": [4], "peer": url, "peer_kv": "f16", "model": "m"}
    args: Any = argparse.Namespace(**settings, peer_file="m.gguf", peer_tokens=5, runs=3)
    rows = beside(args, args)
    assert [(row["depth"], row["rate"]["value"]) for row in rows] == [(0, 20.0), (4, 20.0)]


def test_a_median_interval_holds_the_median_about_as_often_as_it_says():
    rng, hits = np.random.default_rng(0), 0
    for _ in range(1000):
        found = median(rng.exponential(size=25).tolist())
        hits += found["low"] <= np.log(2) <= found["high"]
    assert 930 <= hits <= 995
    assert median([3.0, 1.0, 2.0]) == {"value": 2.0, "low": 1.0, "high": 3.0, "count": 3}


def test_a_share_has_wilsons_interval():
    found = share(7, 10)
    assert found["value"] == 0.7
    assert (round(found["low"], 3), round(found["high"], 3)) == (0.397, 0.892)
    assert share(0, 0)["high"] == 1.0 and share(0, 20)["low"] == pytest.approx(0, abs=1e-12)


def test_a_run_tells_cycles_tokens_and_acceptance():
    run = Run(seconds=[0.2, 0.1, 0.1], cycles=[[(2, 2), (2, 0)], [(2, 1)], [(2, 1)]], token_ids=[])
    assert run.cycle_ms()["value"] == 100.0 and run.rate()["value"] == 20.0
    assert {k: v["count"] for k, v in run.by_accepted().items()} == {1: 2}
    # Reached: 2 of the first cycle, 1 of the second, 2 of each other; right: 4.
    assert run.acceptance() == pytest.approx(4 / 7)


def measured(path: pathlib.Path) -> None:
    def interval(value: float) -> dict[str, float]:
        return {"value": value, "low": value - 1, "high": value + 1, "count": 9}

    folder = path / "card"
    folder.mkdir()
    head = {"manifest": {"device": "A & B"}, "model": "x/tiny.gguf", "depth": 4}
    contexts = [{"context": at, "plain": interval(at / 10)} for at in (64, 1024, 16384)]
    depths = [{"context": 64, "depth": d, "rate": interval(30.0 + d)} for d in (1, 4)]
    peers = [{"context": 64, "depth": 0, "rate": interval(5.0)}]
    decode = head | {"contexts": contexts, "depths": depths, "peers": peers}
    rows = [{"class": "story", "acceptance": [share(9, 10), share(5, 10)]}]
    phases = [{"phase": "verify <x>", "us": 30.0}, {"phase": "draft", "us": 10.0}]
    for name, content in {
        "decode": decode,
        "article": head | {"rows": rows},
        "phases": head | {"phases": phases},
    }.items():
        (folder / f"{name}.json").write_text(json.dumps(content))


def test_every_measured_point_is_in_its_picture(tmp_path):
    measured(tmp_path)
    found = plots.drawings(tmp_path)
    texts = {path.name: text for path, text in found.items()}
    assert set(texts) == {"context.svg", "acceptance.svg", "phases.svg"}
    for text in texts.values():
        xml.etree.ElementTree.fromstring(text)
        assert "A &amp; B" in text
    assert texts["context.svg"].count("<circle") == 3 + 1 + 1
    assert "depth 4, 64: 34 (33 to 35)" in texts["context.svg"] and ">16K<" in texts["context.svg"]
    assert "story, 2: 0.5 (0.2" in texts["acceptance.svg"]
    assert "verify &lt;x&gt;" in texts["phases.svg"] and "30 us, 75%" in texts["phases.svg"]


def test_the_pictures_that_are_kept_are_those_of_the_results():
    for path, text in plots.drawings().items():
        assert path.read_text() == text, f"{path.name}: run python -m bench.plots"


def test_fidelity_is_measured_against_exact_answers_and_llama_cpp(tmp_path):
    data = pathlib.Path(__file__).parent / "data"
    model = oj.load(convert_gguf(data / "golden" / "q8_0.gguf", tmp_path / "model", quiet=True))
    file = data / "llama" / "q8_0_c48.logits"
    args = argparse.Namespace(window=32, windows=1, kv_dtypes=["float32", "q8_0"], base_logits=file)
    found = {f.name: f for f in fidelity.figures(fidelity.measure(model, model, args), "small")}
    assert len(found) == 8 and found["small_kl_float32"].value < 1e-9
    assert 1e-9 < found["small_kl_q8_0"].value < fidelity.KL_MUST == found["small_kl_q8_0"].must
    assert found["small_top1_float32"].value == 100 and found["small_kl_llama_q8_0"].must is None
    assert 1e-5 < found["small_kl_llama_float32"].value < 1e-3


PROGRAM = """
HloModule jit_cycles
  %fusion.3 = f32[8] fusion(%p), kind=kLoop, metadata={op_name="jit(cycles)/while/verify/head/dot"}
  ROOT copy.1 = f32[] copy(x), metadata={op_type="x" op_name="jit(cycles)/draft/experts" line=1}
  custom.2 = f32[] custom-call(x), metadata={op_name="jit(cycles)/draft/draft_head/dot"}
  add = f32[] add(x, y), metadata={op_name="jit(cycles)/while/cond"}
  plain = f32[] add(x, y)
"""


def test_instructions_are_told_apart_by_the_innermost_scope():
    assert phases.scopes_of(PROGRAM) == {
        "fusion.3": "head",
        "copy.1": "draft",
        "custom.2": "draft_head",
        "add": "outside scopes",
    }
    assert phases.phase_of("jit(f)/draft/attention/dot") == "draft: attention"


def test_a_trace_gives_the_time_of_each_phase(tmp_path):
    def work(x):
        with jax.named_scope("verify"):
            x = jnp.matmul(x, x)
        with jax.named_scope("head"):
            return jnp.sort(x.reshape(-1))

    x = jnp.ones((600, 600))
    compiled = jax.jit(work).lower(x).compile()
    compiled(x).block_until_ready()
    with jax.profiler.trace(str(tmp_path)):
        compiled(x).block_until_ready()
    times = phases.times_by_phase(tmp_path, phases.scopes_of(str(compiled.as_text())))
    assert times["verify"] > 100 and times["head"] > 100
    with pytest.raises(ValueError, match="names no instruction"):
        phases.times_by_phase(tmp_path, {"absent.77": "head"})
    with pytest.raises(ValueError, match="holds no trace"):
        phases.times_by_phase(tmp_path / "absent", {})


def test_the_article_has_five_coding_prompts_of_two_seeds_and_three_greedy_classes():
    asked = runs()
    sampled = [(prompt, s.seed) for kind, prompt, s in asked if s.temperature == 1.0]
    assert len(set(sampled)) == 10 and all(
        (s.top_p, s.top_k) == (0.95, 20) for *_, s in asked if s.temperature
    )
    assert {kind for kind, _, s in asked if not s.temperature} == set(GREEDY)
