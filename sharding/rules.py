"""Sharding rules: tables from the logical axes of parameters and batches to mesh axes.

LEARNER shards parameters and optimizer state over "data" and "model" (fully sharded data parallel,
Zhao et al. 2023, arXiv 2304.11277, times tensor parallel, Shoeybi et al. 2019, arXiv 1909.08053);
between the layers the tokens of a row lie over "model" too (sequence parallel, Korthikanti et al.
2022, arXiv 2205.05198, section 4.2.2), so that what is kept for the backward pass is split as well.
SAMPLER replicates parameters over "data", so that a decode step needs no collective there. Both
replicate them over "slice": nothing but gradients goes from slice to slice.
"""

import functools
import math

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

# Axes that are not named are whole on every device.
SAMPLER = dict.fromkeys(("vocab", "heads", "kv_heads", "mlp", "experts"), "model")
LEARNER = SAMPLER | {"width": "data"}

# Of arrays inside the learner: rows, the head, and what is the same everywhere.
ROW_AXES = ("slice", "data")
BATCH = PartitionSpec(ROW_AXES)
HEAD = PartitionSpec(LEARNER["width"], LEARNER["vocab"])
EVERYWHERE = PartitionSpec()


def named_sharding(mesh: Mesh, axes, shape, rules) -> NamedSharding:
    """Shards one array with logical `axes`. Raises ValueError where a size does not divide.

    Key/value heads that do not are replicated.
    """
    spec = []
    for axis, size in zip(axes, shape, strict=True):
        mesh_axis = rules.get(axis)
        degree = 1 if mesh_axis is None else mesh.shape[mesh_axis]
        if size % degree and axis != "kv_heads":
            raise ValueError(
                f"the model's {axis} axis of {size} does not divide by mesh.{mesh_axis} = "
                f"{degree}; choose a mesh.{mesh_axis} that divides {size}, as "
                f"{math.gcd(size, degree)} does"
            )
        spec.append(mesh_axis if size % degree == 0 else None)
    return NamedSharding(mesh, PartitionSpec(*spec))


def param_shardings(mesh: Mesh, axes_tree, params, rules):
    """Shards every parameter; `axes_tree` is models.parameters.param_axes(params)."""
    return jax.tree.map(
        lambda leaf, axes: named_sharding(mesh, axes, leaf.shape, rules), params, axes_tree
    )


def abstract(arrays, shardings):
    """Makes ShapeDtypeStructs that carry shardings, a tree of them like `arrays`."""
    return jax.tree.map(
        lambda a, sharding: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding),
        arrays,
        shardings,
    )


def row_degree(mesh: Mesh) -> int:
    """Counts the groups of devices that rows are spread over: each has whole rows to itself."""
    return math.prod(mesh.shape[axis] for axis in ROW_AXES)


def rows(mesh: Mesh) -> NamedSharding:
    """Shards the leading axis (prompts, responses, rows) over slices and "data", no other."""
    return NamedSharding(mesh, BATCH)


def micro_batches(mesh: Mesh) -> NamedSharding:
    """Shards [micro-batches, rows, tokens]: the rows over slices and "data"."""
    return NamedSharding(mesh, PartitionSpec(None, ROW_AXES))


def replicated(mesh: Mesh) -> NamedSharding:
    """Replicates an array: it is the same on every device."""
    return NamedSharding(mesh, EVERYWHERE)


def by_parts(local, mesh: Mesh, *, params, rows: int, tokens: int):
    """Maps local(*params, *rows_BT) -> (x_BTD, of_rows) over each device's rows and parameters.

    params: trees of shardings. rows: how many arrays rows_BT there are. tokens: of a row;
    x_BTD is what `split_sum` leaves, of_rows an array of whole rows or None.
    """
    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(*jax.tree.map(lambda sharding: sharding.spec, params), *[BATCH] * rows),
        out_specs=(
            PartitionSpec(ROW_AXES, "model") if tokens_divide(mesh, tokens) else BATCH,
            BATCH,
        ),
        check_vma=False,  # the attention kernels do not say over what their outputs vary
    )


def tokens_divide(mesh: Mesh, tokens: int) -> bool:
    """Returns whether the tokens of a row lie over "model" between products."""
    ways = mesh.shape["model"]
    return ways > 1 and tokens % ways == 0


def whole_rows(x_BTD, mesh: Mesh, *, tokens: int):
    """Gathers the activations that heads and feed-forward read: all tokens of a row."""
    if not tokens_divide(mesh, tokens):
        return x_BTD
    gather = functools.partial(jax.lax.all_gather, axis_name="model", axis=0, tiled=True)
    return _by_token(gather, x_BTD)


def split_sum(x_BTD, mesh: Mesh, *, tokens: int, dtype):
    """Adds up what the devices of "model" contribute, and leaves each its part of the tokens.

    Where the tokens do not divide, all of them. dtype: what travels is rounded to it.
    """
    if mesh.shape["model"] == 1:
        return x_BTD
    if not tokens_divide(mesh, tokens):
        return jax.lax.psum(x_BTD.astype(dtype), "model").astype(x_BTD.dtype)
    scatter = functools.partial(
        jax.lax.psum_scatter, axis_name="model", scatter_dimension=0, tiled=True
    )
    return _by_token(scatter, x_BTD.astype(dtype)).astype(x_BTD.dtype)


def _by_token(collective, x_BTD):
    """Applies a collective to a matrix with a line a token.

    The TPU's compiler makes a reduce-scatter of that alone; of [1, T, D] an all-reduce, twice it.
    """
    B, T, D = x_BTD.shape
    x_BTD = collective(x_BTD.swapaxes(0, 1).reshape(T, B * D)).reshape(-1, B, D)
    return x_BTD.swapaxes(0, 1)


def whole_width(w, letters: str, mesh: Mesh):
    """Gathers a matrix whose width "D", if it has one, is split over "data"."""
    axis = LEARNER["width"]
    if mesh.shape[axis] == 1 or "D" not in letters:
        return w
    return jax.lax.all_gather(w, axis, axis=letters.index("D"), tiled=True)


def split_width(d_w, letters: str, mesh: Mesh):
    """Adds up the gradients of such a matrix, and leaves each device its part.

    Those of a matrix without it, which is whole everywhere, shard_map adds up.
    """
    axis = LEARNER["width"]
    if mesh.shape[axis] == 1 or "D" not in letters:
        return d_w
    return jax.lax.psum_scatter(d_w, axis, scatter_dimension=letters.index("D"), tiled=True)


def by_vocabulary(local, mesh: Mesh, *, rows: int, outputs):
    """Maps local(x_BTD, head_DV, *rows_BT) over each device's rows and part of the vocabulary.

    rows: how many arrays rows_BT there are. outputs: the PartitionSpecs of what `local` returns.
    """
    head = PartitionSpec(None, LEARNER["vocab"])
    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(BATCH, head, *[BATCH] * rows),
        out_specs=outputs,
        check_vma=False,
    )
