"""What the hand-written programs share: the training step, norms, attention, the loss.

This is plain JAX with optax, and nothing of meshdsl. A program is split as MaxText's are: weights
and the batch have a `NamedSharding`, `with_sharding_constraint` says at the usual points where
activations are, and XLA's partitioner does the rest. Each program is a function
`(mesh, size="tpu", kernels=True)` that returns what `jax.jit` returned, the state and the batch
(both as `jax.ShapeDtypeStruct`): `meshdsl compile --against=FILE.py:FUNCTION` compiles it.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

Size = Literal["tpu", "small"]
Axes = str | tuple[str, ...] | None
LANES = 128  # the kernels take lengths in multiples of it


@dataclass(frozen=True)
class Array:
    """The shape, the split and the dtype of a weight or of a part of the batch."""

    shape: tuple[int, ...]
    spec: P
    dtype: Any = jnp.float32

    def on(self, mesh: Mesh) -> jax.ShapeDtypeStruct:
        """Returns it on the devices of a mesh."""
        return jax.ShapeDtypeStruct(self.shape, self.dtype, sharding=NamedSharding(mesh, self.spec))


def stacked(layers: int, weights: Any) -> Any:
    """Returns weights of one layer as those of all layers, for `lax.scan`."""

    def of_all(one: Array) -> Array:
        return Array((layers, *one.shape), P(None, *one.spec), one.dtype)

    return jax.tree.map(of_all, weights)


def constrain(x: Any, mesh: Mesh, *axes: Axes) -> Any:
    """Returns x with its dims split over mesh axes."""
    return lax.with_sharding_constraint(x, NamedSharding(mesh, P(*axes)))


def compute_dtype(size: Size) -> Any:
    """Returns the dtype of activations: weights are float32 at rest."""
    return jnp.bfloat16 if size == "tpu" else jnp.float32


def cast(tree: Any, dtype: Any) -> Any:
    """Returns a tree of arrays in another dtype."""
    return jax.tree.map(lambda x: x.astype(dtype), tree)


# The training step.


def adamw(apart: str = "") -> optax.GradientTransformation:
    """Returns AdamW; scales and biases do not decay, nor do the weights below `apart`."""

    def decays(path: Any, _: Any) -> bool:
        names = [entry.key for entry in path if isinstance(entry, jax.tree_util.DictKey)]
        return "scale" not in names[-1] and "bias" not in names[-1] and apart not in names

    def mask(params: Any) -> Any:
        return jax.tree_util.tree_map_with_path(decays, params)

    return optax.adamw(1e-3, weight_decay=0.1, mask=mask)


def training(
    mesh: Mesh,
    loss: Callable[[Any, Mapping[str, Any]], jax.Array],
    weights: Any,
    batch: Mapping[str, Array],
    optimizer: optax.GradientTransformation,
) -> tuple[Any, Any, Any]:
    """Returns the jitted training step, the state and the batch."""
    params = jax.tree.map(lambda one: one.on(mesh), weights)
    state = {"params": params, "optimizer": sharded_like(mesh, optimizer, params)}

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        params = state["params"]
        value, grads = jax.value_and_grad(loss)(params, batch)
        grads = lax.with_sharding_constraint(grads, shardings(state_of["params"]))
        updates, moments = optimizer.update(grads, state["optimizer"], params)
        params = optax.apply_updates(params, updates)
        metrics = {"loss": value, "grad_norm": optax.tree.norm(grads)}
        return {"params": params, "optimizer": moments}, metrics

    state_of = state
    results = (shardings(state), NamedSharding(mesh, P()))
    function = jax.jit(step, donate_argnums=0, out_shardings=results)
    return function, state, {name: one.on(mesh) for name, one in batch.items()}


def sharded_like(mesh: Mesh, optimizer: optax.GradientTransformation, params: Any) -> Any:
    """Returns the state of an optimizer; its moments are split as the parameters are."""

    def moment(like: Any, one: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(like.shape, like.dtype, sharding=one.sharding)

    def scalar(like: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(like.shape, like.dtype, sharding=NamedSharding(mesh, P()))

    return optax.tree_map_params(
        optimizer,
        moment,
        jax.eval_shape(optimizer.init, params),
        params,
        transform_non_params=scalar,
    )


def shardings(tree: Any) -> Any:
    """Returns where the arrays of a tree are."""
    return jax.tree.map(lambda one: one.sharding, tree)


# Layers.


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Returns x divided by its root mean square, computed in float32."""
    wide = x.astype(jnp.float32)
    y = wide * lax.rsqrt(jnp.mean(jnp.square(wide), -1, keepdims=True) + 1e-6)
    return y.astype(x.dtype) * scale


def layer_norm(x: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
    """Returns x with mean 0 and variance 1, computed in float32."""
    wide = x.astype(jnp.float32)
    centred = wide - jnp.mean(wide, -1, keepdims=True)
    y = centred * lax.rsqrt(jnp.mean(jnp.square(centred), -1, keepdims=True) + 1e-5)
    return y.astype(x.dtype) * scale + bias


def rotary(x: jax.Array) -> jax.Array:
    """Returns x [batch, length, ..., kv] rotated by its positions."""
    half = x.shape[-1] // 2
    rate = jnp.exp(jnp.arange(half, dtype=jnp.float32) * (-math.log(10000.0) / half))
    angle = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None] * rate
    angle = angle.reshape(x.shape[1], *(1,) * (x.ndim - 3), half)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    one, two = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([one * cos - two * sin, two * cos + one * sin], axis=-1)
    return turned.astype(x.dtype)


