"""Published times of training steps: what was run, on what, and how long a step took.

* MaxText, TPU v5e and v5p: `MaxText/configs/{v5e,v5p}/README.md` and the scripts beside it, at the
  commit that has both first (76bd53b0f, December 2023; the tables have not changed since). Only the
  512B script is that of e301755d4: the first one splits tensors over 16 chips, which no axis of a
  slice of 8x8x8 has. The models are those of `base.yml`: `get_individual_scales` doubles heads and
  hidden size, then the features, then the layers. A step's time follows from teraflops and
  `calculate_training_tflops`: 6 for each parameter and token, and causal attention.
* Megatron-LM, H100: `images/model_table.png` of README.md (d98e8a6); no recomputation. A step's
  time follows from teraflops and `num_floating_point_operations`, which counts all scores.
* torchtitan, A100 and 405B: `docs/performance.md` (4d88a8a, December 2024). H100: `benchmarks/
  llama3_h100_202412_torchtitan.md`, `asyncTP_llama3_h100_2025-06_torchtitan.md` (820504e). Rows are
  tokens per second and device. "selective op" keeps every other product and attention.

Left out: pipelines (Megatron from 70B on, torchtitan's 405B of 512 GPUs), 8 bits,
and what says too little of what was run.

What the programs have to do with ours:

* XLA gathers each weight by itself (`bucket_bytes=0`), and makes rings of collectives beside
  products of split tensors (`overlap`). `xla_tpu_enable_ag_backward_pipelining` of the v5p scripts
  gathers ahead (`prefetch`). Where one axis of theirs covers two directions of a slice, it is two.
* FSDP2 gathers each layer ahead, again in the backward pass, and reduces in float32. With split
  tensors there are sums in bfloat16 too. Ours have one dtype for all: bfloat16 then, as most bytes.
* Megatron overlaps gathers of weights and reductions of gradients with the layers, as FSDP in a
  loop does; it gathers once (`weights=keep`).
* torchtitan compiles where its tables say so. Elsewhere nothing is fused: its settings of that time
  have `compile = false`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import meshdsl as md
from meshdsl.layouts.hardware import Hardware, hardware
from meshdsl.layouts.mesh import Mesh
from meshdsl.models.configs import TransformerConfig

MIXED = md.Policy(params="float32", compute="bfloat16", output="float32")
TENSOR = "heads:{0}; d_ff:{0}; vocab:{0}"
FSDP2 = {"prefetch": True, "weights": "again", "bucket_bytes": 0}
MEGATRON = {**FSDP2, "weights": "keep", "overlap": True}
FLOAT32 = {"reduce_dtype": "float32"}
# `minimal` keeps the results of all products, but not of the attention kernel.
MINIMAL = "names:attention_query+attention_key+attention_value+attention_added+mlp_hidden+mlp_added"
SELECTIVE = "names:attention_query+attention_value+mlp_gate+attention_out+mlp_added"


@dataclass(frozen=True)
class Row:
    """One line of a published table.

    Attributes:
        seconds: of one step, as measured.
        remats: the policies of recomputing; of two, every other layer has each.
        fused: whether elementwise work is compiled.
    """

    table: str
    name: str
    hardware: Hardware
    config: TransformerConfig
    mesh: str
    layout: str
    batch: int
    length: int
    seconds: float
    remats: tuple[str, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    fused: bool = True

    @property
    def flops(self) -> float:
        """The model's operations in a step, of one device: without what is computed again."""
        return step_flops(self.config, self.batch, self.length) / Mesh.parse(self.mesh).size


def parameters(config: TransformerConfig) -> int:
    """Returns the parameters of products, among them one table of the vocabulary."""
    kv_heads, matrices = config.kv_heads_size, 3 if config.gated else 2
    attention = 2 * config.embed * (config.heads + kv_heads) * config.kv_size
    layer = attention + matrices * config.embed * config.d_ff_size
    return config.layers * layer + config.vocab * config.embed


def step_flops(
    config: TransformerConfig, batch: int, length: int, all_scores: bool = False
) -> float:
    """Returns the operations of the model in a step of all devices.

    Args:
        all_scores: whether hidden scores of attention are counted too.
    """
    scores = config.layers * config.heads * config.kv_size * length * (2 if all_scores else 1)
    return 6 * batch * length * (parameters(config) + scores)


# MaxText.


def maxtext(scale: int) -> TransformerConfig:
    """Returns the model of MaxText's `global_parameter_scale`."""
    cycles, rest = divmod(scale.bit_length() - 1, 3)
    wide = cycles + (rest > 0)
    return TransformerConfig(
        layers=16 << cycles,
        embed=2560 << (cycles + (rest > 1)),
        heads=8 << wide,
        kv=256,
        d_ff=8192 << wide,
        mlp="relu",
        vocab=32768,
        max_length=2048,
        policy=MIXED,
    )


