"""Keeping a text's own tokens where a conversation is rendered and tokenized anew."""

from collections.abc import Collection, Sequence

from openjet_jax.tokenizer import Tokenizer


def spliced(known: Sequence[int], rendered: Sequence[int], tokenizer: Tokenizer) -> list[int]:
    """Returns the rendered ids, with the known ones for every leading part of the same text.

    A model may cut a text into other tokens than the tokenizer does. Parts end at control tokens,
    which must be the same; the last known part may lack its own.

    Args:
      known: what a model read and wrote.
      rendered: a conversation that perhaps begins with the same text.
      tokenizer: of both.
    """
    control = frozenset(tokenizer.control_tokens.values())
    kept = rest = 0
    for ours, theirs in zip(_parts(known, control), _parts(rendered, control), strict=False):
        own = list(known[slice(*ours)])
        new = list(rendered[slice(*theirs)])
        if own and own[-1] not in control and new[-1] in control:
            new.pop()
        if own != new and _bytes(own, control, tokenizer) != _bytes(new, control, tokenizer):
            break
        kept, rest = kept + len(own), rest + len(new)
        if not new or new[-1] not in control:
            break
    return [*known[:kept], *rendered[rest:]]


def _parts(ids: Sequence[int], control: Collection[int]) -> list[tuple[int, int]]:
    """Returns (start, end) of each run of ids that a control token ends, and of the last run."""
    ends = [i + 1 for i, token in enumerate(ids) if token in control]
    if not ends or ends[-1] < len(ids):
        ends.append(len(ids))
    return list(zip([0, *ends[:-1]], ends, strict=True))


def _bytes(ids: Sequence[int], control: Collection[int], tokenizer: Tokenizer) -> list:
    """Returns the text's bytes, then the control token if there is one."""
    last = [ids[-1]] if ids and ids[-1] in control else []
    text = ids[: len(ids) - len(last)]
    return [b"".join(map(tokenizer.token_bytes, text)), *last]
