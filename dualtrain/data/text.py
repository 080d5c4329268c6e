"""Masked language modelling on plain text.

Tokens are words and punctuation marks; the vocabulary holds the most frequent ones of the training part. The choice of a
sample's masked tokens is a function of (seed, sample).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import torch

from dualtrain.data import draws
from dualtrain.data.options import Options
from dualtrain.data.sources import IGNORED, Batch, Source, Task, Tensors
from dualtrain.errors import UserError
from dualtrain.files import read_text

SPECIAL = ("[PAD]", "[UNK]", "[MASK]", "[CLS]")
PAD, UNK, MASK, CLS = range(4)
# The fraction of tokens that are chosen for prediction. Of the chosen tokens, [MASK] replaces 80 %, a random token 10 %.
CHOSEN, MASKED, REPLACED = 0.15, 0.8, 0.1


class MaskedText(Source):
    """Token sequences (N, t), int64, of a vocabulary of ``size`` tokens.

    With a ``seed``, each pass masks the same tokens, as evaluation needs; with ``None``, the seed of each batch is used.
    """

    def __init__(self, tokens: torch.Tensor, size: int, seed: int | None = None) -> None:
        self._tokens = tokens
        self._size = size
        self._seed = seed

    stored = True

    def __len__(self) -> int:
        return len(self._tokens)

    def contents(self, numbers: Sequence[int]) -> Iterator[torch.Tensor]:
        """Yield the tokens without masking."""
        return (self._tokens[number] for number in numbers)

    def stream(self, batches: Iterable[Batch], device: torch.device) -> Iterator[Tensors]:
        """Yield masked tokens and targets, int64 (n, t) each."""
        self._tokens = self._tokens.to(device)
        for batch in batches:
            numbers = batch.numbers.to(device)
            seed = batch.seed if self._seed is None else self._seed
            rows = self._tokens.index_select(0, numbers)  # copies whole rows, and so is faster than indexing
            yield mask(rows, draws.bits(seed, numbers, 3 * self._tokens.shape[1]), self._size)


def mask(tokens: torch.Tensor, random: torch.Tensor, size: int) -> Tensors:
    """Choose some of ``tokens`` (n, t) for prediction, and mask or replace most of them. Return inputs and targets.

    ``PAD`` and ``CLS`` are never chosen. Targets are ``IGNORED`` for tokens that were not chosen.
    ``random``, int64 (n, 3t), holds random bits for the choice, the kind of replacement and the random token.
    """
    choice, way, other = random.chunk(3, 1)
    chosen = (draws.uniform(choice) < CHOSEN) & (tokens != PAD) & (tokens != CLS)
    way = draws.uniform(way)
    inputs = torch.where(chosen & (way < MASKED), MASK, tokens)
    replaced = chosen & (way >= MASKED) & (way < MASKED + REPLACED)
    inputs = torch.where(replaced, len(SPECIAL) + draws.below(other, size - len(SPECIAL)), inputs)
    return inputs, torch.where(chosen, tokens, IGNORED)


def load_text(options: Options) -> Task:
    """Load a text and split it into sequences; a random tenth of them, with a fixed seed, is for validation.

    Without ``text_file``, the text is Python's own help topics.

    Raises:
        UserError: the file cannot be read or is too short, or the sequence length or the vocabulary is too small.
    """
    words = re.findall(r"\w+|[^\w\s]", _text(options.text_file).lower())
    length = options.sequence_length
    if length < 2:
        raise UserError(f"--sequence-length must be 2 or more (for [CLS] and one token), not {length}")
    sequences = [words[start : start + length - 1] for start in range(0, len(words), length - 1)]
    if len(sequences) < 10:
        where = f" in {options.text_file!r}" if options.text_file else ""
        raise UserError(
            f"the text{where} has {len(words)} tokens, which make {len(sequences)} sequences, and 10 are needed: give a "
            "longer --text-file, or a shorter --sequence-length"
        )
    order = torch.randperm(len(sequences), generator=torch.Generator().manual_seed(0)).tolist()
    val, train = order[: len(order) // 10], order[len(order) // 10 :]
    vocabulary = _vocabulary([sequences[number] for number in train], options.vocabulary)
    parts = [_numbered([sequences[number] for number in part], vocabulary, length) for part in (train, val)]
    size = len(vocabulary) + len(SPECIAL)
    return Task(MaskedText(parts[0], size), MaskedText(parts[1], size, seed=0), (length,), size, "tokens")


def _text(file: str | None) -> str:
    if file is None:
        from pydoc_data.topics import topics

        return "\n".join(topics[name] for name in sorted(topics))
    try:
        return read_text(file, "utf-8-sig")  # without the byte order mark of Windows, which is not a token
    except UnicodeDecodeError as error:
        raise UserError(f"--text-file {file!r} is not UTF-8 (byte {error.start}): convert it") from error
    except OSError as error:
        raise UserError(
            f"--text-file {file!r} cannot be read ({error.strerror}): give a file that exists on every host"
        ) from error


def _vocabulary(sequences: list[list[str]], size: int) -> dict[str, int]:
    """Assign ids to the most frequent words, after the special tokens; equally frequent words in alphabetical order.

    Raises:
        UserError: a vocabulary of ``size`` tokens has no room for words.
    """
    room = size - len(SPECIAL)
    if room < 1:
        raise UserError(f"--vocabulary must be above {len(SPECIAL)} (the number of special tokens), not {size}")
    counts = Counter(word for sequence in sequences for word in sequence)
    ranked = sorted(counts, key=lambda word: (-counts[word], word))
    return {word: number for number, word in enumerate(ranked[:room], start=len(SPECIAL))}


def _numbered(sequences: list[list[str]], vocabulary: dict[str, int], length: int) -> torch.Tensor:
    rows = [[CLS, *(vocabulary.get(word, UNK) for word in words)] for words in sequences]
    return torch.tensor([row + [PAD] * (length - len(row)) for row in rows], dtype=torch.int64)
