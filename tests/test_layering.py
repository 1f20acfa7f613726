"""Who may import whom; the order is drawn in ARCHITECTURE.md."""

import ast
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PRODUCT = ("pallas_kernels", "openjet_jax", "convert")
PACKAGES = {"convert", "server"}  # inside openjet_jax
OUTSIDE = {"tests", "bench"}
# Inside openjet_jax a module imports only from groups before its own, or from its own.
ORDER = [
    {"config", "program_store", "dispatches", "interrupts", "startup"},
    {"device_memory", "described", "llama_logits"},
    {"settings"},
    {"filters", "weights", "placing"},
    {"qwen4exp_weights", "projections"},
    {"sampling", "draft_vocabulary", "checkpoint", "row_tables", "leaf_files", "stacks", "tiling"},
    {"state", "layers", "layer_loop", "head_choice"},
    {"deltanet", "attention_layers", "streams", "experts", "sparse_attention"},
    {"ngrams", "constraint"},
    {"qwen35", "qwen4exp"},
    {"architectures"},
    {"cycle", "prefill", "state_checkpoints"},
    {"compiled", "draft_list"},
    {"drafting_weights"},
    {"loading", "conversation", "memory"},
    {"answers", "checkpoint_store", "prefix_cache"},
    {"engine", "session_memory", "session_format", "token_splice"},
    {"session_file"},
    {"session"},
    {"scoring", "profiling", "chat_loop"},
    {"evaluation"},
    {"__init__"},
]
RANK = {module: rank for rank, group in enumerate(ORDER) for module in group}
MAY_CONVERT = {"cli", "loading"}


def imports(path: pathlib.Path) -> set[str]:
    """Returns the dotted names a file imports, `from a import b` as a.b, relative ones resolved."""
    package = path.relative_to(ROOT).parts[:-1]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else ()
            parts = [*base, *([node.module] if node.module else [])]
            found |= {".".join([*parts, alias.name]) for alias in node.names}
    return found


def engine_modules(names: set[str]) -> set[str]:
    """Returns the modules of openjet_jax among the names; what is no module is in `__init__`."""
    found = set()
    for name in names:
        package, _, rest = name.partition(".")
        if package == "openjet_jax":
            module = rest.split(".")[0]
            known = (ROOT / package / f"{module}.py").exists() or module in PACKAGES
            found.add(module if known else "__init__")
    return found


def modules() -> list[pathlib.Path]:
    return sorted(path for package in PRODUCT for path in (ROOT / package).glob("*.py"))


@pytest.mark.parametrize("path", modules(), ids=lambda path: f"{path.parent.name}.{path.stem}")
def test_a_module_imports_only_what_stands_below_it(path: pathlib.Path):
    names, package = imports(path), path.parent.name
    tops = {name.split(".")[0] for name in names}
    engine = engine_modules(names)
    assert not tops & OUTSIDE
    assert "convert" not in tops, "the folder is imported as openjet_jax.convert"
    if package == "pallas_kernels":
        assert not engine
    if package == "openjet_jax":
        assert "convert" not in engine or path.stem in MAY_CONVERT
        assert "cli" not in engine or path.stem == "__main__"
        rank = RANK.get(path.stem, len(ORDER))
        assert not {name for name in engine if RANK.get(name, -1) > rank}


def test_the_server_is_a_package_above_the_engine():
    for path in (ROOT / "openjet_jax" / "server").glob("*.py"):
        engine = engine_modules(imports(path))
        assert not engine & {"convert", "cli"}
    for path in (ROOT / "openjet_jax").glob("*.py"):
        assert "server" not in engine_modules(imports(path)) or path.stem == "cli"


def test_a_name_that_is_no_module_counts_as_the_public_api():
    path = ROOT / "openjet_jax" / "config.py"
    assert {"dataclasses", "math"} <= imports(path)
    assert engine_modules({"openjet_jax.config.ROWS", "jax.numpy"}) == {"config"}
    assert engine_modules({"openjet_jax", "openjet_jax.generate"}) == {"__init__"}
