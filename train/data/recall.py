"""Recall tasks: rows that state records early and ask for them later. Rows are drawn as they are needed.

"mqar", multi-query associative recall (Arora et al. 2023, Zoology, arXiv:2312.04927):

    k_1 v_1 k_2 v_2 ... k_P v_P  [gap]  noise with each key once more, in any order; the answer to a key is its value

"induction", induction heads (Olsson et al. 2022, arXiv:2209.11895; with one record, the task of Gu and Dao 2023,
arXiv:2312.00752): trigger tokens appear at random places in noise, each followed by a token; at the end of the row the
triggers return, and the answer to each is the token that followed it.

"copy", selective copying (arXiv:2312.00752), answered token by token as in Jelassi et al. 2024 (arXiv:2402.01032):
symbols at random places among blanks; after a separator they are repeated in their order, each answer being the next
input.

Every question stands more than `gap` tokens after every record. A network of L layers that each see the w - 1 tokens
before reaches L (w - 1) tokens back, so that with a gap of at least that much no answer is within its reach.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from brl_jax.fields import Checked, Count, Length, Natural
from train.engine.fields import Free

Kind = Literal["mqar", "induction", "copy"]

# Zoology draws the places of the questions from a power law: the s-th possible place has weight s^(a - 1), a = 0.01.
_POWER = 0.01
# Tokens of "copy" that are not symbols.
_BLANK, _SEPARATOR, _SYMBOLS = range(3)


class Case(NamedTuple):
    """A kind of row: its number of tokens and of records."""

    length: int
    pairs: int


@dataclasses.dataclass(frozen=True)
class RecallDataConfig(Checked):
    """The rows."""

    kind: Kind = "mqar"
    """The task: multi-query associative recall, induction heads or selective copying."""
    vocabulary: Count = 256
    """Number of tokens."""
    length: tuple[Length, ...] = (128,)
    """Tokens of a row; several lengths take turns from batch to batch. One number, or one for each of `pairs`."""
    pairs: tuple[Count, ...] = (8,)
    """Records of a row (a key and its value, a trigger and its token, or a symbol); one number, or one for each
    length."""
    gap: Natural = 0
    """Every question is more than this many tokens after every record."""
    valid_rows: Count = 256
    """Rows of each length in an evaluation while training."""
    test_rows: Free[Count] = 512
    """Rows of each length and number of records that eval.recall measures on."""

    def __post_init__(self):
        if not self.length:
            raise ValueError("length must be one or more numbers of tokens, got none")
        if not self.pairs:
            raise ValueError("pairs must be one or more numbers of records, got none")
        if len(self.length) != 1 and len(self.pairs) not in (1, len(self.length)):
            raise ValueError(
                f"pairs must be one number or one for each of the {len(self.length)} lengths, got {len(self.pairs)}"
            )
        for case in self.cases:
            complaint = unsupported(self, case)
            if complaint is not None:
                raise ValueError(complaint)

    @property
    def cases(self) -> tuple[Case, ...]:
        """The kinds of rows, which take turns from batch to batch."""
        kinds = max(len(self.length), len(self.pairs))
        length, pairs = (x * kinds if len(x) == 1 else x for x in (self.length, self.pairs))
        return tuple(map(Case, length, pairs))

    def draw(self, case: Case, seed: Sequence[int], rows: int) -> dict[str, np.ndarray]:
        """See `draw_rows`."""
        return draw_rows(self, case, seed, rows)


def unsupported(config: RecallDataConfig, case: Case) -> str | None:
    """Why rows of this case cannot be drawn, naming the option; None if they can."""
    length, pairs = case
    if pairs < 1:
        return f"pairs must be at least 1, got {pairs}"
    records, questions, tokens = {
        "mqar": (2 * pairs, 2 * pairs - 1, 2 * pairs),
        "induction": (2 * pairs, 2 * pairs - 1, pairs + 2),
        "copy": (pairs, pairs, _SYMBOLS + 2),
    }[config.kind]
    least = records + config.gap + questions
    if length < least:
        return f"length must be at least {least} with {pairs} pairs and gap {config.gap}, got {length}"
    if config.vocabulary < tokens:
        return f"vocabulary must be at least {tokens} with {pairs} pairs, got {config.vocabulary}"
    return None


def num_answers(config: RecallDataConfig, pairs: int) -> int:
    """How many tokens an answer is drawn from, all alike; one over it is the accuracy of guessing."""
    firsts = {"mqar": config.vocabulary // 2, "induction": pairs, "copy": _SYMBOLS}
    return config.vocabulary - firsts[config.kind]


def blind_accuracy(config: RecallDataConfig, pairs: int) -> float:
    """The accuracy of a guesser that knows which answers a row has, and how often, but not which of them a question
    asks for, and names the most frequent one; in "copy", where earlier answers are inputs, of those still to come.

    Answers are drawn with replacement, so that it is more than one over the number of records.
    """
    possible = num_answers(config, pairs)
    left = range(1, pairs + 1) if config.kind == "copy" else (pairs,)
    return float(np.mean([_most_frequent(draws, possible) / draws for draws in left]))


def _most_frequent(draws: int, values: int) -> float:
    """How often the most frequent of equally likely values comes in some draws, on average."""
    from scipy.stats import poisson  # takes a while to load

    counts = np.arange(draws + 1)

    def at_most(limit: int) -> float:
        """The probability that no value comes more often: the counts of the draws are independent Poisson counts under
        the condition that they add up to the number of draws."""
        one, power = np.where(counts <= limit, poisson.pmf(counts, draws / values), 0), values
        result = np.where(counts == 0, 1.0, 0.0)
        while power:
            if power % 2:
                result = np.convolve(result, one)[: draws + 1]
            one, power = np.convolve(one, one)[: draws + 1], power // 2
        return result[draws] / poisson.pmf(draws, draws)

    return sum(1 - at_most(limit) for limit in range(draws))


def _shuffled(rng: np.random.Generator, rows: int, size: int) -> Int[np.ndarray, "R S"]:
    """The numbers 0..size-1 in a random order, another for each row."""
    return np.argsort(rng.random((rows, size)), axis=1)


def _draw_mqar(config: RecallDataConfig, case: Case, rng: np.random.Generator, rows: int) -> tuple[Any, ...]:
    """Keys are the first half of the vocabulary, values the second.

    Noise is any token but the row's own keys, so that with a small vocabulary too a key has one value.
    """
    length, pairs = case
    half = config.vocabulary // 2
    keys = _shuffled(rng, rows, half)
    values = rng.integers(half, config.vocabulary, (rows, pairs))
    noise = rng.integers(config.vocabulary - pairs, size=(rows, length))
    unused = np.take_along_axis(keys, np.minimum(noise + pairs, half - 1), axis=1)
    tokens = np.where(noise < half - pairs, unused, noise + pairs)
    tokens[:, 0 : 2 * pairs : 2] = keys[:, :pairs]
    tokens[:, 1 : 2 * pairs : 2] = values
    first = 2 * pairs + config.gap
    slots = np.arange((length - first + 1) // 2)
    # The largest of log-weights plus Gumbel noise are a draw without replacement.
    scores = (_POWER - 1) * np.log1p(slots) + rng.gumbel(size=(rows, len(slots)))
    chosen = np.sort(np.argsort(-scores, axis=1)[:, :pairs], axis=1)
    places = first + 2 * chosen
    asked = _shuffled(rng, rows, pairs)
    np.put_along_axis(tokens, places, np.take_along_axis(keys, asked, axis=1), axis=1)
    return tokens, places, np.take_along_axis(values, asked, axis=1)


def _draw_induction(
    config: RecallDataConfig, case: Case, rng: np.random.Generator, rows: int
) -> tuple[Any, ...]:
    """The triggers are the tokens 0..P-1; all others are noise or follow a trigger."""
    length, pairs = case
    tokens = rng.integers(pairs, config.vocabulary, (rows, length))
    first = length - 2 * pairs + 1
    places = 2 * np.sort(_shuffled(rng, rows, (first - config.gap) // 2)[:, :pairs], axis=1)
    triggers = _shuffled(rng, rows, pairs)
    np.put_along_axis(tokens, places, triggers, axis=1)
    followers = np.take_along_axis(tokens, places + 1, axis=1)
    asked = _shuffled(rng, rows, pairs)
    tokens[:, first::2] = np.take_along_axis(triggers, asked, axis=1)
    questions = np.broadcast_to(np.arange(first, length, 2), (rows, pairs))
    return tokens, questions, np.take_along_axis(followers, asked, axis=1)


def _draw_copy(config: RecallDataConfig, case: Case, rng: np.random.Generator, rows: int) -> tuple[Any, ...]:
    """Token 0 is the blank, 1 the separator; the others are symbols."""
    length, pairs = case
    symbols = rng.integers(_SYMBOLS, config.vocabulary, (rows, pairs))
    tokens = np.full((rows, length), _BLANK)
    first = length - pairs
    places = np.sort(_shuffled(rng, rows, first - config.gap)[:, :pairs], axis=1)
    np.put_along_axis(tokens, places, symbols, axis=1)
    tokens[:, first] = _SEPARATOR
    tokens[:, first + 1 :] = symbols[:, :-1]
    return tokens, np.broadcast_to(np.arange(first, length), (rows, pairs)), symbols


_DRAW: dict[Kind, Callable[..., tuple[Any, ...]]] = {
    "mqar": _draw_mqar,
    "induction": _draw_induction,
    "copy": _draw_copy,
}


def draw_rows(
    config: RecallDataConfig, case: Case, seed: Sequence[int], rows: int
) -> dict[str, Int[np.ndarray, "R _"] | Float[np.ndarray, "R P"]]:
    """Rows that depend on the seed and the case alone.

    Returns:
      tokens: (R, T) int32. places: (R, P) int32, ascending, where the questions are. targets: (R, P) int32, the
      answers, which a decoder predicts at these places. weights: (R, P) float32, all 1.
    """
    tokens, places, targets = _DRAW[config.kind](config, case, np.random.default_rng([*seed, *case]), rows)
    arrays = {"tokens": tokens, "places": places, "targets": targets}
    return {
        **{name: np.ascontiguousarray(array, np.int32) for name, array in arrays.items()},
        "weights": np.ones((rows, case.pairs), np.float32),
    }
