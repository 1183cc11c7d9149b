"""The (model, mesh, layout) pairs on which meshdsl is measured against GSPMD.

Every pair is a whole training step: forward, backward and update. It has two sizes: "tpu", of
realistic widths for 64 TPU v5p chips, and "small", which eight virtual CPU devices can run. Layers
are scanned, so that neither lowering nor compiling depends on how many there are.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import meshdsl as md
from meshdsl import nn, optim
from meshdsl.layouts.hardware import hardware as find_hardware
from meshdsl.lowering.options import Options
from meshdsl.models import Model
from meshdsl.models.bert import BertConfig, bert
from meshdsl.models.configs import TransformerConfig
from meshdsl.models.mlp import MLPConfig, classifier
from meshdsl.models.transformer import transformer
from meshdsl.models.unet3d import UNet3DConfig, unet3d
from meshdsl.running.jit import Jitted
from meshdsl.tensors.named_array import Spec
from meshdsl.training.state import TrainState, create, spec_of
from meshdsl.training.step import make_train_step
from tests.benchmarks.baseline_models import RecommenderSizes, recommender, vision

Size = Literal["tpu", "small"]
TOPOLOGY = "v5p:4x4x4"  # the chips of size "tpu"
MIXED = md.Policy(params="float32", compute="bfloat16", output="float32")


@dataclass(frozen=True)
class Pair:
    """One training step with its mesh and layout.

    Attributes:
        model: a name in `MODELS`.
        meshes: the mesh of 64 chips, and that of eight virtual devices.
        optimizer: a name in `OPTIMIZERS`.
    """

    name: str
    model: str
    meshes: tuple[str, str]
    layout: str
    optimizer: str = "adam"

    def mesh(self, size: Size) -> str:
        """Returns the mesh of a size."""
        return self.meshes[size == "small"]


def jitted(
    pair: Pair,
    size: Size = "tpu",
    backend: str = "jax",
    keep: bool = False,
    hardware: str | None = None,
) -> tuple[Jitted, tuple[Any, ...]]:
    """Returns the training step of a pair and the specs of its arguments (a state, a batch).

    `jitted(PAIRS["decoder_fsdp"], "small", "jax_auto")`.

    Args:
        keep: whether what has been moved is kept, as far as the memory of a chip goes: gathered
            weights, and in models of `meshdsl.models` the results of collectives that would be
            computed again. XLA's partitioner has no such choice.
        hardware: what lowering decides by the time of.
    """
    model, optimizer = MODELS[pair.model](size), OPTIMIZERS[pair.optimizer]
    options = Options(memory=find_hardware("v5p").memory_bytes if keep else None, hardware=hardware)
    if keep and hasattr(model.config, "remat"):
        model = model.with_overrides("remat=keep_collectives")
    step = make_train_step(model.loss, optimizer)
    state = spec_of(create(model.init, optimizer))
    batch = model.batch_spec(model.batch_size, model.length)
    mesh, layout = pair.mesh(size), pair.layout
    function = md.jit(step, mesh, layout, backend, donate="state", options=options)
    return function, (state, batch)


def initial(pair: Pair, size: Size = "small", backend: str = "jax") -> TrainState:
    """Returns the state that training of a pair starts from, on the devices of its mesh."""
    model, optimizer = MODELS[pair.model](size), OPTIMIZERS[pair.optimizer]
    make = create(model.init, optimizer)

    def init(key: md.Tensor) -> dict[str, TrainState]:
        return {"state": make(key)}  # with the paths of the step's state

    return md.jit(init, pair.mesh(size), pair.layout, backend)(md.random.key(0))["state"]


# Models: one of each size.


class Residual(md.Module):
    """A stack of MLPs, each of which adds to the stream; wide, and without attention."""

    scale: md.Tensor  # layers, embed
    w_in: md.Tensor  # layers, embed, d_ff
    w_out: md.Tensor  # layers, d_ff, embed


def residual(layers: int, embed: int, d_ff: int, batch: int, policy: md.Policy) -> Model:
    """Returns a stack of MLPs that learns [batch, embed] from [batch, embed]."""
    of_layers, of_embed, of_ff = md.dims(layers=layers, embed=embed, d_ff=d_ff)

    def init(key: md.Tensor) -> Residual:
        one, two = md.random.split(key, 2)
        return Residual(
            scale=md.ones([of_layers, of_embed], policy.params),
            w_in=nn.initializers.fan_in(of_embed)(one, [of_layers, of_embed, of_ff], policy.params),
            w_out=nn.initializers.fan_in(of_ff)(two, [of_layers, of_ff, of_embed], policy.params),
        )

    def layer(x: md.Tensor, w: Residual) -> tuple[md.Tensor, None]:
        w = policy.to_compute(w)
        h = md.gelu(md.einsum(nn.rms_norm(x, "embed", w.scale), w.w_in, over="embed"))
        return x + md.einsum(h, w.w_out, over="d_ff"), None

    def loss(params: Residual, batch: Mapping[str, md.Tensor]) -> md.Tensor:
        x = policy.to_compute(batch["x"])
        x, _ = md.scan(md.checkpoint(layer), x, params, dim="layers")
        return md.mean(md.square(policy.to_output(x) - batch["y"]))

    def batch_spec(batch_size: int, length: int = 1) -> dict[str, Spec]:
        dims = [md.Dimension("batch", batch_size), of_embed]
        return {"x": md.spec(dims), "y": md.spec(dims)}

    return Model("residual", init, loss, batch, 1, batch_spec)


def _residual(size: Size) -> Model:
    if size == "tpu":
        return residual(8, 4096, 16384, 8192, MIXED)
    return residual(2, 256, 1024, 256, md.Policy())


def _wide(size: Size) -> Model:
    """Square layers without a narrow stream: the widest that one dim makes."""
    if size == "tpu":
        model = classifier(MLPConfig(features=4096, hidden=8192, layers=6, classes=1024))
        return replace(model, batch_size=8192)
    model = classifier(MLPConfig(features=256, hidden=512, layers=3, classes=64))
    return replace(model, batch_size=256)


def _decoder(size: Size, **changes: Any) -> Model:
    if size == "tpu":
        sizes: dict[str, Any] = dict(layers=4, embed=4096, heads=32, vocab=32768, max_length=2048)
        batch, length = 64, 2048
    else:
        sizes = dict(layers=2, embed=256, heads=8, vocab=512, max_length=128)
        batch, length = 16, 128
    policy = MIXED if size == "tpu" else md.Policy()
    batch, length = changes.pop("batch", batch), changes.pop("length", length)
    config = TransformerConfig(**{**sizes, "remat": "full", "policy": policy, **changes})
    return transformer("decoder", config, batch, length)


def _long(size: Size) -> Model:
    """The decoder with fewer and longer sequences."""
    if size == "tpu":
        return _decoder(size, batch=16, length=8192, max_length=8192)
    return _decoder(size, batch=4, length=512, max_length=512)


def _llama(size: Size) -> Model:
    """Grouped queries, a gated MLP, a table of its own for the logits."""
    kinds: dict[str, Any] = dict(mlp="swiglu", tied=False)
    if size == "tpu":
        return _decoder(size, embed=8192, heads=64, kv_heads=8, d_ff=28672, **kinds)
    return _decoder(size, kv_heads=4, d_ff=768, **kinds)


def _shared_keys(size: Size) -> Model:
    """The llama with fewer heads of keys: the queries of one head may be split as well."""
    kinds: dict[str, Any] = dict(mlp="swiglu", tied=False)
    if size == "tpu":
        return _decoder(size, embed=8192, heads=64, kv_heads=4, d_ff=28672, **kinds)
    return _decoder(size, kv_heads=2, d_ff=768, **kinds)


def _experts(size: Size) -> Model:
    """The decoder with grouped queries, whose tokens go to two of many gated MLPs."""
    kinds: dict[str, Any] = dict(mlp="swiglu", tied=False, capacity=1.25, dispatch="gather")
    if size == "tpu":
        return _decoder(size, kv_heads=8, d_ff=14336, experts=16, batch=128, **kinds)
    return _decoder(size, kv_heads=4, d_ff=384, experts=8, **kinds)


def _encoder(size: Size) -> Model:
    """BERT's: learned positions, layer norm after the sum, biases everywhere."""
    kinds: dict[str, Any] = dict(
        norm="layer", norm_order="post", positions="learned", bias=True, remat="full"
    )
    if size == "tpu":
        config = BertConfig(4, 2048, 16, 32768, 512, policy=MIXED, **kinds)
        return bert("encoder", config, 256, 512)
    return bert("encoder", BertConfig(2, 256, 8, 512, 128, **kinds), 16, 128)


