"""Generation: a trained model writes text: `from meshdsl.generation import Sampling, Writer`.

A `Writer` has the compiled steps of a model (`programs`), for a mesh and a layout, and writes
tokens, chosen as `Sampling` says. A `RowWriter` does so for texts that come and go.
A `Searcher` looks for the likeliest text with beams.
`texts` makes text of tokens, up to a stop string or the end token.
`scoring` has the loss of a model on text, `likelihood` that of each token after other text.
"""

from meshdsl.generation.beams import Hypothesis, Searcher, search_texts
from meshdsl.generation.continuous import ReadPrompt, RowWriter
from meshdsl.generation.likelihood import Likelihood, LikelihoodScorer
from meshdsl.generation.programs import Place
from meshdsl.generation.sampling import Sampling
from meshdsl.generation.scoring import Score, Scorer
from meshdsl.generation.texts import Text, write_texts
from meshdsl.generation.writer import Writer

__all__ = [
    "Hypothesis",
    "Likelihood",
    "LikelihoodScorer",
    "Place",
    "ReadPrompt",
    "RowWriter",
    "Sampling",
    "Score",
    "Scorer",
    "Searcher",
    "Text",
    "Writer",
    "search_texts",
    "write_texts",
]
