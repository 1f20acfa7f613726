"""Every command from outside: what it prints, what it writes, and how it says no."""

import functools
import json
import os
import pathlib
import pickle
import subprocess
import sys

import numpy as np
import pytest

import openjet_jax as oj
from openjet_jax import device_memory, loading
from openjet_jax.cli import main
from openjet_jax.config import MAX_DEPTH, DecodeConfig
from openjet_jax.depth import DepthPolicy
from openjet_jax.memory import memory_plan

pytestmark = pytest.mark.xdist_group("cli")

ROOT = pathlib.Path(__file__).parents[1]
DATA = ROOT / "tests" / "data"
SHARED = ROOT.parent / "shared" / "golden"

needs_shared = pytest.mark.skipif(not SHARED.exists(), reason="needs ../shared/golden")


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> pathlib.Path:
    """A folder with two checkpoints: `drafting`, with an MTP block, and `plain`, without."""
    folder = tmp_path_factory.mktemp("models")
    for name, source in (("drafting", "q8_0"), ("plain", "q4_1")):
        source = DATA / "golden" / f"{source}.gguf"
        assert main(["convert", str(source), "-o", str(folder / name)]) == 0
    return folder


@pytest.fixture
def command(capsys, tmp_path, models):
    """Runs a command in `tmp_path`; returns its exit code, stdout and stderr.

    `DRAFTING` and `PLAIN` stand for the models; other words with a full stop are files.
    """
    files = {"DRAFTING": str(models / "drafting"), "PLAIN": str(models / "plain")}

    def run(*words: object) -> tuple[int, str, str]:
        code = main([files.get(str(word), str(word)) for word in words])
        return code, *capsys.readouterr()

    capsys.readouterr()
    here = os.getcwd()
    os.chdir(tmp_path)
    yield run
    os.chdir(here)


def golden(name: str) -> dict[str, np.ndarray]:
    return dict(np.load(DATA / "golden" / f"{name}.npz"))


def relative_rms(y: np.ndarray, x: np.ndarray) -> float:
    assert y.shape == x.shape
    return float(np.sqrt(np.mean((y - x) ** 2) / np.mean(x**2)))


def test_convert_prints_the_checkpoint_it_made_and_refuses_to_replace_it_without_force(command):
    source = DATA / "golden" / "q4_1.gguf"
    code, out, _ = command("convert", source, "-o", "made")
    assert code == 0 and pathlib.Path(out.strip()) == pathlib.Path("made").resolve()
    code, out, err = command("convert", source, "-o", "made")
    assert code == 2 and out == "" and "exists; give --force" in err
    assert command("convert", source, "-o", "made", "--force")[0] == 0
    pathlib.Path("mine").mkdir()
    code, _, err = command("convert", source, "-o", "mine", "--force")
    assert code == 2 and "not a checkpoint" in err and not list(pathlib.Path("mine").iterdir())


def test_logits_of_a_prompt_are_the_golden_ones_with_mtp_and_without(command):
    for model, name, mtp in (("DRAFTING", "q8_0", ["--mtp"]), ("PLAIN", "q4_1", [])):
        z = golden(name)
        np.save("ids.npy", z["tokens"])
        code, out, err = command("logits", model, "--tokens", "ids.npy", "--out", "out.bin", *mtp)
        assert code == 0 and out == "", err
        found = dict(np.load("out.bin"))
        assert sorted(found) == ["logits", "mtp_logits"][: 1 + len(mtp)]
        assert all(array.dtype == np.float32 for array in found.values())
        for key, array in found.items():
            assert relative_rms(array, z[key]) < 1e-5


