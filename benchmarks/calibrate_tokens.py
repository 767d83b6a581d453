"""`python -m benchmarks.calibrate_tokens [--corpus FOLDER] [--fit]`: token estimates against exact counts, by hand.

Prints a line for each text of the corpus and each generated sample (exact, estimate, error), then mean and worst.
`--fit` also solves for new rates of the ASCII classes, keeps the others, and needs scipy, which is not a dependency.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.bench import corpus
from coatcheck import tokens
from tests.token_samples import corpus_texts, samples

SMALL = 2_048
LOWEST = 0.967  # of the exact count: the lowest estimate that --fit allows


def main() -> None:
    parser = argparse.ArgumentParser(prog="calibrate_tokens", description="Token estimates against exact counts.")
    parser.add_argument("--corpus", type=Path, default=corpus())
    parser.add_argument("--fit", action="store_true", help="solve for the rates of the ASCII classes (needs scipy)")
    options = parser.parse_args()

    real = [(n, t) for n, t in corpus_texts(options.corpus) if len(t.encode()) > SMALL] if options.corpus else []
    generated = list(samples().items())
    print(f"{'exact':>9} {'estimate':>9} {'error':>7}  text")
    for title, texts in (("corpus", real), ("samples", generated)):
        errors = [show(name, text) for name, text in texts]
        if errors:
            mean = sum(map(abs, errors)) / len(errors)
            low = sum(error < -0.05 for error in errors)
            print(f"{title}: {len(errors)} texts, mean error {mean:.1%}, lowest {min(errors):+.1%}, "
                  f"highest {max(errors):+.1%}, {low} more than 5% low\n")  # fmt: skip
    if options.fit:
        fit([text for _, text in real], [text for _, text in generated])


def show(name: str, text: str) -> float:
    exact, estimate = tokens.exact(text), tokens.estimate(text)
    error = estimate / exact - 1
    print(f"{exact:9} {estimate:9} {error:+7.1%}  {name}")
    return error


def fit(real: list[str], generated: list[str]) -> None:
    from scipy.optimize import linprog  # type: ignore[import-untyped]  # not a dependency

    names = [*tokens._BY_CLASS, *tokens._BY_LETTER]
    shares, needs, weights = [], [], []
    for text in real + generated:
        data, exact = tokens._encoded(text), tokens.exact(text)
        classes = data.translate(tokens._CLASS_OF, tokens._CONTINUATION)
        letters = data.translate(tokens._LETTER_OF, tokens._CONTINUATION)
        row = [classes.count(run.encode()) / exact for run in tokens._BY_CLASS]
        row += [letters.count(run.encode()) / exact for run in tokens._BY_LETTER]
        now = [*tokens._BY_CLASS.values(), *tokens._BY_LETTER.values()]
        fixed = tokens._weigh(text) / exact - sum(rate * share for rate, share in zip(now, row, strict=True))
        shares.append(row)
        needs.append(LOWEST - fixed)
        weights.append(1.0 if len(shares) <= len(real) else 0.05)
    cost = [sum(w * row[column] for w, row in zip(weights, shares, strict=True)) for column in range(len(names))]
    limits = [(0, 10 if len(name) == 24 else 2) for name in names]
    solved = linprog(cost, A_ub=[[-x for x in row] for row in shares], b_ub=[-n for n in needs], bounds=limits)
    if solved.x is None:
        raise SystemExit(f"no rates fit: {solved.message}")
    print({name: round(float(rate), 2) for name, rate in zip(names, solved.x, strict=True)})


if __name__ == "__main__":
    main()
