"""GGUF to checkpoint. Import it as `openjet_jax.convert`.

The folder stands at the top level of the repository and is linked into the package, so that
importing it by its bare name (which any other `convert` could shadow) is an error.
"""

if __name__ == "convert":
    raise ImportError("import openjet_jax.convert, not convert: the folder is part of openjet_jax")