def attention(q: jax.Array, k: jax.Array, v: jax.Array, causal: bool) -> jax.Array:
    """Returns attention that computes all scores at once, in float32.

    Args:
        q: [batch, length, heads, group, kv]: groups of queries share the keys of a head.
        k, v: [batch, memory, heads, kv].
    """
    q = q * jnp.asarray(1 / math.sqrt(q.shape[-1]), q.dtype)
    scores = jnp.einsum("blhgk,bmhk->bhglm", q, k, preferred_element_type=jnp.float32)
    if causal:
        seen = jnp.arange(q.shape[1])[:, None] >= jnp.arange(k.shape[1])
        scores = jnp.where(seen, scores, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    return jnp.einsum("bhglm,bmhk->blhgk", weights, v)


def attend(
    mesh: Mesh, spec: P, q: jax.Array, k: jax.Array, v: jax.Array, causal: bool, kernels: bool
) -> jax.Array:
    """Returns attention, by a fused kernel if the devices have it; arguments as in `attention`.

    Args:
        spec: how q is split; keys and values are split as q is, without the length and the group.
    """
    if kernels and mesh.devices.flat[0].platform == "gpu" and q.dtype == jnp.bfloat16:
        return cudnn(q, k, v, causal)
    if not has_kernel(mesh, q, kernels):
        return attention(q, k, v, causal)
    batch, length, heads, group, _ = (*spec, *(None,) * (5 - len(spec)))
    shards = 1 if length is None else mesh.shape[length]

    def local(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        start = 0 if length is None else lax.axis_index(length)
        return splash(q, k, v, causal, shards, start)

    split = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(spec, P(batch, None, heads), P(batch, None, heads)),
        out_specs=P(batch, length, heads, group),
        check_vma=False,
    )
    return split(q, k, v)


def cudnn(q: jax.Array, k: jax.Array, v: jax.Array, causal: bool) -> jax.Array:
    """Returns attention by the fused kernel of NVIDIA GPUs; arguments as in `attention`."""
    heads = q.reshape(*q.shape[:2], -1, q.shape[-1])
    mixed = jax.nn.dot_product_attention(heads, k, v, is_causal=causal, implementation="cudnn")
    return mixed.reshape(q.shape)


def has_kernel(mesh: Mesh, q: jax.Array, kernels: bool) -> bool:
    """Whether the fused kernel of TPUs computes attention; arguments as in `attend`."""
    return kernels and q.shape[1] % LANES == 0 and mesh.devices.flat[0].platform == "tpu"


def splash(
    q: jax.Array, k: jax.Array, v: jax.Array, causal: bool, shards: int = 1, start: Any = 0
) -> jax.Array:
    """Returns attention of one device by a fused kernel; arguments as in `attention`.

    Args:
        shards: into how many parts the queries' positions are split.
        start: which of these parts this is.
    """
    # Pallas takes long to import.
    from jax.experimental.pallas.ops.tpu import splash_attention as pallas

    rows, columns, heads, group = q.shape[1], k.shape[1], q.shape[2], q.shape[3]
    block_q, block_kv = (max(b for b in (128, 256, 512) if n % b == 0) for n in (rows, columns))
    sizes = pallas.BlockSizes(
        block_q=block_q,
        block_kv=block_kv,
        block_kv_compute=block_kv,
        block_q_dkv=block_q,
        block_kv_dkv=block_kv,
        block_kv_dkv_compute=block_kv,
        block_q_dq=block_q,
        block_kv_dq=block_kv,
    )
    q = (q * jnp.asarray(1 / math.sqrt(q.shape[-1]), q.dtype)).reshape(*q.shape[:2], -1, q.shape[4])
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))

    def run(number: int) -> Callable[[jax.Array, jax.Array, jax.Array], jax.Array]:
        shape, offset = (rows, columns), number * rows
        mask = pallas.CausalMask(shape, offset) if causal else pallas.FullMask(shape)
        many = pallas.MultiHeadMask([mask] * (heads * group))
        return jax.vmap(
            pallas.make_splash_mha(mask=many, block_sizes=sizes, head_shards=1, q_seq_shards=1)
        )

    if shards == 1 or not causal:
        result = run(0)(q, k, v)
    else:  # each part of the positions has a mask of its own
        result = lax.switch(start, [run(number) for number in range(shards)], q, k, v)
    result = result.swapaxes(1, 2)
    return result.reshape(*result.shape[:2], heads, group, result.shape[-1])


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Returns -log softmax(logits)[labels], in float32; the classes may be split."""
    logits = logits.astype(jnp.float32)
    chosen = labels[..., None] == jnp.arange(logits.shape[-1], dtype=labels.dtype)
    picked = jnp.sum(jnp.where(chosen, logits, 0), -1)
    return jax.nn.logsumexp(logits, axis=-1) - picked