def check_json(out: str, z: dict[str, np.ndarray], depth: int) -> None:
    found = json.loads(out)
    assert out.count("\n") == 1
    assert set(found) == {"text", "token_ids", "logprobs", "finish_reason", "accepted", "stats"}
    assert found["token_ids"] == z["greedy"].tolist() and found["finish_reason"] == "length"
    assert found["stats"]["new_tokens"] == len(z["greedy"])
    assert found["stats"]["cycles"] == 1 + len(found["accepted"])
    if depth:
        assert found["token_ids"] == z[f"spec{depth}_tokens"][: len(z["greedy"])].tolist()
        expected = z[f"spec{depth}_accepted"][: len(found["accepted"])].tolist()
        assert found["accepted"] == expected
        # The first token's cycle has no drafts; every later one has exactly as many as asked for.
        drafted = [len(found["accepted"])] * depth + [0] * (MAX_DEPTH - depth)
        assert found["stats"]["drafted"] == drafted
    else:
        assert set(found["accepted"]) == {0}
    best = z["greedy_logits"][:, :-6].astype(np.float64)  # six rows are padding
    best -= best.max(-1, keepdims=True)
    np.testing.assert_allclose(found["logprobs"], -np.log(np.exp(best).sum(-1)), atol=1e-4)


def test_generate_json_is_the_golden_trace_at_every_depth(command, monkeypatch):
    z = golden("q8_0")
    np.save("ids.npy", z["tokens"])
    asked = ["--tokens", "ids.npy", "--max-new-tokens", len(z["greedy"]), "--context", 256]
    code, out, err = command("generate", "DRAFTING", *asked, "--depth", 2, "--json")
    assert code == 0
    check_json(out, z, 2)
    # The other depths run in the program of the largest, which compiles once.
    monkeypatch.setattr(DepthPolicy, "max_depth", MAX_DEPTH)
    for depth in (0, 1, 3, 4, 5):
        code, out, err = command("generate", "DRAFTING", *asked, "--depth", depth, "--json")
        assert code == 0, err
        check_json(out, z, depth)


def test_a_profile_is_of_a_warm_run_that_is_short_whatever_is_asked(command):
    settings = ["--prompt", "a", "-n", 500, "--context", 256, "--depth", 2, "--ignore-eos"]
    code, out, err = command("generate", "DRAFTING", *settings, "--profile", "trace", "--json")
    found = json.loads(out)["stats"]
    assert code == 0 and "trace written to trace" in err
    assert found["new_tokens"] == 64 and found["compiled"] == 0
    assert list(pathlib.Path("trace").rglob("*.xplane.pb"))


def test_generate_without_an_mtp_block_is_plain_and_refuses_drafts(command):
    z = golden("q4_1")
    np.save("ids.npy", z["tokens"])
    asked = ["--tokens", "ids.npy", "-n", len(z["greedy"]), "--context", 256, "--json"]
    for depth in ([], ["--depth", 0]):
        code, out, err = command("generate", "PLAIN", *asked, *depth)
        assert code == 0, err
        check_json(out, z, 0)
    for depth in (1, "4/3", "auto"):
        code, out, err = command("generate", "PLAIN", *asked, "--depth", depth)
        assert code == 2 and out == "" and "no MTP block; use depth=0" in err


def test_generate_prints_prompt_and_text_on_stdout_and_figures_on_stderr(command):
    prompt = 30 * "a\r\nb\n"
    pathlib.Path("prompt.txt").write_bytes(prompt.encode())
    settings = ["--prompt-file", "prompt.txt", "-n", 4, "--context", 256, "--depth", 2]
    code, out, err = command("generate", "DRAFTING", *settings)
    assert code == 0 and out.startswith(prompt)
    assert "4 generated at" in err and "accepted" in err
    _, as_json, _ = command("generate", "DRAFTING", *settings, "--json")
    assert out == prompt + json.loads(as_json)["text"] + "\n"


