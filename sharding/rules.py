"""Which logical axis of a parameter or a batch lies on which mesh axis: one table each.

LEARNER shards parameters and optimizer state over "data" and "model" (fully sharded data parallel,
Zhao et al. 2023, arXiv 2304.11277, times tensor parallel, Shoeybi et al. 2019, arXiv 1909.08053);
between the layers the tokens of a row lie over "model" too (sequence parallel, Korthikanti et al.
2022, arXiv 2205.05198, section 4.2.2), so that what is kept for the backward pass is split as well.
SAMPLER replicates parameters over "data", so that a decode step needs no collective there. Both
replicate them over "slice": nothing but gradients goes from slice to slice.
"""

import math

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

LEARNER = {
    "vocab": "model",
    "width": "data",
    "heads": "model",
    "kv_heads": "model",
    "head_dim": None,
    "mlp": "model",
    "norm": None,
    "layer": None,
    "rank": None,
}
SAMPLER = LEARNER | {"width": None}

# Of arrays inside the learner: rows, the head, and what is the same everywhere.
ROW_AXES = ("slice", "data")
BATCH = PartitionSpec(ROW_AXES)
HEAD = PartitionSpec(LEARNER["width"], LEARNER["vocab"])
EVERYWHERE = PartitionSpec()

# Axes that are replicated where the mesh does not divide them; the others must divide.
MAY_REPLICATE = ("kv_heads",)


def named_sharding(mesh: Mesh, axes, shape, rules) -> NamedSharding:
    """Shards one array with logical `axes`. Raises ValueError where a size does not divide."""
    spec = []
    for axis, size in zip(axes, shape, strict=True):
        mesh_axis = rules[axis]
        ways = 1 if mesh_axis is None else mesh.shape[mesh_axis]
        if size % ways and axis not in MAY_REPLICATE:
            raise ValueError(
                f"the model's {axis} axis of {size} does not divide by mesh.{mesh_axis} = {ways}; "
                f"choose a mesh.{mesh_axis} that divides {size}, as {math.gcd(size, ways)} does"
            )
        spec.append(mesh_axis if size % ways == 0 else None)
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


def row_ways(mesh: Mesh) -> int:
    """Counts the groups of devices that rows are spread over: each has whole rows to itself."""
    return math.prod(mesh.shape[axis] for axis in ROW_AXES)


def kept_sharded(params, axes_tree, mesh: Mesh):
    """Constrains parameters that products use, so that their gradients are sharded as they are.

    Else the compiler all-reduces whole gradients and slices them, in place of a reduce-scatter.
    """
    return jax.lax.with_sharding_constraint(
        params, param_shardings(mesh, axes_tree, params, LEARNER)
    )


def rows(mesh: Mesh) -> NamedSharding:
    """Shards the leading axis (prompts, responses, rows) over slices and "data", no other."""
    return NamedSharding(mesh, BATCH)


def micro_batches(mesh: Mesh) -> NamedSharding:
    """Shards [micro-batches, rows, tokens]: the rows over slices and "data"."""
    return NamedSharding(mesh, PartitionSpec(None, ROW_AXES))


def split_tokens(x_BTD, mesh: Mesh):
    """Shards the learner's activations between products: tokens over "model", beside rows.

    They stay as they are where there is nothing to split, or where the tokens do not divide.
    """
    return _tokens_over(x_BTD, mesh, "model")


def whole_rows(x_BTD, mesh: Mesh):
    """Gathers the activations that heads and feed-forward read: all tokens of a row."""
    return _tokens_over(x_BTD, mesh, None)


def _tokens_over(x_BTD, mesh: Mesh, axis: str | None):
    ways = mesh.shape["model"]
    if ways == 1 or x_BTD.shape[1] % ways:
        return x_BTD
    sharding = NamedSharding(mesh, PartitionSpec(ROW_AXES, axis))
    return jax.lax.with_sharding_constraint(x_BTD, sharding)


def replicated(mesh: Mesh) -> NamedSharding:
    """Replicates an array: it is the same on every device."""
    return NamedSharding(mesh, EVERYWHERE)


def by_heads(attend, mesh: Mesh):
    """Maps attend(q_BTNH, k_BTKH, v_BTKH, *rows_BT) -> out_BTNH over each device's rows, heads."""
    heads = PartitionSpec(ROW_AXES, None, "model")

    def everywhere(q_BTNH, k_BTKH, v_BTKH, *rows_BT):
        in_specs = (heads, heads, heads, *(BATCH for _ in rows_BT))
        local = jax.shard_map(
            attend, mesh=mesh, in_specs=in_specs, out_specs=heads, check_vma=False
        )
        return local(q_BTNH, k_BTKH, v_BTKH, *rows_BT)

    return everywhere


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
