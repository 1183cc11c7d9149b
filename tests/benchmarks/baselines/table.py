"""The hand-written programs, each beside the pair that computes the same."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.benchmarks.baselines import decoder, encoder, experts, mlp, recommender, vision, volumes
from tests.benchmarks.pairs import MORE_PAIRS, PAIRS, Pair

Program = Callable[..., tuple[Any, ...]]


@dataclass(frozen=True)
class Baseline:
    """Our model and layout, and the plain JAX program.

    Attributes:
        program: (mesh, size, kernels) -> what `jax.jit` returned, a state, a batch; see `parts`.
    """

    pair: Pair
    program: Program

    @property
    def against(self) -> str:
        """The program as `meshdsl compile --against` takes it."""
        return f"{Path(self.program.__code__.co_filename)}:{self.program.__name__}"


_PROGRAMS: tuple[Program, ...] = (
    mlp.mlp_fsdp_tensor,
    decoder.decoder_fsdp_sequence,
    decoder.llama_fsdp_sequence,
    decoder.shared_keys,
    decoder.long_context_fsdp,
    encoder.encoder_tensor,
    vision.vision,
    experts.experts,
    recommender.recommender,
    volumes.volumes,
)
_KNOWN = {**PAIRS, **MORE_PAIRS}
BASELINES: Mapping[str, Baseline] = {
    one.__name__: Baseline(_KNOWN[one.__name__], one) for one in _PROGRAMS
}