def test_compile_makes_what_generate_needs_and_finds_it_the_second_time(command):
    arguments = ["compile", "DRAFTING", "--depths", "2,2", "--context", 256]
    command(*arguments)
    code, out, _ = command(*arguments)
    lines = [line.split() for line in out.splitlines()]
    assert code == 0 and len(lines) == 4
    assert {name for name, *_ in lines} >= {"start", "prefill_512", "cycles_greedy_depth2"}
    assert all(line[-1] == "found" for line in lines)


def test_tokenize_reads_a_file_as_it_is_and_control_tokens_only_if_asked(command):
    pathlib.Path("text").write_bytes(b"x\r\n<|im_end|>")
    tokenizer = loading.load_tokenizer("tiny")
    code, out, _ = command("tokenize", "tiny", "--file", "text", "--json")
    assert code == 0 and json.loads(out) == tokenizer.encode("x\r\n<|im_end|>")
    code, out, _ = command("tokenize", "tiny", "--file", "text", "--special")
    assert [int(token) for token in out.split()][-1] == tokenizer.control_tokens["<|im_end|>"]
    pathlib.Path("text").write_bytes(b"")
    assert command("tokenize", "tiny", "--file", "text", "--json")[:2] == (0, "[]\n")


def test_evaluate_compares_two_cache_formats_and_prints_json(command):
    np.save("ids.npy", np.random.default_rng(0).integers(0, 280, 100))
    asked = ["evaluate", "PLAIN", "--tokens", "ids.npy", "--context", 32]
    code, out, err = command(*asked, "--base-kv-dtype", "bfloat16", "--json")
    found = json.loads(out)
    assert code == 0 and "window 3 of 3" in err and found["positions"] == 3 * 15
    assert 0 < found["kl"]["value"] < 1e-2 and found["base"]["kv_dtype"] == "bfloat16"
    code, out, _ = command(*asked)
    assert code == 0 and out.startswith("45 positions in 3 windows of 32")


@needs_shared
def test_tokenize_gives_the_golden_ids_of_every_text(command, monkeypatch):
    monkeypatch.setattr(loading, "load_tokenizer", functools.cache(loading.load_tokenizer))
    vocabulary = SHARED / "tokenizer" / "ggml-vocab-qwen35.gguf"
    cases = json.loads((SHARED / "tokenizer" / "cases.json").read_text())
    assert len(cases) > 100
    for case in cases:
        pathlib.Path("text").write_bytes(case["text"].encode())
        code, out, _ = command("tokenize", vocabulary, "--file", "text", "--json")
        assert code == 0 and json.loads(out) == case["ids"]


@needs_shared
def test_render_gives_the_golden_prompts_or_the_templates_own_refusal(command):
    template = SHARED / "chat" / "Qwen3.5-4B.jinja"
    for case in json.loads((SHARED / "chat" / "cases.json").read_text()):
        pathlib.Path("talk.json").write_text(json.dumps(case))
        code, out, err = command(
            "render", "tiny", "--conversation", "talk.json", "--template", template
        )
        if case["error"]:
            assert code == 2 and out == "" and case["error"].split(": ")[1] in err
        else:
            assert (code, out) == (0, case["rendered"])


def test_render_uses_the_models_own_template(command):
    pathlib.Path("talk.json").write_text('{"messages": [{"role": "user", "content": "Hällo"}]}')
    code, out, _ = command("render", "tiny", "--conversation", "talk.json")
    assert code == 0 and "<|im_start|>user\nHällo<|im_end|>" in out


def test_inspect_and_doctor_print_json(command):
    code, out, _ = command("doctor", "--json")
    assert code == 0 and "hazards" in json.loads(out)
    for model in ("DRAFTING", DATA / "golden" / "q8_0.gguf", "tiny"):
        code, out, _ = command("inspect", model, "--json", "--context", 512)
        assert code == 0 and json.loads(out)["model"]["has_mtp"]
    assert "Q8_0" in command("inspect", "DRAFTING")[1]
    assert "as written" in command("inspect", "DRAFTING", "--verify")[1]