def _vision(size: Size) -> Model:
    """Two widths of a vision transformer; the larger one has those of ViT-22B."""
    kinds: dict[str, Any] = dict(norm="layer", positions="learned", bias=True, remat="full")
    if size == "tpu":
        config = TransformerConfig(4, 6144, 48, 1024, 256, policy=MIXED, **kinds)
        return vision(config, 14, 16, 1024)
    return vision(TransformerConfig(2, 128, 8, 32, 16, **kinds), 4, 4, 16)


def _recommender(size: Size) -> Model:
    """As many large tables as devices."""
    if size == "tpu":
        return recommender(RecommenderSizes(64, 2**20, 128, 512, 1024, 1024, 65536), MIXED)
    return recommender(RecommenderSizes(8, 128, 16, 32, 64, 64, 64), md.Policy())


def _volumes(size: Size) -> Model:
    """Convolutions of volumes."""
    if size == "tpu":
        return unet3d("volumes", UNet3DConfig(policy=MIXED), 8, 128)
    return unet3d("volumes", UNet3DConfig(filters=8, levels=2, groups=4), 4, 8)


class Layer(md.Module):
    """A layer of `block`: attention and an MLP, of the dtype bfloat16."""

    q: md.Tensor  # layers, embed, heads, kv
    k: md.Tensor
    v: md.Tensor
    o: md.Tensor  # layers, heads, kv, embed
    up: md.Tensor  # layers, embed, d_ff
    down: md.Tensor  # layers, d_ff, embed

    def __call__(self, x: md.Tensor) -> md.Tensor:
        h = _norm(x)
        q, k, v = (md.einsum(h, w, over="embed") for w in (self.q, self.k, self.v))
        k, v = k.rename(length="memory_length"), v.rename(length="memory_length")
        x = x + md.einsum(md.attention(q, k, v), self.o, over=["heads", "kv"])
        h = md.gelu(md.einsum(_norm(x), self.up, over="embed"))
        return x + md.einsum(h, self.down, over="d_ff")


