"""Tokenizer and training data of recall_mini, all generated, for train.py."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from kvbench.tasks.haystack import sentences
from kvbench.tasks.longeval_lines import INTRODUCTION, QUESTION
from kvbench.tasks.words import words_of

VOCAB_SIZE = 1984
EOS = "<|end|>"
PIECES = r" REGISTER_CONTENT is <(?=[0-9])|>\n|[0-9]{1,2}| ?[\p{L}_]+| ?[^\s\p{L}0-9_]|\s"
"""Pieces of text; a token lies within one: the fixed parts of a line, two digits, a word, a mark."""

COMMON_TEXT = (
    "the of and to in is that for it was on are as with his they at be this have from or by "
    "not but what all were when we there can an your which their said if do will each about "
    "how up out them then she many some so these would other into has more her two him see "
    "time could no make than first been its who now people my made over did down only way "
    "find use may best thing most secret code key city visit eat sit day place The In What "
    "Where Which A It Question Answer"
)
COMMON = tuple(COMMON_TEXT.split())
SYLLABLES_TEXT = (
    "ka lo mi ra ven dor tal is an cor bel fra sun nor wel tia go pa ster ham bri del os man "
    "cis co res lin gar"
)
SYLLABLES = tuple(SYLLABLES_TEXT.split())


def unsplit_pieces() -> list[str]:
    """Pieces that are one token each: the fixed parts of a line, pairs of digits, adjectives, words of
    the filler."""
    adjectives = words_of("adjective")
    text = [INTRODUCTION, QUESTION.format(key="fat-cat"), *(f" {word}" for word in COMMON)]
    rng = random.Random("recall_mini tokenizer")
    for _ in range(200):
        document = sentences(rng)
        text += [next(document) + " " + next(document) for _ in range(10)]
    split = pre_tokenizers.Split(Regex(PIECES), behavior="isolated")
    pieces = [" REGISTER_CONTENT is <", ">\n"]
    pieces += [f"{number:02d}" for number in range(100)]
    for part in text + [f" {word}" for word in adjectives]:
        pieces += [piece for piece, _ in split.pre_tokenize_str(part)]
    return list(dict.fromkeys(pieces))


def train_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE of `VOCAB_SIZE` tokens: those of nouns are learned, those of `unsplit_pieces` are
    added."""
    nouns = words_of("noun")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    added = [byte_level.pre_tokenize_str(piece)[0][0] for piece in unsplit_pieces()]
    added = [piece for piece in added if len(piece) > 1]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = byte_level
    size = VOCAB_SIZE - 1 - len(added)
    while True:
        trainer = trainers.BpeTrainer(
            vocab_size=size, initial_alphabet=alphabet, show_progress=False
        )
        learner.train_from_iterator([word for noun in nouns for word in noun.split("-")], trainer)
        model = json.loads(learner.to_str())["model"]
        learned = [piece for piece in model["vocab"] if piece not in added]
        missing = VOCAB_SIZE - 1 - len(added) - len(learned)
        if missing <= 0:
            break
        size += missing
    vocab = {piece: number for number, piece in enumerate([EOS, *learned, *added])}
    if len(vocab) != VOCAB_SIZE:
        raise RuntimeError(f"vocabulary has {len(vocab)} pieces, expected {VOCAB_SIZE}")
    merges = [tuple(pair) for pair in model["merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(PIECES), behavior="isolated"), byte_level]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=EOS,
        pad_token=EOS,
        clean_up_tokenization_spaces=False,
        model_max_length=16384,
    )


@dataclass
class Example:
    """A training text: its token ids, the loss weight of predicting each of them, and whether that
    prediction counts in the accuracy."""

    ids: list[int] = field(default_factory=list)
    weight: list[float] = field(default_factory=list)
    scored: list[bool] = field(default_factory=list)

    def add(self, ids: list[int], weight: float = 0.0, scored: bool = False) -> None:
        self.ids += ids
        self.weight += [weight] * len(ids)
        self.scored += [scored] * len(ids)


class Generator:
    """Training prompts as token ids, put together from words that were tokenised once.

    The pre-tokenizer never joins what is put together here, so the ids equal those of the whole text
    (tests/test_recall_mini.py checks it); but the space behind a needle that stands first is a token.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.tokenizer = tokenizer
        self.adjectives_text = words_of("adjective")
        self.nouns_text = words_of("noun")
        self.adjectives = [self.encode(f" {word}") for word in self.adjectives_text]
        self.nouns = [self.encode(word) for word in self.nouns_text]
        self.numbers = [self.encode(str(number)) for number in range(50001)]
        self.prefix = self.encode(INTRODUCTION)
        self.line = self.encode("line")
        self.dash = self.encode("-")
        self.content = self.encode(": REGISTER_CONTENT is <0")[:-1]
        self.close = self.encode(">\n")
        self.blank = self.encode("\n")
        self.ask = self.encode(
            "Now the record is over. Tell me what is the <REGISTER_CONTENT> in line"
        )
        self.need = self.encode("? I need the number. ")
        self.eos = [0]
        self.cache: dict[str, list[int]] = {}

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def encode_cached(self, text: str) -> list[int]:
        """Token ids of a short text that comes again and again."""
        if text not in self.cache:
            if len(self.cache) > 200_000:
                self.cache.clear()
            self.cache[text] = self.encode(text)
        return self.cache[text]

    def key(self, rng: random.Random) -> list[int]:
        return rng.choice(self.adjectives) + self.dash + rng.choice(self.nouns)

    def line_tokens(self, key: list[int], number: int) -> list[int]:
        return self.line + key + self.content + self.numbers[number] + self.close

    def shuffled_lines(self, rng: random.Random, lines: int, length: int, full: bool) -> Example:
        """So many lines again and again, in shuffled order, until there are `length` tokens; everything
        but the keys can be predicted.

        With `full` the lines are LongEval's; without, key and number follow each other directly.
        """
        example = Example()
        pairs: list[tuple[list[int], int]] = []
        first_tokens: set[int] = set()
        while len(pairs) < lines:
            if full:
                key = self.key(rng)
            else:
                key = rng.choice(self.adjectives)
                if key[0] in first_tokens:
                    continue
                first_tokens.add(key[0])
            pairs.append((key, rng.randint(1, 50000)))
        first = True
        while len(example.ids) < length:
            rng.shuffle(pairs)
            for key, number in pairs:
                if full:
                    example.add(self.line + key + self.content, 0.1)
                else:
                    example.add(key, 0.1)
                value = self.numbers[number]
                example.add(value, 0.1 if first else 1.0, not first)
                example.add(self.close, 0.1)
            first = False
        return example

    def record(self, rng: random.Random, lines: int, questions: int, repeats: int = 1) -> Example:
        """A LongEval record and several questions, each with its direct answer."""
        example = Example()
        entries = [(self.key(rng), rng.randint(1, 50000)) for _ in range(lines)]
        lines_to_write = entries * repeats
        if repeats > 1:
            rng.shuffle(lines_to_write)
        if lines > 24 or rng.random() < 0.3:
            example.add(self.prefix)
        for key, number in lines_to_write:
            example.add(self.line_tokens(key, number))
        for position in range(len(example.ids)):
            if rng.random() < 0.05:
                example.weight[position] = 0.1
        for key, number in rng.sample(entries, min(questions, len(entries))):
            example.add(self.blank + self.ask, 0.02)
            example.add(key + self.need, 0.02)
            example.add(self.numbers[number] + self.eos, 1.0, True)
        return example

    def name(self, rng: random.Random) -> str:
        return " ".join(
            "".join(rng.choices(SYLLABLES, k=rng.randint(1, 4))).capitalize()
            for _ in range(rng.choice((1, 1, 2)))
        )

    def needle(self, rng: random.Random) -> tuple[str, str, str]:
        """A random fact: its question, the beginning of its sentence, and the rest, which is asked
        for."""

        def noun() -> str:
            return rng.choice(self.nouns_text)

        def quality() -> str:
            return rng.choice(self.adjectives_text)

        name = self.name(rng)
        subject = rng.choice(
            (
                f"the best {noun()} to visit in {name}",
                f"the best thing to {rng.choice(COMMON)} in {name}",
                f"the {quality()} {noun()} of {name}",
                f"the secret {noun()} of {name}",
                f"the most {quality()} {noun()} to find in {name}",
                f"the {rng.choice(('key', 'code', 'number'))} of the {noun()} in {name}",
                f"the {quality()} thing that {name} made for the {noun()}",
            )
        )
        kind = rng.random()
        if kind < 0.2:
            rest = str(rng.randint(1, 10 ** rng.randint(2, 7)))
        elif kind < 0.45:
            rest = " ".join(
                rng.choice((noun(), quality(), rng.choice(COMMON), self.name(rng)))
                for _ in range(rng.randint(1, 12))
            )
        else:
            parts = [f"{rng.choice((noun(), 'see', 'find', 'eat', 'make'))} a {noun()}"]
            if rng.random() < 0.7:
                parts.append(f"and {rng.choice((noun(), 'sit', 'go', 'look'))} in {self.name(rng)}")
            if rng.random() < 0.7:
                place = rng.choice(("on", "in", "by", "with"))
                parts.append(f"{place} a {quality()} {rng.choice((noun(), 'day'))}")
            if rng.random() < 0.3:
                parts.append(
                    f"{rng.choice(('because', 'when', 'and'))} the {noun()} is {quality()}"
                )
            rest = " ".join(parts)
        return f"What is {subject}?", f"{subject[0].upper()}{subject[1:]} is", f" {rest}."

    def needles(self, rng: random.Random, length: int, count: int) -> Example:
        """Filler of about ``length`` tokens with ``count`` random needles, then their questions."""
        pieces: list[list[int]] = []
        total = 0
        document = sentences(rng, rng.choice((8, 16, 24, 24, 48, 200)))
        random_words = rng.random() < 0.15
        while total < length:
            if random_words:
                text = (
                    " ".join(
                        rng.choice((rng.choice(COMMON), rng.choice(self.adjectives_text)))
                        for _ in range(rng.randint(4, 20))
                    ).capitalize()
                    + "."
                )
                piece = self.encode(f" {text}" if pieces else text)
            else:
                text = next(document)
                piece = self.encode_cached(f" {text}" if pieces else text)
            pieces.append(piece)
            total += len(piece)
        facts = [self.needle(rng) for _ in range(count)]
        for _, start, rest in facts:
            place = rng.randint(0, len(pieces))
            text = start + rest
            piece = self.encode(text + " ") if place == 0 else self.encode(" " + text)
            pieces.insert(place, piece)
        example = Example()
        example.add([token for piece in pieces for token in piece])
        for position in range(len(example.ids)):
            if rng.random() < 0.05:
                example.weight[position] = 0.1
        rng.shuffle(facts)
        for question, start, rest in facts:
            before = f"\n\n{start}" if rng.random() < 0.3 else f"\n\n{question}\n{start}"
            example.add(self.encode(before), 0.02)
            example.add(self.encode(rest) + self.eos, 0.5, True)
        return example
