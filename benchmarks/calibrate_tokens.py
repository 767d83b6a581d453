"""`python -m benchmarks.calibrate_tokens [--corpus FOLDER] [--fit] [FILE ...]`: token estimates
against exact counts.

Prints a line for each text of the corpus, each generated sample and each file (exact, estimate,
error), then mean and worst. `--fit` also solves for new tables of costs, and needs scipy, which is
not a dependency.
"""

from __future__ import annotations

import argparse
from bisect import bisect_right
from collections import Counter
from pathlib import Path

from benchmarks.bench import corpus
from coatcheck import tokens
from tests.token_samples import corpus_texts, samples

SMALL = 2_048
AIM, BELOW, ABOVE = 0.06, 0.045, 0.06  # see `fit`
KEEP = 3e-5  # what it costs to move an entry of a table
STARTS = list(tokens._SCRIPTS)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="calibrate_tokens", description="Token estimates against exact counts."
    )
    parser.add_argument("--corpus", type=Path, default=corpus())
    parser.add_argument(
        "--fit", action="store_true", help="solve for new tables of costs (needs scipy)"
    )
    parser.add_argument("files", type=Path, nargs="*", help="more texts")
    options = parser.parse_args()

    real = (
        [(n, t) for n, t in corpus_texts(options.corpus) if len(t.encode()) > SMALL]
        if options.corpus
        else []
    )
    generated = list(samples().items())
    more = [(str(path), path.read_bytes().decode(errors="ignore")) for path in options.files]
    print(f"{'exact':>9} {'estimate':>9} {'error':>7}  text")
    for title, texts in (("corpus", real), ("samples", generated), ("files", more)):
        errors = [show(name, text) for name, text in texts]
        if errors:
            mean = sum(map(abs, errors)) / len(errors)
            low = sum(error < -0.05 for error in errors)
            print(f"{title}: {len(errors)} texts, mean error {mean:.1%}, lowest {min(errors):+.1%}, "
                  f"highest {max(errors):+.1%}, {low} more than 5% low\n")  # fmt: skip
    if options.fit:
        fit([text for _, text in real + generated + more])


def show(name: str, text: str) -> float:
    exact, estimate = tokens.exact(text), tokens.estimate(text)
    error = estimate / exact - 1
    print(f"{exact:9} {estimate:9} {error:+7.1%}  {name}")
    return error


def fit(texts: list[str]) -> None:
    """Print new tables of costs for `tokens.py`: those that minimize the errors on these texts.

    An estimate should be `AIM` high. One below `AIM - BELOW` or above `AIM + ABOVE` weighs more,
    the further it is off. What the texts say little about stays as it is.
    """
    import numpy  # type: ignore[import-not-found]  # not a dependency, like scipy
    from scipy.optimize import minimize  # type: ignore[import-untyped]

    now = [cost / tokens._PARTS for cost in tokens._WINDOW_COST + tokens._PAIR_COST] + list(
        tokens._SCRIPTS.values()
    )
    shares = numpy.array([numpy.array(counts(text)) / tokens.exact(text) for text in texts])
    prior, most = (
        numpy.array(now),
        [255 / tokens._PARTS] * 472 + [255 / tokens._SCRIPT_PARTS] * len(tokens._SCRIPTS),
    )
    scale = numpy.sqrt((shares**2).mean(0) + KEEP)

    def loss(scaled):  # type: ignore[no-untyped-def]
        costs = scaled / scale
        error = shares @ costs - 1 - AIM
        low, high, moved = (
            numpy.minimum(error + BELOW, 0),
            numpy.maximum(error - ABOVE, 0),
            costs - prior,
        )
        value = (
            error**2 + 8 * low**2 + 3 * high**2 + 600 * low**4 + 180 * high**4
        ).mean() + KEEP * (moved**2).sum()
        slope = (2 * error + 16 * low + 6 * high + 2400 * low**3 + 720 * high**3) / len(texts)
        return value, (shares.T @ slope + 2 * KEEP * moved) / scale

    bounds = [(0, limit * by) for limit, by in zip(most, scale, strict=True)]
    solved = (
        minimize(
            loss,
            prior * scale,
            jac=True,
            method="L-BFGS-B",
            bounds=bounds,
            options={"maxiter": 400},
        ).x
        / scale
    )
    print("_WINDOW_COST", bytes((solved[:216] * tokens._PARTS).round().astype(int).tolist()).hex())
    print("_PAIR_COST", bytes((solved[216:472] * tokens._PARTS).round().astype(int).tolist()).hex())
    print(
        "_SCRIPTS",
        {
            hex(at): round(float(rate), 2)
            for at, rate in zip(tokens._SCRIPTS, solved[472:], strict=True)
        },
    )


def counts(text: str) -> list[float]:
    """How often each entry of the three tables is looked up for a text: 216 windows, 256 pairs, and
    the scripts."""
    seen = tokens._encoded(text).translate(None, tokens._CONTINUATION)
    windows, pairs = Counter(tokens._windows(seen)), Counter(tokens._pairs(seen))
    scripts = Counter(
        bisect_right(STARTS, ord(character)) - 1 for character in text if ord(character) >= 0x80
    )
    return [
        *(windows[n] for n in range(216)),
        *(pairs[n] for n in range(256)),
        *(scripts[n] for n in range(len(STARTS))),
    ]


if __name__ == "__main__":
    main()