# Billions of parameters, sequences of a chip, axes of a slice, teraflops with 1, 2, 4, ... slices.
_V5E: tuple[tuple[int, int, str, tuple[int, ...]], ...] = (
    (16, 6, "x:16,y:16", (120, 117, 117, 115, 111, 108)),
    (32, 4, "x:16,y:16", (132, 128, 126, 125, 123, 119)),
    (64, 2, "x:16,y:16", (118, 112, 110, 108, 105, 99)),
    (128, 1, "x:16,model:16", (110, 110, 108, 104, 100, 91)),
)
# The same; and whether the results of products are kept.
_V5P: tuple[tuple[int, int, str, tuple[int, ...], bool], ...] = (
    (32, 8, "x:4,y:4,model:4", (328, 319), True),
    (64, 4, "x:4,y:4,model:4", (323, 309), True),
    (128, 2, "x:4,y:4,model:8", (315, 305), True),
    (128, 2, "x:4,y:8,model:8", (316, 274), True),
    (256, 2, "x:8,y:8,model:8", (308, 289), True),
    (512, 2, "x:8,y:8,model:8", (294, 282), False),
    (1024, 2, "x:8,y:8,model:16", (254, 237), False),
    (1024, 2, "x:8,y:16,model:16", (297, 279), False),
)


def _maxtext_rows(
    kind: str, scale: int, each: int, axes: str, tflops: tuple[int, ...], minimal: bool
) -> Iterator[Row]:
    config, chips = maxtext(scale), Mesh.parse(axes).size
    split = [axis for axis in ("x", "y") if f"{axis}:" in axes]
    tensor = f"; {TENSOR.format('model')}; embed:model?" if "model" in axes else ""
    for power, speed in enumerate(tflops):
        slices = 2**power
        batch = each * chips * slices
        yield Row(
            table=f"MaxText {kind}",
            name=f"{scale}B on {slices} x {chips} chips",
            hardware=hardware(kind),
            config=config,
            mesh=f"slice@dcn:{slices},{axes}" if slices > 1 else axes,
            layout=f"batch:{'+'.join((['slice'] if slices > 1 else []) + split)}; "
            f"params/embed:{'+'.join(split)}{tensor}",
            batch=batch,
            length=2048,
            seconds=step_flops(config, each, 2048) / (speed * 1e12),
            remats=(MINIMAL if minimal else "full",),
            options={"bucket_bytes": 0, "overlap": bool(tensor), "prefetch": kind == "v5p"},
        )


# Megatron-LM: features, heads, layers, GPUs that split tensors, teraflops; 48 x 4 sequences.
_MEGATRON = (
    ("1.7B", 2048, 16, 24, 1, 408.8),
    ("7.1B", 4096, 32, 30, 2, 465.9),
    ("16B", 6144, 48, 32, 4, 489.1),
    ("32B", 7168, 56, 48, 8, 459.6),
)


def _megatron_rows() -> Iterator[Row]:
    for name, embed, heads, layers, split, tflops in _MEGATRON:
        config = TransformerConfig(
            layers=layers,
            embed=embed,
            heads=heads,
            vocab=131072,
            max_length=4096,
            norm="layer",
            positions="learned",
            bias=True,
            tied=False,
            policy=MIXED,
        )
        tensor = f"; {TENSOR.format('model')}; length:model?" if split > 1 else ""
        yield Row(
            table="Megatron-LM H100",
            name=f"{name} on {48 * split} GPUs",
            hardware=hardware("h100"),
            config=config,
            mesh=f"data:48,model:{split}" if split > 1 else "data:48",
            layout=f"batch:data; params/embed:data{tensor}",
            batch=192,
            length=4096,
            seconds=step_flops(config, 192, 4096, all_scores=True) / (48 * split * tflops * 1e12),
            remats=("none",),
            options=MEGATRON if tensor else {**MEGATRON, **FLOAT32},
        )


# torchtitan.


def _llama(layers: int, embed: int, heads: int, kv_heads: int, d_ff: int, vocab: int) -> Any:
    return TransformerConfig(
        layers=layers,
        embed=embed,
        heads=heads,
        kv_heads=kv_heads,
        d_ff=d_ff,
        vocab=vocab,
        max_length=8192,
        mlp="swiglu",
        tied=False,
        policy=MIXED,
    )


