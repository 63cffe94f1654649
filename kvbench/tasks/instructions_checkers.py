"""Whether an answer follows an instruction that code can check.

Names and arguments are IFEval's (J. Zhou et al., arXiv 2311.07911) but for the last three; its reading
is the strict one: an empty answer follows nothing. lm-eval's checkers need two more packages, and data
that they fetch when they are imported. Not here: the language of a whole answer, rephrasing, sections,
two answers, a repeated request. A sentence ends at a full stop, question or exclamation mark.
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
"""By language, first words of a greeting."""


def words_of(answer: str) -> list[str]:
    """What letters and digits make."""
    return re.findall(r"\w+", answer)


def occurrences(word: str, answer: str) -> int:
    """How often a word stands in an answer, whatever its case."""
    return len(re.findall(rf"(?<!\w){re.escape(word)}(?!\w)", answer, re.IGNORECASE))


def compared(count: int, relation: str | None, bound: int) -> bool:
    """Whether a count is "less than" or "at least" a bound."""
    return count < bound if relation == "less than" else count >= bound


def keywords(answer: str, keywords: Sequence[str]) -> bool:
    """Whether every keyword occurs, as a part of a longer word too."""
    return all(keyword.lower() in answer.lower() for keyword in keywords)


def frequency(answer: str, keyword: str, frequency: int, relation: str | None = None) -> bool:
    """Whether a keyword occurs so often, as a part of a longer word too."""
    return compared(answer.lower().count(keyword.lower()), relation, frequency)


def forbidden(answer: str, forbidden_words: Sequence[str]) -> bool:
    """Whether no such word occurs."""
    return not any(occurrences(word, answer) for word in forbidden_words)


def letters(answer: str, letter: str, let_frequency: int, let_relation: str | None = None) -> bool:
    """Whether a letter occurs so often, whatever its case."""
    return compared(answer.lower().count(letter.lower()), let_relation, let_frequency)


def number_words(answer: str, num_words: int, relation: str | None = None) -> bool:
    """Whether there are so many words."""
    return compared(len(words_of(answer)), relation, num_words)


def number_sentences(answer: str, num_sentences: int, relation: str | None = None) -> bool:
    """Whether there are so many sentences."""
    sentences = [part for part in re.split(r"(?<=[.!?])\s+", answer.strip()) if words_of(part)]
    return compared(len(sentences), relation, num_sentences)


def number_paragraphs(answer: str, num_paragraphs: int) -> bool:
    """Whether there are exactly so many paragraphs between marks of three asterisks, none empty."""
    inside = re.sub(r"^\s*\*\*\*|\*\*\*\s*$", "", answer)
    paragraphs = inside.split("***")
    return all(map(str.strip, paragraphs)) and len(paragraphs) == num_paragraphs


def bullets(answer: str, num_bullets: int | None = None) -> bool:
    """Whether exactly so many lines, or any, begin with one asterisk or a hyphen."""
    count = len(re.findall(r"^\s*(?:\*[^*\n]|-)", answer, re.MULTILINE))
    return count > 0 if num_bullets is None else count == num_bullets


def highlights(answer: str, num_highlights: int) -> bool:
    """Whether at least so many parts stand between asterisks, single or double."""
    single, double = r"\*[^\n*]*\*", r"\*\*[^\n*]*\*\*"
    found = [part for kind in (single, double) for part in re.findall(kind, answer)]
    return sum(bool(part.strip("*").strip()) for part in found) >= num_highlights


def is_json(answer: str) -> bool:
    """Whether an answer is JSON, in a block of code or not."""
    text = re.sub(r"^\s*```(?:json)?|```\s*$", "", answer, flags=re.IGNORECASE)
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def has_postscript(answer: str, postscript_marker: str) -> bool:
    """Whether a postscript follows, with or without blanks in its mark."""
    mark = r"\s?".join(map(re.escape, postscript_marker.lower().replace(" ", "")))
    return re.search(mark, answer.lower()) is not None


def capital_words(answer: str, capital_frequency: int, capital_relation: str | None = None) -> bool:
    """Whether so many words are in capital letters."""
    return compared(sum(w.isupper() for w in words_of(answer)), capital_relation, capital_frequency)


def first_word(answer: str, first_words: Sequence[str]) -> bool:
    """Whether the first word is one of these, whatever its case."""
    return next(iter(words_of(answer)), "").lower() in {word.lower() for word in first_words}


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
"""By name, whether an answer follows the instruction; by keyword, its arguments."""


def follows(answer: str, check: str, arguments: Mapping[str, Any]) -> bool:
    """Whether an answer follows one instruction; an empty one follows none."""
    return bool(answer.strip()) and bool(CHECKS[check](answer, **arguments))
