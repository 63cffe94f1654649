"""Checks whether an answer follows an instruction.

Names and arguments of all but the last three checks are IFEval's (J. Zhou et al., arXiv 2311.07911).
As in its strict accuracy, an empty answer follows no instruction. lm-eval's own checkers are not
called, since they need two more packages, and data that they fetch when they are imported. IFEval's
checks of the language of a whole answer, rephrasing, sections, two answers and a repeated request are
not implemented. A sentence ends at a full stop, question mark or exclamation mark.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

GREETINGS: Mapping[str, tuple[str, ...]] = {
    "French": ("bonjour", "salut"),
    "German": ("hallo", "guten"),
    "Italian": ("ciao", "buongiorno"),
    "Spanish": ("hola", "buenos"),
}
"""The first words of a greeting, by language."""


def words_in(answer: str) -> list[str]:
    return re.findall(r"\w+", answer)


def occurrences(word: str, answer: str) -> int:
    return len(re.findall(rf"(?<!\w){re.escape(word)}(?!\w)", answer, re.IGNORECASE))


def compared(count: int, relation: str | None, bound: int) -> bool:
    """Whether a count is "less than" or "at least" a bound; without a relation, at least."""
    return count < bound if relation == "less than" else count >= bound


def keywords(answer: str, keywords: Sequence[str]) -> bool:
    """Perhaps inside a longer word, here and in `frequency`."""
    return all(keyword.lower() in answer.lower() for keyword in keywords)


def frequency(answer: str, keyword: str, frequency: int, relation: str | None = None) -> bool:
    return compared(answer.lower().count(keyword.lower()), relation, frequency)


def forbidden(answer: str, forbidden_words: Sequence[str]) -> bool:
    return not any(occurrences(word, answer) for word in forbidden_words)


def letters(answer: str, letter: str, let_frequency: int, let_relation: str | None = None) -> bool:
    return compared(answer.lower().count(letter.lower()), let_relation, let_frequency)


def number_words(answer: str, num_words: int, relation: str | None = None) -> bool:
    return compared(len(words_in(answer)), relation, num_words)


def number_sentences(answer: str, num_sentences: int, relation: str | None = None) -> bool:
    sentences = [part for part in re.split(r"(?<=[.!?])\s+", answer.strip()) if words_in(part)]
    return compared(len(sentences), relation, num_sentences)


def number_paragraphs(answer: str, num_paragraphs: int) -> bool:
    """Whether the answer has exactly this many paragraphs, separated by three asterisks, and none is
    empty."""
    inside = re.sub(r"^\s*\*\*\*|\*\*\*\s*$", "", answer)
    paragraphs = inside.split("***")
    return all(map(str.strip, paragraphs)) and len(paragraphs) == num_paragraphs


def bullets(answer: str, num_bullets: int | None = None) -> bool:
    """Whether exactly this many lines (or any, without a number) begin with one asterisk or a
    hyphen."""
    count = len(re.findall(r"^\s*(?:\*[^*\n]|-)", answer, re.MULTILINE))
    return count > 0 if num_bullets is None else count == num_bullets


def highlights(answer: str, num_highlights: int) -> bool:
    """Whether at least this many parts of the answer are between single or double asterisks."""
    single, double = r"\*[^\n*]*\*", r"\*\*[^\n*]*\*\*"
    parts = re.findall(single, answer) + re.findall(double, answer)
    return sum(bool(part.strip("*").strip()) for part in parts) >= num_highlights


def is_json(answer: str) -> bool:
    """Whether the answer is JSON, perhaps in a Markdown block of code."""
    text = re.sub(r"^\s*```(?:json)?|```\s*$", "", answer, flags=re.IGNORECASE)
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def has_postscript(answer: str, postscript_marker: str) -> bool:
    """Whether the answer has a postscript, with or without blanks in its marker."""
    letters_of_marker = postscript_marker.lower().replace(" ", "")
    pattern = r"\s?".join(map(re.escape, letters_of_marker))
    return re.search(pattern, answer.lower()) is not None


def capital_words(answer: str, capital_frequency: int, capital_relation: str | None = None) -> bool:
    """Whether as many words as asked are in capital letters. Words are those of nltk's tokenizer, of the
    whole answer; IFEval calls it for each sentence, whose full stop is then no part of a word."""
    from nltk.tokenize import NLTKWordTokenizer

    count = sum(word.isupper() for word in NLTKWordTokenizer().tokenize(answer))
    return compared(count, capital_relation, capital_frequency)


def first_word(answer: str, first_words: Sequence[str]) -> bool:
    """Whether the first word of the answer is one of `first_words`, whatever its case."""
    return next(iter(words_in(answer)), "").lower() in {word.lower() for word in first_words}


CHECKS: Mapping[str, Callable[..., bool]] = {
    "keywords:existence": keywords,
    "keywords:frequency": frequency,
    "keywords:forbidden_words": forbidden,
    "keywords:letter_frequency": letters,
    "length_constraints:number_words": number_words,
    "length_constraints:number_sentences": number_sentences,
    "length_constraints:number_paragraphs": number_paragraphs,
    "detectable_content:number_placeholders": lambda answer, num_placeholders: (
        len(re.findall(r"\[.*?\]", answer)) >= num_placeholders
    ),
    "detectable_content:postscript": has_postscript,
    "detectable_format:number_bullet_lists": bullets,
    "detectable_format:number_highlighted_sections": highlights,
    "detectable_format:title": lambda answer: re.search(r"<<[^\n]*\w[^\n]*>>", answer) is not None,
    "detectable_format:json_format": is_json,
    "change_case:english_capital": str.isupper,
    "change_case:english_lowercase": str.islower,
    "change_case:capital_word_frequency": capital_words,
    "startend:end_checker": lambda answer, end_phrase: (
        answer.strip().strip('"').lower().endswith(end_phrase.strip().lower())
    ),
    "startend:quotation": lambda answer: re.fullmatch(r'\s*".+"\s*', answer, re.DOTALL) is not None,
    "punctuation:no_comma": lambda answer: "," not in answer,
    "startend:first_word": first_word,
    "language:first_word": lambda answer, language: first_word(answer, GREETINGS[language]),
    "detectable_format:bullet_list": bullets,
}
"""The checks by name. Each takes the answer, and the arguments of the instruction by keyword."""


def follows(answer: str, check: str, arguments: Mapping[str, Any]) -> bool:
    """Whether an answer follows the instruction of a check; an empty answer follows none."""
    return bool(answer.strip()) and bool(CHECKS[check](answer, **arguments))