def _norm(x: md.Tensor) -> md.Tensor:
    square = md.mean(md.square(md.cast(x, "float32")), "embed")
    return x * md.cast(md.rsqrt(square + 1e-6), x.dtype)


def _block(size: Size) -> Model:
    """A stack of decoder layers without embeddings, whose bytes a hand-written program set."""
    tpu = size == "tpu"
    dtype = "bfloat16" if tpu else "float32"
    layers, embed, d_ff, heads, kv = md.dims(
        layers=32 if tpu else 4,
        embed=4096 if tpu else 256,
        d_ff=16384 if tpu else 1024,
        heads=32 if tpu else 8,
        kv=128 if tpu else 32,
    )

    def init(key: md.Tensor) -> Layer:
        keys = md.random.split(key, 6)
        inner = nn.initializers.fan_in(embed)
        q, k, v = (inner(one, [layers, embed, heads, kv], dtype) for one in keys[:3])
        o = nn.initializers.fan_in([heads, kv])(keys[3], [layers, heads, kv, embed], dtype)
        up = inner(keys[4], [layers, embed, d_ff], dtype)
        down = nn.initializers.fan_in(d_ff)(keys[5], [layers, d_ff, embed], dtype)
        return Layer(q, k, v, o, up, down)

    def loss(params: Layer, batch: Mapping[str, md.Tensor]) -> md.Tensor:
        apply = md.checkpoint(lambda x, layer: (layer(x), None))
        x, _ = md.scan(apply, batch["x"], params, dim="layers")
        return md.mean(md.square(md.cast(x, "float32")))

    def batch_spec(batch_size: int, length: int) -> dict[str, Spec]:
        return {"x": md.spec([*md.dims(batch=batch_size, length=length), embed], dtype)}

    return Model("block", init, loss, 64 if tpu else 16, 2048 if tpu else 128, batch_spec)


MODELS: Mapping[str, Callable[[Size], Model]] = {
    "residual": _residual,
    "wide": _wide,
    "decoder": _decoder,
    "long": _long,
    "llama": _llama,
    "shared_keys": _shared_keys,
    "experts": _experts,
    "encoder": _encoder,
    "vision": _vision,
    "recommender": _recommender,
    "volumes": _volumes,
    "block": _block,
}
OPTIMIZERS: Mapping[str, Any] = {
    "adam": optim.AdamW(1e-3, weight_decay=0.1),
    "momentum": optim.Sgd(1e-2, momentum=0.9),
    "sgd": optim.Sgd(0.1),
}

# Meshes, of 64 chips and of eight virtual devices.
LINE = ("data:64", "data:8")
PLANE = ("data:16,model:4", "data:2,model:4")
WIDE_PLANE = ("data:8,model:8", "data:2,model:4")
CONTEXT = ("data:16,context:4", "data:2,context:4")
CUBE = ("data:4,row:4,column:4", "data:2,row:2,column:2")
KEYS = ("data:4,keys:4,queries:4", "data:2,keys:2,queries:2")
EXPERTS = ("data:8,expert:8", "data:2,expert:4")
SLICES = ("slice:4,data:4,model:4", "slice:2,data:2,model:2")