SPOILT = {
    "two.npy": lambda path: np.save(path, np.zeros((2, 2), np.int32)),
    "float.npy": lambda path: np.save(path, np.ones(3)),
    "bool.npy": lambda path: np.save(path, np.ones(3, bool)),
    "scalar.npy": lambda path: np.save(path, np.int32(1)),
    "none.npy": lambda path: np.save(path, np.zeros(0, np.int32)),
    "high.npy": lambda path: np.save(path, np.array([1, 288])),
    "huge.npy": lambda path: np.save(path, np.array([2**64 - 1], np.uint64)),
    "low.npy": lambda path: np.save(path, np.array([-1])),
    "long.npy": lambda path: np.save(path, np.ones(5000, np.int32)),
    "object.npy": lambda path: np.save(path, np.array([{}], object), allow_pickle=True),
    "pickle.npy": lambda path: path.write_bytes(pickle.dumps([1, 2])),
    "zip.npy": lambda path: path.write_bytes(b"PK\3\4" + bytes(96)),
    "empty.npy": lambda path: path.write_bytes(b""),
    "cut.npy": lambda path: path.write_bytes(npy_of_five()[:-8]),
    "lying.npy": lambda path: path.write_bytes(npy_of_five().replace(b"(5,), ", b"(5555555555,)")),
    "latin.txt": lambda path: path.write_bytes(b"caf\xe9"),
    "empty.txt": lambda path: path.write_bytes(b""),
    "cut.json": lambda path: path.write_text('{"messages": ['),
    "list.json": lambda path: path.write_text("[1]"),
    "none.json": lambda path: path.write_text("{}"),
    "kw.json": lambda path: path.write_text('{"messages": [], "kw": [1]}'),
    "role.json": lambda path: path.write_text('{"messages": [{"content": "x"}]}'),
    "cut.jinja": lambda path: path.write_text("{% if %}"),
    "good.json": lambda path: path.write_text('{"messages": [{"role": "user", "content": "x"}]}'),
    "good.npy": lambda path: np.save(path, np.arange(5)),
    "magic.gguf": lambda path: path.write_bytes(b"GGML" + bytes(64)),
}


def npy_of_five() -> bytes:
    from io import BytesIO

    stream = BytesIO()
    np.save(stream, np.arange(5))
    return stream.getvalue()


