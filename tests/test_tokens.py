"""Token estimates compared with exact counts, and edge cases of the exact counter."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from coatcheck import tokens
from coatcheck.errors import MissingExtra
from tests.token_samples import corpus_files, corpus_texts, samples

ANY_TEXT = st.text(st.characters(exclude_categories=[]))  # lone surrogates too
SAMPLES = samples()


def size(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))


def error(text: str) -> float:
    known = tokens.exact(text)
    return (tokens.estimate(text) - known) / known


@pytest.mark.parametrize("kind", SAMPLES)
def test_an_estimate_is_at_most_5_percent_too_low(kind: str) -> None:
    assert error(SAMPLES[kind]) > -0.05


# Not the other languages: their samples contain only the most common words, which cost far less
# than real prose.
@pytest.mark.parametrize("kind", [kind for kind, text in SAMPLES.items() if text.isascii()])
def test_an_estimate_is_at_most_a_quarter_too_high(kind: str) -> None:
    assert error(SAMPLES[kind]) < 0.25


PUNCTUATION = {
    "banners": f"// {'=' * 74}\n// Type guards\n// {'=' * 74}\n\n" * 20,
    "events": '{"type":"block_delta","index":0,"delta":{"type":"text_delta","text":"word"}}\n' * 20,
}


@pytest.mark.parametrize("kind", PUNCTUATION)
def test_text_with_much_punctuation_is_estimated_closely(kind: str) -> None:
    assert -0.05 < error(PUNCTUATION[kind]) < 0.25


@pytest.mark.slow
def test_estimates_on_the_corpus_are_close_on_average_and_never_low_or_a_quarter_too_high(
    corpus: Path,
) -> None:
    errors = {
        name: error(text) for name, text in corpus_texts(corpus) if len(text.encode()) > 2_048
    }
    assert sum(map(abs, errors.values())) / len(errors) < 0.15
    assert {name: off for name, off in errors.items() if not -0.05 <= off <= 0.25} == {}


@pytest.mark.slow
def test_estimates_of_whole_files_of_the_corpus_are_never_a_quarter_too_high(corpus: Path) -> None:
    errors = {path.name: error(path.read_bytes().decode()) for path in corpus_files(corpus)}
    assert sum(map(abs, errors.values())) / len(errors) < 0.15
    assert {name: high for name, high in errors.items() if high > 0.25} == {}


@given(ANY_TEXT)
def test_an_estimate_never_fails_and_is_zero_only_for_the_empty_text(text: str) -> None:
    assert (tokens.estimate(text) == 0) == (text == "")


@given(ANY_TEXT, ANY_TEXT)
def test_two_texts_together_cost_little_more_than_separately(one: str, other: str) -> None:
    # The estimate of a text is capped at its bytes: a text at the cap may cost more beside a cheap
    # one.
    assume(all(tokens.estimate(text) < size(text) for text in (one, other) if text))
    assert tokens.estimate(one + other) <= tokens.estimate(one) + tokens.estimate(other) + 12


COSTLY = st.lists(
    st.text("xqZ1A ,\n\t\u2603\U0001f600\ud800\x00", min_size=1, max_size=8), max_size=30
).map("".join)


@given(ANY_TEXT | COSTLY, st.sampled_from([1, 3, 40_000]))
def test_an_estimate_never_exceeds_the_number_of_bytes(text: str, times: int) -> None:
    whole = text * times
    assert tokens.estimate(whole) <= size(whole)
    written = whole.encode("utf-8", "surrogatepass")
    assert tokens.roughly(written) <= len(written)


def test_twenty_repeated_letters_cost_less_than_a_token_each() -> None:
    assert tokens.exact("x" * 20) <= tokens.estimate("x" * 20) < 15


@pytest.mark.parametrize("text", ["x" * 20, "x" * 193_891, "\u2603" * 300_000 + "a" * 100_000])
def test_a_run_of_rare_letters_or_symbols_costs_at_most_a_token_per_byte(text: str) -> None:
    assert tokens.exact(text) <= tokens.estimate(text) <= size(text)


@pytest.mark.slow
def test_no_estimate_on_the_corpus_exceeds_the_number_of_bytes(corpus: Path) -> None:
    for path in corpus.rglob("*"):
        if path.is_file():
            assert tokens.estimate(path.read_bytes().decode()) <= path.stat().st_size


@pytest.mark.parametrize(
    "text", ["\x00", "\ud800", "\udc00\ud800", " " * 1_000_000, "\n" * 1_000_000, "a" * 1_000_000]
)
def test_odd_texts_are_not_underestimated(text: str) -> None:
    assert tokens.estimate(text) >= tokens.exact(text)


def test_the_estimate_from_samples_of_a_long_text_is_close_to_that_of_all_of_it() -> None:
    mixed = "".join(
        samples(seed, 30_000)[kind]
        for seed in range(4)
        for kind in ("english", "base64", "log", "csv")
    )
    assert len(mixed) > 262_144
    parts = [mixed[start : start + 100_000] for start in range(0, len(mixed), 100_000)]
    assert tokens.estimate(mixed) == pytest.approx(sum(map(tokens.estimate, parts)), rel=0.02)


def test_an_exact_count_reads_special_tokens_as_plain_text() -> None:
    assert tokens.exact("hello world") == 2
    assert tokens.exact("<|endoftext|>") == 7
    assert tokens.exact("") == 0


@given(ANY_TEXT)
def test_an_exact_count_never_fails(text: str) -> None:
    assert tokens.exact(text) >= (text != "")


@given(
    st.lists(
        st.sampled_from(["a", "Bc", "12", " ", "\n", "\r", "/", ".", "'s", "é", "你", "\t", "_"]),
        max_size=60,
    )
)
def test_an_exact_count_is_the_sum_of_the_counts_of_the_parts(pieces: list[str]) -> None:
    text = "".join(pieces)
    cuts = [match.start() for match in tokens._CUT.finditer(text)]
    parts = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert sum(map(tokens.exact, parts)) == tokens.exact(text)


@pytest.mark.parametrize("unit", [" ", "a", "=", "ab", "你"])
def test_an_exact_count_splits_one_long_run_into_bounded_parts(unit: str) -> None:
    text = unit * (900_000 // len(unit))
    assert max(map(len, tokens._parts(text))) <= 2 * tokens._PART
    assert tokens.exact(text) == pytest.approx(3 * tokens.exact(text[:300_000]), rel=0.01)


def test_without_the_extra_exact_says_what_to_install_and_count_estimates(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = SAMPLES["log"]
    assert tokens.count(text) == tokens.exact(text) != tokens.estimate(text)
    monkeypatch.setitem(sys.modules, "splintr", None)
    tokens._tokenizer.cache_clear()
    with pytest.raises(MissingExtra, match=r"coatcheck\[tokens\]"):
        tokens.exact(text)
    assert tokens.count(text) == tokens.estimate(text)


def test_estimate_exact_and_count_are_token_counters() -> None:
    counters: list[tokens.TokenCounter] = [tokens.estimate, tokens.exact, tokens.count]
    assert [counter("") for counter in counters] == [0, 0, 0]
