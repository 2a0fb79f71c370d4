"""The TPU's attention of packed rows, interpreted on CPU, against plain XLA's."""

import base64
import pathlib
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from processes import ran

from dapo_jax.preflight.compile import LIBTPU, topology_devices
from models.kernels import splash_tpu
from models.kernels.splash_tpu import fetched_blocks, splash_attention, visited_blocks
from tests.packed_rows import (
    MANY,
    ODD,
    agrees_with_plain_attention,
    other_segments_are_not_read,
    rows,
)

ROOT = pathlib.Path(__file__).resolve().parent.parent
BLOCK = 128


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(splash_tpu, "BLOCK_TOKENS", BLOCK)


def splash(*args):
    return splash_attention(*args, interpret=True)


@pytest.mark.parametrize(
    ("segment_BT", "head_dim", "cores", "window"),
    [(ODD, 128, 1, None), (ODD, 64, 2, None), (MANY, 128, 2, None), (MANY, 128, 1, 129)],
)
def test_agrees_with_plain_attention_forward_and_backward(
    segment_BT, head_dim, cores, window, monkeypatch
):
    """Segments end on borders of blocks and elsewhere; padding fills whole rows, too."""
    monkeypatch.setattr(splash_tpu, "cores", lambda interpret: cores)
    out_BTNH = agrees_with_plain_attention(splash, segment_BT, head_dim=head_dim, window=window)
    assert np.isfinite(out_BTNH).all()


def test_blocks_without_its_segment_are_not_even_read():
    other_segments_are_not_read(splash)


def random_rows():
    rng = np.random.default_rng(0)
    ends_BS = np.sort(rng.integers(1, 1024, size=(8, 5)), axis=1)
    return rows(*np.diff(ends_BS, prepend=0, append=1024))


@pytest.mark.parametrize("window", [None, 1, 2, 129, 130, 500])
def test_visits_the_blocks_with_pairs_of_a_segment(window):
    """By the pairs themselves; the diagonal is for padding. A number stands for no order."""
    segment_BT = random_rows()
    pairs_BTT = (segment_BT[:, :, None] == segment_BT[:, None]) & (segment_BT > 0)[:, None]
    pairs_BTT = np.triu(np.tril(pairs_BTT), 1 - (window or 1024)) | np.eye(1024, dtype=bool)
    expected_BIJ = pairs_BTT.reshape(8, 8, BLOCK, 8, BLOCK).any(axis=(2, 4))
    np.testing.assert_array_equal(visited_blocks(segment_BT, BLOCK, window), expected_BIJ)
    renamed_BT = np.array([0, 5, 2, 9, 1, 3])[segment_BT]
    np.testing.assert_array_equal(visited_blocks(renamed_BT, BLOCK, window), expected_BIJ)


@pytest.mark.parametrize("window", [None, 200])
def test_fetches_what_is_visited_next(window):
    """Keys along rows of blocks, from one to the next; queries down a column, then the last's."""
    for visited_IJ in np.asarray(visited_blocks(random_rows(), BLOCK, window)):
        keys_IJ, queries_IJ = fetched_blocks(visited_IJ)
        visits = np.flatnonzero(visited_IJ)
        following = np.searchsorted(visits, np.arange(visited_IJ.size)) % len(visits)
        expected_IJ = (visits[following] % len(visited_IJ)).reshape(visited_IJ.shape)
        np.testing.assert_array_equal(keys_IJ, expected_IJ)
        for visited_I, queries_I in zip(visited_IJ.T, np.asarray(queries_IJ).T, strict=True):
            visits = np.flatnonzero(visited_I)
            following = np.searchsorted(visits, np.arange(len(visited_I)))
            expected_I = visits[np.minimum(following, len(visits) - 1)]
            np.testing.assert_array_equal(queries_I, expected_I)


@pytest.mark.skipif(not LIBTPU.exists(), reason="needs the TPU's compiler: `make preflight`")
@pytest.mark.parametrize("tpu", ["v5p:2x2x1", pytest.param("v5e:2x2", marks=pytest.mark.slow)])
def test_compiles_for_tpu(tpu):
    """The TPU's compiler takes forward and backward: its VMEM holds blocks of their real size.

    Where a device has two cores, both share both.
    """
    done = ran(__file__, tpu, PYTHONPATH=str(ROOT))
    assert done.stdout.split() == ["2", "2" if tpu.startswith("v5p") else "1"]


def compile_for(tpu):
    """Compile attention and its gradients, 32B's split 8 ways.

    Prints the number of kernels, and of those whose steps are split over cores.
    """
    one = Mesh(topology_devices(tpu, slices=1)[:1], ("one",))

    def array(*shape, dtype=jnp.bfloat16):
        whole = NamedSharding(one, PartitionSpec())
        return jax.ShapeDtypeStruct((2, 22_528, *shape), dtype, sharding=whole)

    def loss(q_BTNH, k_BTKH, v_BTKH, segment_BT):
        return jnp.sum(splash_attention(q_BTNH, k_BTKH, v_BTKH, segment_BT, None) ** 2)

    update = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))
    arrays = array(5, 128), array(1, 128), array(1, 128), array(dtype=jnp.int32)
    with jax.set_mesh(one):
        text = update.lower(*arrays).compile().as_text()
    kernels = [base64.b64decode(body) for body in re.findall(r'"body": ?"([^"]+)"', text)]
    print(len(kernels), sum(b"semantics<parallel>" in kernel for kernel in kernels))


if __name__ == "__main__":
    compile_for(sys.argv[1])
