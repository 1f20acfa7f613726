"""One token at a time in NumPy: what `sampling` must compute, written from the definitions."""

import numpy as np


def threefry(key, counter):
    """Threefry-2x32 with 20 rounds on Python integers (Salmon et al. 2011)."""
    mask = 0xFFFFFFFF
    keys = [key[0], key[1], key[0] ^ key[1] ^ 0x1BD11BDA]
    x, y = (counter[0] + keys[0]) & mask, (counter[1] + keys[1]) & mask
    for block in range(5):
        for rotation in ((13, 15, 26, 6), (17, 29, 16, 24))[block % 2]:
            x = (x + y) & mask
            y = ((y << rotation | y >> (32 - rotation)) & mask) ^ x
        x = (x + keys[(block + 1) % 3]) & mask
        y = (y + keys[(block + 2) % 3] + block + 1) & mask
    return x, y


def noise(seed, position, token):
    bits, _ = threefry((seed & 0xFFFFFFFF, seed >> 32), (position, token))
    w = min((bits + 0.5) / 2**32, 1 - 2**-24)
    return -np.log(-np.log1p(-w))


def adjusted(logits, prompt, generated, sampling, vocab_used):
    """Logits after penalties and bias, in float64."""
    out = np.array(logits, np.float64)
    bias = dict(sampling.logit_bias)
    for token in range(len(out)):
        if token >= vocab_used:
            out[token] = -np.inf
            continue
        if token in prompt or token in generated:
            penalty = sampling.repetition_penalty
            out[token] = out[token] / penalty if out[token] > 0 else out[token] * penalty
        times = list(generated).count(token)
        out[token] -= sampling.frequency_penalty * times
        out[token] -= sampling.presence_penalty if times else 0
        out[token] += bias.get(token, 0.0)
    return out


def distribution(logits, sampling):
    """Probabilities after temperature, top-k, top-p and min-p, each on what the last one kept."""
    order = sorted(range(len(logits)), key=lambda t: (-logits[t], t))
    if sampling.temperature == 0:
        return np.eye(len(logits))[order[0]]
    p = np.exp((logits - logits[order[0]]) / sampling.temperature)
    if sampling.top_k:
        order = order[: sampling.top_k]
    if sampling.top_p < 1:
        total = p[order].sum()
        mass, kept = 0.0, []
        for token in order:
            kept.append(token)
            mass += p[token] / total
            if mass >= sampling.top_p:
                break
        order = kept
    kept = [t for t in order if p[t] >= sampling.min_p * p[order[0]]]
    out = np.zeros(len(logits))
    out[kept] = p[kept] / p[kept].sum()
    return out


def next_token(logits, prompt, generated, sampling, vocab_used):
    """The token that follows `generated`."""
    p = distribution(adjusted(logits, prompt, generated, sampling, vocab_used), sampling)
    position = len(prompt) + len(generated)
    tokens = [int(t) for t in np.flatnonzero(p)]
    return max(tokens, key=lambda t: np.log(p[t]) + noise(sampling.seed, position, t))