REFUSALS = [
    ("", "arguments are required: COMMAND"),
    ("frobnicate", "invalid choice: 'frobnicate'"),
    ("doctor --loud", "unrecognized arguments: --loud"),
    ("generate PLAIN", "--prompt --prompt-file --message --tokens is required"),
    ("generate PLAIN --prompt a --tokens good.npy", "not allowed with argument --prompt"),
    ("generate PLAIN --prompt a --temperatur 1", "unrecognized arguments: --temperatur 1"),
    ("generate PLAIN --prompt a --top-k x", "--top-k: invalid int value: 'x'"),
    ("generate PLAIN --prompt a --temperature -1", "temperature=-1.0 must be 0 or in"),
    ("generate PLAIN --prompt a --top-p 2", "top_p=2.0 must be in 0..1"),
    ("generate PLAIN --prompt a --seed -1", "seed=-1 must be"),
    ("generate PLAIN --prompt a --depth 6", "depth 6 must be in 0..5"),
    ("generate PLAIN --prompt a --depth fast", "depth='fast' is not a draft depth"),
    ("generate PLAIN --prompt a -n 0", "max_new_tokens=0 must be an integer, at least 1"),
    ("generate PLAIN --prompt a --kv-dtype int3", "kv_dtype='int3' is not supported"),
    ("generate PLAIN --prompt a --context 0", "context=0 must be at least 1"),
    ("generate PLAIN --prompt a --context 9999999", "more than the 4096 positions"),
    ("generate PLAIN --prompt a --logit-bias {", "'{' is not JSON"),
    ("generate PLAIN --prompt a --logit-bias [1]", "'[1]' is not a JSON object"),
    ('generate PLAIN --prompt a --logit-bias {"x":1}', "'x' is not a token id"),
    ('generate PLAIN --prompt a --logit-bias {"1":"x"}', "logit_bias[1]='x' must be a number"),
    ('generate PLAIN --prompt a --logit-bias {"999":1}', "token 999 must be below"),
    ("generate PLAIN --message a --template-options {", "'{' is not JSON"),
    ("generate PLAIN --message a --template-options [1]", "'[1]' is not a JSON object"),
    ('generate PLAIN --prompt a --template-options {"a":1}', "a meaning for messages only"),
    ('generate PLAIN --message a --template-options {"messages":1}', "must map the template's own"),
    ("generate PLAIN --prompt-file absent.txt", "absent.txt: no such file"),
    ("generate PLAIN --prompt-file .", ".: is a directory"),
    ("generate PLAIN --prompt-file latin.txt", "latin.txt is not UTF-8 text"),
    ("generate PLAIN --prompt-file empty.txt", "the prompt is empty"),
    ("generate absent --prompt a", "absent does not exist; give a checkpoint"),
    ("generate . --prompt a", "is not a checkpoint"),
    ("generate good.npy --prompt a", "good.npy is no .gguf file"),
    ("generate magic.gguf --prompt a", "magic.gguf: not a GGUF file"),
    ("generate PLAIN --tokens absent.npy", "absent.npy: no such file"),
    ("generate PLAIN --tokens two.npy", "one row of at least one integer, not int32[2, 2]"),
    ("generate PLAIN --tokens float.npy", "not float64[3]"),
    ("generate PLAIN --tokens bool.npy", "not bool[3]"),
    ("generate PLAIN --tokens scalar.npy", "not int32[]"),
    ("generate PLAIN --tokens none.npy", "the prompt is empty"),
    ("generate PLAIN --tokens high.npy", "token id 288 must be in 0..287"),
    ("generate PLAIN --tokens huge.npy", "must be in 0..287"),
    ("generate PLAIN --tokens low.npy", "token id -1 must be in 0..287"),
    ("generate PLAIN --tokens long.npy", "5000 tokens do not fit context=4096"),
    ("generate PLAIN --tokens object.npy", "object.npy is not a .npy file of token ids"),
    ("generate PLAIN --tokens pickle.npy", "pickle.npy is not a .npy file of token ids"),
    ("generate PLAIN --tokens zip.npy", "zip.npy is not a .npy file of token ids"),
    ("generate PLAIN --tokens empty.npy", "empty.npy is not a .npy file of token ids"),
    ("generate PLAIN --tokens cut.npy", "cut.npy is not a .npy file of token ids"),
    ("generate PLAIN --tokens lying.npy", "lying.npy is not a .npy file of token ids"),
    ("logits PLAIN --tokens good.npy --out a.npz --mtp", "the model has no MTP block"),
    ("logits PLAIN --tokens good.npy --out absent/a.npz", "no directory absent"),
    ("logits PLAIN --tokens long.npy --out a.npz", "5000 tokens are more than the 4096"),
    ("logits PLAIN --tokens object.npy --out a.npz", "object.npy is not a .npy file"),
    ("evaluate PLAIN", "nothing to read: give --text, --tokens or --base-logits"),
    ("evaluate PLAIN --tokens good.npy", "5 tokens, less than one window of 512"),
    ("evaluate PLAIN --base-logits good.npy", "good.npy is not a file of logits; write one with"),
    ("evaluate PLAIN --base-logits absent", "absent: no such file"),
    ("evaluate PLAIN --base-logits good.npy --base x", "--base-logits is a base already"),
    ("evaluate PLAIN --tokens good.npy --context 4 --windows 0", "windows=0 must be at least 1"),
    ("evaluate PLAIN --tokens good.npy --backend fast", "backend='fast' must be one of"),
    ("evaluate PLAIN --tokens good.npy --base-kv-dtype int3", "kv_dtype='int3' is not supported"),
    ("inspect PLAIN --device abacus", "device='abacus' is not described"),
    ("tokenize PLAIN --file latin.txt", "latin.txt is not UTF-8 text: unexpected end"),
    ("tokenize PLAIN --file absent.txt", "absent.txt: no such file"),
    ("tokenize absent --file empty.txt", "absent does not exist"),
    ("render PLAIN --conversation cut.json", "cut.json is not JSON"),
    ("render PLAIN --conversation list.json", 'list.json must hold a JSON object with "messages"'),
    ("render PLAIN --conversation none.json", 'none.json must hold a JSON object with "messages"'),
    ("render PLAIN --conversation kw.json", 'kw.json: "kw" is [1]'),
    ("render PLAIN --conversation role.json", "a mapping with a 'role'"),
    ("render PLAIN --conversation latin.txt", "latin.txt is not UTF-8"),
    ("render PLAIN --conversation good.json --template cut.jinja", "template cannot be read"),
    ("render PLAIN --conversation good.json --template absent", "absent: no such file"),
    ("compile PLAIN --depths 7", "depth 7 must be in 0..5"),
    ("compile PLAIN --depths 3", "no MTP block; use depth=0"),
    ("compile PLAIN --temperature -2", "temperature=-2.0 must be"),
    ("draft-vocab PLAIN latin.txt", "no MTP block and makes no drafts"),
    ("draft-vocab DRAFTING", "give either files to count or --reset"),
    ("draft-vocab DRAFTING empty.npy", "empty.npy is not a .npy file of token ids"),
    ("draft-vocab DRAFTING pickle.npy", "pickle.npy is not a .npy file of token ids"),
    ("draft-vocab DRAFTING high.npy", "high.npy: token ids must be in 0..281"),
    ("draft-vocab DRAFTING cut.json", "cut.json is not JSON"),
    ("draft-vocab DRAFTING empty.txt", "nothing was counted"),
    ("draft-vocab DRAFTING absent.txt", "absent.txt: no such file"),
    ("draft-vocab DRAFTING good.npy --size 0", "size"),
    ("draft-vocab DRAFTING good.npy --draft-head q3", "q3"),
    ("convert absent.gguf", "absent.gguf: no such file"),
    ("convert magic.gguf", "magic.gguf: not a GGUF file"),
    ("convert .", "not a regular file"),
    ("inspect absent", "absent does not exist"),
    ("inspect PLAIN --kv-dtype int3", "kv_dtype='int3' is not supported"),
    ("chat PLAIN --template-options []", "'[]' is not a JSON object"),
]