_LLAMAS: Mapping[str, tuple[TransformerConfig, int]] = {  # with the length of a sequence
    "Llama 3 8B": (_llama(32, 4096, 32, 8, 14336, 128256), 8192),
    "Llama 3 70B": (_llama(80, 8192, 64, 8, 28672, 128256), 8192),
    "Llama 3.1 405B": (_llama(126, 16384, 128, 8, 53248, 128256), 8192),
    "Llama 2 13B": (_llama(40, 5120, 40, 40, 13824, 32000), 4096),
    "Llama 2 70B": (_llama(80, 8192, 64, 8, 28672, 32000), 4096),
}
# 96 GB of HBM2e with 2.4 TB/s, and 500 W instead of 700. Power limits products (`gpu_tables`): they
# are as much slower as there is less of it. A GB300 was measured to multiply with 617 teraflops
# at 500 W, and 1,600 to 2,174 at 1,400 W (facebookexperimental/triton, pull request 2023).
_SHARE = 500 / 700
GRAND_TETON = replace(
    hardware("h100"),
    title="NVIDIA H100 with 96 GB of HBM2e at 500 W",
    flops={width: peak * _SHARE for width, peak in hardware("h100").flops.items()},
    memory_bytes=96 * 10**9,
    memory_bandwidth=2.4e12,
)
_EAGER, _COMPILED, _ASYNC = "eager", "compiled", "compiled, asynchronous tensor parallelism"
# Model, recomputing, sequences of a group, mesh, tokens per second and device, how it was run.
_A100: tuple[tuple[str, str, int, str, float, str], ...] = (
    ("Llama 3 8B", "selective layer", 1, "data:64", 2904, _EAGER),
    ("Llama 3 8B", "selective op", 1, "data:64", 2973, _EAGER),
    ("Llama 3 70B", "full", 1, "data:64", 331, _EAGER),
    ("Llama 2 13B", "no", 2, "data:64", 2162, _EAGER),
    ("Llama 2 13B", "selective layer", 2, "data:64", 1914, _EAGER),
    ("Llama 2 13B", "selective op", 2, "data:64", 1904, _EAGER),
    ("Llama 2 70B", "selective op", 1, "data:64", 355, _EAGER),
    ("Llama 2 70B", "full", 2, "data:64", 353, _EAGER),
)
_H100: tuple[tuple[str, str, int, str, float, str], ...] = (
    ("Llama 3 8B", "selective op", 2, "data:8", 5762, _EAGER),
    ("Llama 3 8B", "selective op", 2, "data:8", 6667, _COMPILED),
    ("Llama 3 8B", "selective op", 2, "data:128", 5605, _EAGER),
    ("Llama 3 8B", "selective op", 2, "data:128", 6514, _COMPILED),
    ("Llama 3 8B", "selective op", 12, "data:8,model:8", 4378, _COMPILED),
    ("Llama 3 8B", "selective op", 12, "data:8,model:8", 4809.4, _ASYNC),
    ("Llama 3 70B", "full", 16, "data:32,model:8", 597.3, _COMPILED),
    ("Llama 3 70B", "full", 16, "data:32,model:8", 652.4, _ASYNC),
    # Of 2024, in `docs/performance.md`: "Optimizations: None".
    ("Llama 3.1 405B", "full", 2, "data:16,model:8", 109, _EAGER),
)
_REMATS = {
    "no": ("none",),
    "full": ("full",),
    "selective op": (SELECTIVE,),
    "selective layer": ("none", "full"),
}


def _torchtitan_rows(
    kind: Hardware, rows: tuple[tuple[str, str, int, str, float, str], ...]
) -> Iterator[Row]:
    for model, recomputing, each, text, speed, way in rows:
        config, length = _LLAMAS[model]
        mesh = Mesh.parse(text)
        tensor = f"; {TENSOR.format('model')}; length:model?" if "model" in text else ""
        batch = each * mesh.sizes["data"]
        yield Row(
            table=f"torchtitan {kind.name.upper()}",
            name=f"{model} on {mesh.size} GPUs, recomputing: {recomputing}, {way}",
            hardware=kind,
            config=config,
            mesh=text,
            layout=f"batch:data; params/embed:data{tensor}",
            batch=batch,
            length=length,
            seconds=batch * length / mesh.size / speed,
            remats=_REMATS[recomputing],
            options={**FSDP2, "overlap": way == _ASYNC} | ({} if tensor else FLOAT32),
            fused=way != _EAGER,
        )


def all_rows() -> tuple[Row, ...]:
    """Returns all rows of all tables."""
    v5e = (row for line in _V5E for row in _maxtext_rows("v5e", *line, minimal=False))
    v5p = (row for line in _V5P for row in _maxtext_rows("v5p", *line))
    a100 = _torchtitan_rows(hardware("a100"), _A100)
    return (*v5e, *v5p, *_megatron_rows(), *a100, *_torchtitan_rows(GRAND_TETON, _H100))
