"""Generation: a trained model writes text: `from meshdsl.generation import Sampling, Writer`.

A `Writer` has the compiled steps of a model (`programs`), for a mesh and a layout, and writes
tokens, chosen as `Sampling` says. `texts` makes text of them, up to a stop string or the end token.
`scoring` has the loss of a model on text.
"""

from meshdsl.generation.programs import Place
from meshdsl.generation.sampling import Sampling
from meshdsl.generation.scoring import Score, Scorer
from meshdsl.generation.texts import Text, write_texts
from meshdsl.generation.writer import Writer

__all__ = ["Place", "Sampling", "Score", "Scorer", "Text", "Writer", "write_texts"]