@pytest.mark.parametrize(("line", "reason"), REFUSALS, ids=[line for line, _ in REFUSALS])
def test_what_is_refused_is_refused_in_one_line_with_the_reason(command, line, reason):
    for name, make in SPOILT.items():
        if name in line.split():
            make(pathlib.Path(name))
    code, out, err = command(*line.split())
    doing = ("openjet-jax: converting", "openjet-jax: compiling", "openjet-jax: memory: ")
    said = [part for part in err.splitlines() if not part.startswith(doing)]
    assert (code, out, len(said)) == (2, "", 1), err
    assert said[0].startswith("openjet-jax: ") and reason in said[0]
    assert not list(pathlib.Path().glob("*.npz")) and not list(pathlib.Path().glob("magic"))


@pytest.mark.parametrize(("option", "text"), [("--prompt", ""), ("--stop", "")])
def test_an_empty_string_is_refused_where_it_means_nothing(command, option, text):
    words = {"--prompt": "a", option: text}
    code, out, err = command("generate", "PLAIN", *(w for pair in words.items() for w in pair))
    assert code == 2 and out == "" and "empty" in err


def process(*words: object, **options) -> subprocess.CompletedProcess:
    command = [sys.executable, "-W", "error", "-m", "openjet_jax.cli", *map(str, words)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, env=env, capture_output=True, timeout=120, **options)


