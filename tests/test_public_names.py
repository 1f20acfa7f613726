"""`import openjet_jax as oj` gives every public name when it is asked for, and not before."""

import importlib
import subprocess
import sys
import types

import pytest

import openjet_jax as oj


def test_every_public_name_has_a_home_and_is_not_a_module():
    assert sorted(oj._HOMES) == sorted(oj.__all__)
    assert set(oj.__all__) <= set(dir(oj))
    for name in oj.__all__:
        home = importlib.import_module(f"openjet_jax.{oj._HOMES[name]}")
        assert getattr(oj, name) is getattr(home, name)
        assert not isinstance(getattr(oj, name), types.ModuleType)
    with pytest.raises(AttributeError, match="no attribute 'absent'"):
        getattr(oj, "absent")  # noqa: B009


def test_functions_named_like_their_module_stay_functions_in_any_order():
    code = (
        "import openjet_jax.cycle, openjet_jax.prefill, openjet_jax as oj, sys\n"
        "from openjet_jax import cycle, prefill\n"
        "assert oj.cycle is cycle is sys.modules['openjet_jax.cycle'].cycle\n"
        "assert oj.prefill is prefill is sys.modules['openjet_jax.prefill'].prefill\n"
        "from openjet_jax.cycle import cycles\n"
        "import importlib; importlib.reload(sys.modules['openjet_jax.prefill'])\n"
        "print(callable(oj.cycle), callable(oj.prefill))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "True"]


def test_importing_the_package_imports_no_jax():
    code = "import sys, openjet_jax as oj; assert 'jax' not in sys.modules; print(oj.Sampling())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("Sampling(")