TENSOR = "batch:data; heads:model; d_ff:model; vocab:model"
FSDP = "params/embed:data"
ZERO_1 = "optimizer/embed:data"

_ALL = (
    # Perceptrons.
    Pair("mlp_data", "residual", LINE, "batch:data"),
    Pair("mlp_tensor", "residual", PLANE, "batch:data; d_ff:model"),
    Pair("mlp_fsdp", "residual", LINE, f"batch:data; {FSDP}", "momentum"),
    Pair("mlp_zero1", "residual", LINE, f"batch:data; {ZERO_1}"),
    Pair("mlp_fsdp_tensor", "residual", PLANE, f"batch:data; d_ff:model; {FSDP}"),
    Pair("mlp_2d", "residual", CUBE, "batch:data; d_ff:row; embed:column"),
    Pair("wide_tensor", "wide", PLANE, "batch:data; hidden:model"),
    Pair("wide_fsdp", "wide", LINE, "batch:data; params/hidden:data", "momentum"),
    # Decoders.
    Pair("decoder_data", "decoder", LINE, "batch:data"),
    Pair("decoder_tensor", "decoder", PLANE, TENSOR),
    Pair("decoder_sequence", "decoder", PLANE, f"{TENSOR}; length:model?"),
    Pair("decoder_fsdp", "decoder", LINE, f"batch:data; {FSDP}"),
    Pair("decoder_zero1", "decoder", LINE, f"batch:data; {ZERO_1}"),
    Pair("decoder_fsdp_tensor", "decoder", PLANE, f"{TENSOR}; {FSDP}"),
    Pair("decoder_fsdp_sequence", "decoder", PLANE, f"{TENSOR}; length:model?; {FSDP}"),
    Pair("decoder_zero1_sequence", "decoder", PLANE, f"{TENSOR}; length:model?; {ZERO_1}"),
    Pair("decoder_2d", "decoder", PLANE, f"{TENSOR}; embed:model?; {FSDP}"),
    Pair("decoder_slices", "decoder", SLICES, TENSOR.replace("batch:data", "batch:slice+data")),
    Pair(
        "decoder_slices_fsdp",
        "decoder",
        SLICES,
        f"{TENSOR.replace('batch:data', 'batch:slice+data')}; length:model?; {FSDP}",
    ),
    # Long sequences.
    Pair("long_context", "long", CONTEXT, "batch:data; length:context; memory_length:context"),
    Pair(
        "long_context_fsdp",
        "long",
        CONTEXT,
        f"batch:data; length:context; memory_length:context; {FSDP}",
    ),
    Pair(
        "long_all_to_all",
        "long",
        CONTEXT,
        "batch:data; heads:context; length:context?; params/heads:-",
    ),
    # Grouped queries and gates.
    Pair("llama_tensor", "llama", WIDE_PLANE, TENSOR, "sgd"),
    Pair("llama_fsdp_sequence", "llama", WIDE_PLANE, f"{TENSOR}; length:model?; {FSDP}"),
    # Encoders.
    Pair("encoder_data", "encoder", LINE, "batch:data"),
    Pair("encoder_tensor", "encoder", PLANE, TENSOR),
    Pair("encoder_sequence", "encoder", PLANE, f"{TENSOR}; length:model?"),
    Pair("encoder_fsdp", "encoder", LINE, f"batch:data; {FSDP}"),
    Pair("encoder_fsdp_tensor", "encoder", PLANE, f"{TENSOR}; {FSDP}", "momentum"),
    # The stack of /reference/: at most 25,716 MiB, as written by hand.
    Pair(
        "block",
        "block",
        PLANE,
        f"batch:data; heads:model; d_ff:model; length:model?; {FSDP}",
        "sgd",
    ),
)
PAIRS: Mapping[str, Pair] = {pair.name: pair for pair in _ALL}

# Beyond these, pairs that are measured beside hand-written programs; XLA's partitioner is no fair
# baseline for most of them.
_MORE = (
    Pair(
        "shared_keys",
        "shared_keys",
        KEYS,
        "batch:data; heads:keys; group:queries; d_ff:keys+queries; vocab:keys+queries; "
        f"length:keys+queries?; {FSDP}",
    ),
    Pair("experts", "experts", EXPERTS, f"batch:data+expert?; experts:expert; {FSDP}"),
    Pair("vision", "vision", PLANE, f"batch:data; heads:model; d_ff:model; length:model?; {FSDP}"),
    Pair("recommender", "recommender", LINE, "batch:data; tables:data?", "sgd"),
    Pair("volumes", "volumes", CUBE, "batch:data; depth:row; height:column"),
)
MORE_PAIRS: Mapping[str, Pair] = {pair.name: pair for pair in _MORE}