def test_a_process_of_its_own_ends_with_the_same_codes_and_no_warning(tmp_path):
    done = process("generate", "absent", "--prompt", "x", cwd=tmp_path, text=True)
    assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1
    done = process("--version", cwd=tmp_path, text=True)
    assert done.returncode == 0 and done.stdout.strip() == oj.__version__


@pytest.mark.parametrize("words", [["--help"], ["generate"], ["chat", "--help"], ["run", "x"]])
def test_help_and_wrong_words_are_answered_without_jax(words):
    code = (
        "import sys; from openjet_jax.cli import main\n"
        f"try: main({words})\nexcept SystemExit: pass\n"
        "print(sorted({'jax', 'numpy', 'rich'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.splitlines()[-1] == "[]", done.stderr


def test_converting_leaves_gpus_alone_and_memory_is_shared_with_others(tmp_path):
    code = (
        "import os, sys; from openjet_jax import cli, convert\n"
        "import openjet_jax.cli as cli\n"
        "cli._convert = lambda args: print(os.environ['JAX_PLATFORMS'])\n"
        "cli._doctor = lambda args: print(os.environ.get('JAX_PLATFORMS'))\n"
        "cli.main(['convert', 'x.gguf']); cli.main(['doctor'])\n"
        "print(os.environ['XLA_PYTHON_CLIENT_PREALLOCATE'], 'jax' in sys.modules)"
    )
    env = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.split() == ["cpu", "cpu", "false", "False"]


def test_a_device_out_of_memory_ends_in_one_line_and_other_errors_are_not_hidden(
    command, monkeypatch
):
    def fail(*args, **settings):
        raise RuntimeError(reason)

    monkeypatch.setattr(oj, "generate", fail)
    reason = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 123 bytes.\nmore"
    asked = ["generate", "PLAIN", "--prompt", "x", "--json"]
    code, out, err = command(*asked)
    *_, said = err.splitlines()
    assert code == 1 and out == "" and "out of memory" in said and "allocate 123 bytes" in said
    assert "ask for a smaller --context" in said
    reason = "INTERNAL: something else"
    with pytest.raises(RuntimeError, match="something else"):
        command(*asked)


def test_the_memory_plan_is_printed_first_and_what_does_not_fit_is_refused(command, monkeypatch):
    asked = ["generate", "PLAIN", "--prompt", "x", "-n", 1, "--context"]
    code, _, err = command(*asked, 256)
    assert code == 0 and err.startswith("openjet-jax: memory: ") and "workspace" in err
    config = loading.contents(DATA / "golden" / "q4_1.gguf")
    plan = memory_plan(config.model, config.tensors, DecodeConfig(context=1000), host=False)
    room = device_memory.Room(device="a card", host=False, total=2**40, free=plan.total)
    monkeypatch.setattr(device_memory, "device_room", lambda: room)
    monkeypatch.setattr(loading, "load", None)  # nothing is loaded
    code, out, err = command(*asked, 4096, "--kv-dtype", "float32")
    assert code == 2 and out == "" and err.count("\n") == 1
    assert "context=4096 does not fit" in err and "the largest context that fits is " in err
    code, _, err = command(*asked, 256, "--memory-fraction", 2)
    assert code == 2 and "memory_fraction=2.0 must be" in err


def test_text_that_nobody_reads_any_more_ends_the_process_quietly(tmp_path):
    source = DATA / "golden" / "q4_1.gguf"
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "openjet_jax.cli", "convert", source, "-o", tmp_path / "x"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=env, stdout=write, stderr=subprocess.PIPE, timeout=120)
    os.close(write)
    assert done.returncode == 1 and b"Traceback" not in done.stderr
