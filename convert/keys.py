"""Typed access to the metadata keys of one architecture.

Each key is read as what it must be, and the reader remembers which keys were asked for, so that the
others can be judged at the end: refused where they could change the arithmetic, else noted.
"""

import math

import numpy as np

from openjet_jax.convert.gguf import GGUFError, GGUFFile, Value, quoted

MAX_COUNT = 2**31 - 1
"""Largest size or count that a key may give."""

_NEUTRAL: dict[str, tuple[Value, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.sliding_window": (0,),
    "attn_logit_softcapping": (0.0,),
    "final_logit_softcapping": (0.0,),
    "embedding_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "logit_scale": (0.0, 1.0),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "expert_gating_func": (1,),
    "expert_group_count": (0, 1),
    "expert_shared_count": (0, 1),
    "expert_weights_norm": (True,),
    "expert_weights_scale": (0.0, 1.0),
    "rope.scale_linear": (0.0, 1.0),
    "rope.scaling.type": ("none",),
    "rope.scaling.attn_factor": (0.0, 1.0),
}
"""Keys that change the arithmetic, and the values at which they do not."""

_SCALING = "rope.scaling."
_NEUTRAL_FACTORS = (0.0, 1.0)
_ARITHMETIC = ("attention.", "rope.", "ssm.")
"""Groups of keys in which an unknown one is refused."""


class Keys:
    """The keys of one architecture in one file."""

    def __init__(self, file: GGUFFile, architecture: str):
        """Makes a reader for the keys that start with `architecture` and a full stop."""
        self.file = file
        self.prefix = f"{architecture}."
        self.asked: set[str] = set()
        self.notes: list[str] = []

    def error(self, name: str, message: str) -> GGUFError:
        """Returns the error about a key; `message` follows its name."""
        return GGUFError(f"{self.file.path}: {self.prefix}{name}{message}")

    def get(self, name: str) -> Value | None:
        """Returns the value, or None where the key is absent."""
        self.asked.add(name)
        return self.file.metadata.get(self.prefix + name)

    def count(self, name: str, default: int | None = None, least: int = 1) -> int:
        """Returns an integer in `least`..`MAX_COUNT`; an array of equal integers counts as one.

        Raises:
          GGUFError: it is missing without a default, of another type, or out of range.
        """
        value = self.get(name)
        if isinstance(value, np.ndarray) and value.dtype.kind in "iu" and value.size:
            if (value != value[0]).any():
                raise self.error(name, " differs between layers, which is not supported")
            value = int(value[0])
        if value is None:
            if default is None:
                raise self.error(name, " is missing")
            return default
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(name, f"={quoted(value)} has the wrong type: it must be an integer")
        if not least <= value <= MAX_COUNT:
            raise self.error(name, f"={value} must be in {least}..{MAX_COUNT}")
        return value

    def number(self, name: str) -> float:
        """Returns a finite number.

        Raises:
          GGUFError: it is missing, of another type, or not finite.
        """
        value = self.get(name)
        if value is None:
            raise self.error(name, " is missing")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(name, f"={quoted(value)} has the wrong type: it must be a number")
        if not math.isfinite(value):
            raise self.error(name, f"={value} must be finite")
        return float(value)

    def array(self, name: str, kinds: str) -> np.ndarray | None:
        """Returns an array of one of the NumPy `kinds`, or None where the key is absent.

        Raises:
          GGUFError: it is no array or one of other elements.
        """
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, np.ndarray) or value.dtype.kind not in kinds:
            raise self.error(name, f"={quoted(value)} has the wrong type: it must be an array")
        return value

    def judge_others(self) -> tuple[str, ...]:
        """Returns a note about every key of the architecture that nobody asked for.

        Raises:
          GGUFError: such a key changes the arithmetic, or stands in a group whose keys do.
        """
        others = {
            key.removeprefix(self.prefix): value
            for key, value in self.file.metadata.items()
            if key.startswith(self.prefix) and key.removeprefix(self.prefix) not in self.asked
        }
        scaled = others.get(f"{_SCALING}type") != "none"
        notes = []
        for name, value in others.items():
            if name in _NEUTRAL:
                self._require(name, value, _NEUTRAL[name])
            elif name == f"{_SCALING}factor" and scaled:
                self._require(name, value, _NEUTRAL_FACTORS)
            elif name.startswith(_SCALING) and not (scaled and name.startswith(f"{_SCALING}yarn_")):
                continue
            elif name.startswith(_ARITHMETIC):
                raise self.error(
                    quoted(name)[1:-1],
                    f"={quoted(value)} is not known here and could change the arithmetic",
                )
            else:
                notes.append(f"{self.prefix}{quoted(name)[1:-1]} is not known and is disregarded")
        return tuple(notes)

    def _require(self, name: str, value: Value, neutral: tuple[Value, ...]) -> None:
        if isinstance(value, np.ndarray | list) or value not in neutral:
            allowed = " or ".join(repr(v) for v in neutral)
            raise self.error(name, f"={quoted(value)} is not supported; only {allowed} is")
