"""Sampling that does not depend on how the text was produced: Gumbel noise keyed by (seed, question, position).

argmax(logits / T + Gumbel noise) is a draw from softmax(logits / T). With noise that is a function of the place in the text, and of
nothing else, the target writes the same text with and without speculation, in any batch and in any order; T = 0 is the same line
without the noise. Accepting a drafted child when it equals that draw has the law of EAGLE's rejection of deterministic candidates.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from elsi_lib.errors import ElsiError


def gumbel(seed: int, question: int | str, position: int, size: int) -> Tensor:
    """Standard Gumbel noise for one place in one text.

    Args:
        seed: of the run.
        question: name of the text; ``7`` and ``"7"`` are the same.
        position: of the token to be drawn, as the caller counts.
        size: entries V, the target's vocabulary.

    Returns:
        (V,) float64 on the CPU, finite. A counter-based generator (Philox, keyed by a hash of the three) gives raw 64-bit words,
        a stream that NumPy does not change between versions; a longer vector starts with the shorter one.

    Raises:
        ElsiError: size below 1.
    """
    if size < 1:
        raise ElsiError(f"noise of size {size}: the size of a vocabulary is at least 1")
    return torch.from_numpy(_from_words(_words(seed, question, position, size)))


def _words(seed: int, question: int | str, position: int, size: int) -> np.ndarray:
    place = json.dumps([int(seed), str(question), int(position)])
    key = int.from_bytes(hashlib.sha256(place.encode()).digest()[:16], "little")
    return np.random.Philox(key=key).random_raw(size)


def _from_words(words: np.ndarray) -> np.ndarray:
    uniform = ((words >> np.uint64(12)) + 0.5) * 2.0**-52  # in the open interval (0, 1): both logarithms are finite
    return -np.log(-np.log(uniform))


def check_temperature(temperature: float) -> float:
    """The temperature, or an ElsiError where it is negative, infinite or NaN."""
    if not 0 <= temperature < math.inf:  # NaN compares false
        raise ElsiError(f"temperature {temperature}: 0 takes the most likely token, a finite value above 0 samples")
    return float(temperature)


def pick(logits: Tensor, temperature: float, seed: int, question: int | str, position: int) -> int:
    """The token at one position of one text: a draw from softmax(logits / T), or the most likely one at T = 0.

    Args:
        logits: (V,) of the target; minus infinity excludes a token.
        temperature: T >= 0. At T = 0 the lowest id wins a tie, and the key does not matter.
        seed, question, position: the key, see :func:`gumbel`.

    Raises:
        ElsiError: T negative, infinite or NaN; logits that are no vector, hold NaN or plus infinity, or exclude every token.
    """
    temperature = check_temperature(temperature)
    if logits.ndim != 1 or not len(logits):
        raise ElsiError(f"logits of shape {tuple(logits.shape)}: one position's vector (V,) is expected")
    top = logits.max()  # NaN wins a maximum
    if not torch.isfinite(top):
        what = "exclude every token" if top == -math.inf else "hold NaN or infinity"
        raise ElsiError(f"logits of position {position} of question {question} {what}: load the target with dtype='float32'")
    if temperature == 0:
        return int(logits.argmax())
    noise = gumbel(seed, question, position, len(logits)).to(logits.device)
    return int(((logits.double() - top.double()) / temperature + noise).argmax())  # from the top: a small T cannot overflow


def pick_many(logits: Tensor, temperature: float, seed: int, questions: Sequence[int | str], positions: Sequence[int]) -> list[int]:
    """:func:`pick` for n places at once, with the same result and most logarithms saved.

    The noise of the most likely token sets a mark. To win, another token needs E = -log(u) of at most exp((logit - top) / T - mark),
    and 1 - u is at most E: one comparison in float32, with room for its rounding, leaves few tokens to work out exactly.

    Args:
        logits: (n, V).
        questions, positions: n each.

    Raises:
        ElsiError: as :func:`pick`; another number of questions or positions than rows.
    """
    temperature = check_temperature(temperature)
    if logits.ndim != 2 or not logits.numel() or not len(logits) == len(questions) == len(positions):
        raise ElsiError(
            f"logits of shape {tuple(logits.shape)} for {len(questions)} questions and {len(positions)} positions: one row for each"
        )
    top, first = logits.max(-1)
    if not bool(torch.isfinite(top).all()):
        row = int((~torch.isfinite(top)).nonzero()[0])
        pick(logits[row], temperature, seed, questions[row], positions[row])  # raises
    if temperature == 0:
        return first.tolist()
    logits, top = logits.detach().cpu(), top.cpu()
    room = (logits.float() - top.float()[:, None]).div_(temperature).exp_().numpy()
    picks = []
    for row, (question, position, best) in enumerate(zip(questions, positions, first.tolist(), strict=True)):
        words = _words(seed, question, position, logits.shape[1])
        mark = _from_words(words[best : best + 1])[0]
        high = words.astype("<u8", copy=False).view("<u4")[1::2].astype(np.float32)  # 2^32 u, to 2^8
        few = np.flatnonzero(room[row] * np.float32(1.001 * 2.0**32 * math.exp(-mark)) + high >= np.float32(2.0**32 - 2.0**10))
        scores = (logits[row, few].double() - top[row].double()) / temperature + torch.from_numpy(_from_words(words[few]))
        picks.append(int(few[scores.argmax()]))
    return picks
