"""Tokenizer and training data of recall_mini, all generated."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from wonderwords import RandomWord

from kvbench.tasks.haystack import sentences
from kvbench.tasks.longeval_lines import INTRODUCTION, QUESTION
from kvbench.tasks.words import words_of

VOCAB_SIZE = 1984
EOS = "<|end|>"
PIECES = r" REGISTER_CONTENT is <(?=[0-9])|>\n|[0-9]{1,2}| ?[\p{L}_]+| ?[^\s\p{L}0-9_]|\s"
"""What a token may not reach across: line furniture, groups of two digits, words, marks."""

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


def whole_words() -> list[str]:
    """Pieces that are never split: line furniture, digit pairs, adjectives, filler words."""
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
    """Byte-level BPE: noun pieces are learned, :func:`whole_words` are added unsplit."""
    nouns = words_of("noun")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    whole = [byte_level.pre_tokenize_str(word)[0][0] for word in whole_words()]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    whole = [word for word in whole if len(word) > 1]
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = byte_level
    size = VOCAB_SIZE - 1 - len(whole)
    while True:
        trainer = trainers.BpeTrainer(
            vocab_size=size, initial_alphabet=alphabet, show_progress=False
        )
        learner.train_from_iterator([word for noun in nouns for word in noun.split("-")], trainer)
        model = json.loads(learner.to_str())["model"]
        learned = [piece for piece in model["vocab"] if piece not in whole]
        missing = VOCAB_SIZE - 1 - len(whole) - len(learned)
        if missing <= 0:
            break
        size += missing
    vocab = {piece: number for number, piece in enumerate([EOS, *learned, *whole])}
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
class Sequence:
    """Token ids, weight of predicting each of them, and whether its prediction is scored."""

    ids: list[int]
    weight: list[float]
    scored: list[bool]

    def __init__(self) -> None:
        self.ids, self.weight, self.scored = [], [], []

    def add(self, ids: list[int], weight: float = 0.0, scored: bool = False) -> None:
        self.ids += ids
        self.weight += [weight] * len(ids)
        self.scored += [scored] * len(ids)


class Generator:
    """Training prompts as token ids, put together from words that were tokenised once.

    The pre-tokenizer never joins what is put together here, so the ids equal those of the whole
    text (a test checks it).
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.encode = lambda text: tokenizer.encode(text, add_special_tokens=False)
        adjectives, nouns = words_of("adjective"), words_of("noun")
        self.adjectives = [self.encode(f" {word}") for word in adjectives]
        self.nouns = [self.encode(word) for word in nouns]
        self.nouns_text = nouns
        self.adjectives_text = adjectives
        self.verbs_text = RandomWord().filter(include_categories=["verb"])
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

    def words(self, text: str) -> list[int]:
        """Ids of short text that comes again and again."""
        if text not in self.cache:
            if len(self.cache) > 200_000:
                self.cache.clear()
            self.cache[text] = self.encode(text)
        return self.cache[text]

    def key(self, rng: random.Random) -> list[int]:
        return rng.choice(self.adjectives) + self.dash + rng.choice(self.nouns)

    def plain_line(self, key: list[int], number: int) -> list[int]:
        return self.line + key + self.content + self.numbers[number] + self.close

    def shuffled_lines(self, rng: random.Random, lines: int, length: int, full: bool) -> Sequence:
        """A block of lines again and again in shuffled order: everything but keys is predictable.

        With ``full`` the lines are LongEval's; without, key and number follow each other directly.
        """
        sequence = Sequence()
        pairs: list[tuple[list[int], int]] = []
        firsts: set[int] = set()
        while len(pairs) < lines:
            if full:
                key = self.key(rng)
            else:
                key = rng.choice(self.adjectives)
                if key[0] in firsts:
                    continue
                firsts.add(key[0])
            pairs.append((key, rng.randint(1, 50000)))
        first = True
        while len(sequence.ids) < length:
            rng.shuffle(pairs)
            for key, number in pairs:
                if full:
                    sequence.add(self.line + key + self.content, 0.1)
                else:
                    sequence.add(key, 0.1)
                value = self.numbers[number]
                sequence.add(value, 0.1 if first else 1.0, not first)
                sequence.add(self.close, 0.1)
            first = False
        return sequence

    def record(self, rng: random.Random, lines: int, questions: int, repeats: int = 1) -> Sequence:
        """A LongEval record and several questions, each with its direct answer."""
        sequence = Sequence()
        entries = [(self.key(rng), rng.randint(1, 50000)) for _ in range(lines)]
        every = entries * repeats
        if repeats > 1:
            rng.shuffle(every)
        if lines > 24 or rng.random() < 0.3:
            sequence.add(self.prefix)
        for key, number in every:
            sequence.add(self.plain_line(key, number))
        for position in range(len(sequence.ids)):
            if rng.random() < 0.05:
                sequence.weight[position] = 0.1
        for key, number in rng.sample(entries, min(questions, len(entries))):
            sequence.add(self.blank + self.ask, 0.02)
            sequence.add(key + self.need, 0.02)
            sequence.add(self.numbers[number] + self.eos, 1.0, True)
        return sequence

    def name(self, rng: random.Random) -> str:
        """A made-up proper name of one or two words."""
        return " ".join(
            "".join(rng.choices(SYLLABLES, k=rng.randint(1, 4))).capitalize()
            for _ in range(rng.choice((1, 1, 2)))
        )

    def needle(self, rng: random.Random) -> tuple[str, str, str]:
        """A random fact: its question, how it begins, and the rest that must be found."""
        noun = lambda: rng.choice(self.nouns_text)  # noqa: E731
        quality = lambda: rng.choice(self.adjectives_text)  # noqa: E731
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

    def needles(self, rng: random.Random, length: int, count: int) -> Sequence:
        """Filler of about ``length`` tokens with ``count`` random needles, then their questions."""
        pieces: list[list[int]] = []
        total = 0
        document = sentences(rng, rng.choice((8, 16, 24, 24, 48, 200)))
        salad = rng.random() < 0.15
        while total < length:
            if salad:
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
                piece = self.words(f" {text}" if pieces else text)
            pieces.append(piece)
            total += len(piece)
        facts = [self.needle(rng) for _ in range(count)]
        for _, start, rest in facts:
            place = rng.randint(0, len(pieces))
            text = start + rest
            piece = self.encode(text + " ") if place == 0 else self.encode(" " + text)
            pieces.insert(place, piece)
        sequence = Sequence()
        sequence.add([token for piece in pieces for token in piece])
        for position in range(len(sequence.ids)):
            if rng.random() < 0.05:
                sequence.weight[position] = 0.1
        rng.shuffle(facts)
        for question, start, rest in facts:
            before = f"\n\n{start}" if rng.random() < 0.3 else f"\n\n{question}\n{start}"
            sequence.add(self.encode(before), 0.02)
            sequence.add(self.encode(rest) + self.eos, 0.5, True)
        return sequence

    def prose(self, rng: random.Random) -> Iterator[str]:
        """Sentences that look like written English to the tokenizer, without meaning.

        Common words, a document's own stock of rarer ones (inflected, some capitalised), numbers,
        quotation marks, short forms and paragraphs.
        """
        stock = [rng.choice(self.nouns_text) for _ in range(rng.randint(20, 200))]
        stock += [rng.choice(self.adjectives_text) for _ in range(len(stock) // 3)]
        stock += [rng.choice(self.verbs_text) for _ in range(len(stock) // 3)]
        names = [self.name(rng) for _ in range(rng.randint(1, 8))]
        short = ("don't", "it's", "you're", "I'd", "can't", "that's", "didn't", "they'll")
        while True:
            words: list[str] = []
            for _ in range(rng.randint(3, 30)):
                kind = rng.random()
                if kind < 0.55:
                    word = rng.choice(COMMON)
                elif kind < 0.9:
                    word = rng.choice(stock) + rng.choice(("", "", "", "s", "ed", "ing", "ly"))
                elif kind < 0.95:
                    word = rng.choice(names)
                elif kind < 0.98:
                    word = rng.choice(short)
                else:
                    word = str(rng.randint(0, 3000))
                if rng.random() < 0.02:
                    word = f'"{word}"'
                if rng.random() < 0.02:
                    word = f"({word})"
                words.append(word + ("," if rng.random() < 0.06 else ""))
            text = " ".join(words)
            text = text[0].upper() + text[1:].rstrip(",") + rng.choice("......?!")
            yield text + rng.choice(("",) * 8 + ("\n\n", "\n"))

    def free_needle(self, rng: random.Random, prose: Iterator[str]) -> tuple[str, str, str]:
        """A sentence of any kind, asked for by its first words."""
        while True:
            words = next(prose).strip().rstrip(".?!").split(" ")
            if len(words) >= 6:
                break
        words = words[:20]
        at = rng.randint(1, len(words) - 4)
        words[at:at] = [self.name(rng), rng.choice(self.nouns_text)]
        cut = rng.randint(at + 2, min(at + 6, len(words) - 1))
        return "", " ".join(words[:cut]), " " + " ".join(words[cut:]) + "."

    def prose_needles(self, rng: random.Random, length: int, count: int) -> Sequence:
        """A sequence like those of `needles`, in other filler and with needles of any kind."""
        prose = self.prose(rng)
        grammar = rng.random() < 0.25
        document = sentences(rng, rng.choice((8, 24, 48, 200)))
        pieces: list[str] = []
        total = 0.0
        while total < length:
            text = next(document) if grammar else next(prose)
            gap = "" if not pieces or pieces[-1].endswith("\n") else " "
            pieces.append(gap + text)
            total += len(self.encode(pieces[-1]))
        facts = []
        for _ in range(count):
            fact = self.free_needle(rng, prose) if rng.random() < 0.4 else self.needle(rng)
            facts.append(fact)
            place = rng.randint(0, len(pieces))
            text = fact[1] + fact[2]
            pieces.insert(place, text + " " if place == 0 else " " + text)
        sequence = Sequence()
        sequence.add(self.encode("".join(pieces)))
        for position in range(len(sequence.ids)):
            if rng.random() < 0.03:
                sequence.weight[position] = 0.1
        rng.shuffle(facts)
        for question, start, rest in facts:
            bare = not question or rng.random() < 0.3
            sequence.add(self.encode(f"\n\n{start}" if bare else f"\n\n{question}\n{start}"), 0.02)
            sequence.add(self.encode(rest) + self.eos, 0.5, True)
        return sequence
