"""A profiler trace of generation: warmed up first, and short enough to read."""

from pathlib import Path

import jax

from openjet_jax.engine import Generation, generate
from openjet_jax.loading import Model

MOST_TOKENS = 64
"""Tokens a trace covers at most: a longer one tells no more and is slow to open."""


def profiled(model: Model, directory: Path, settings: dict) -> Generation:
    """Returns a generation, and leaves a trace of it in a directory.

    Programs are made ready and run once before the trace starts. Scopes in the trace carry the
    names of the source: verify, head, sample, commit, draft, prefill, deltanet, attention.

    Args:
      model: from `load`.
      directory: where the trace goes; open it in TensorBoard or Perfetto.
      settings: arguments of `generate`; `max_new_tokens` is cut to `MOST_TOKENS`.
    """
    settings = settings | {"max_new_tokens": min(settings["max_new_tokens"], MOST_TOKENS)}
    generate(model, **settings)
    # Every call of a Python function is not told: there are thousands, and telling takes longer.
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with jax.profiler.trace(str(directory), profiler_options=options):
        return generate(model, **settings)
