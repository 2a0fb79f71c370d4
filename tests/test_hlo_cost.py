"""Costs counted in HLO text against numbers worked out by hand.

The literal programs are what the TPU compiler printed for programs of ours, cut down.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from experiments.preflight.estimate import hlo_cost

F = 4  # bytes of a float32
HEADER = "HloModule jit_f, is_scheduled=true, num_partitions=4\n"


def compiled_cost(f, *shapes, **kwargs):
    arguments = [
        s if isinstance(s, jax.ShapeDtypeStruct) else jax.ShapeDtypeStruct(s, jnp.float32)
        for s in shapes
    ]
    return hlo_cost.count(jax.jit(f).lower(*arguments).compile().as_text(), **kwargs)


def text_cost(body: str, **kwargs):
    return hlo_cost.count(HEADER + body, **kwargs)


def sharded(mesh, shape, *spec):
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P(*spec)))


@pytest.fixture(scope="module")
def mesh():
    devices = np.array(jax.devices()[:4]).reshape(2, 2)
    return jax.sharding.Mesh(devices, ("data", "model"))


def test_all_reduce(mesh):
    def f(a, b):
        return jax.lax.with_sharding_constraint(a @ b, NamedSharding(mesh, P("data")))

    a, b = sharded(mesh, (32, 64), "data", "model"), sharded(mesh, (64, 16), "model")
    (reduce,) = compiled_cost(f, a, b).collectives
    assert reduce == hlo_cost.Collective("all-reduce", F * 16 * 16, 2, ((0, 1), (2, 3)), True, 1)


def test_all_gather_and_reduce_scatter_in_a_scan(mesh):
    def local(x, weights):
        def layer(x, w):
            w = jax.lax.all_gather(w, "data", tiled=True)
            y = jax.lax.psum_scatter(x @ w, "model", scatter_dimension=1, tiled=True)
            return jnp.tanh(jnp.concatenate([y, y], axis=1)), None

        return jax.lax.scan(layer, x, weights)[0]

    f = jax.shard_map(
        local, mesh=mesh, in_specs=(P(), P(None, "data")), out_specs=P(), check_vma=False
    )
    cost = compiled_cost(f, sharded(mesh, (8, 64)), sharded(mesh, (5, 64, 64), None, "data"))
    assert set(cost.collectives) == {
        hlo_cost.Collective("all-gather", F * 64 * 64, 2, ((0, 2), (1, 3)), True, 5),
        hlo_cost.Collective("reduce-scatter", F * 8 * 64, 2, ((0, 1), (2, 3)), True, 5),
    }


LOOP = """
%body (p: (s32[], f32[8,128])) -> (s32[], f32[8,128]) {
  %p.1 = (s32[]{:T(128)}, f32[8,128]{1,0:T(8,128)S(1)}) parameter(0)
  %i.1 = s32[]{:T(128)} get-tuple-element(%p.1), index=0
  %copy.1 = s32[]{:T(128)S(6)} copy(%i.1)
  %two = s32[]{:T(128)} constant(2)
  %add.1 = s32[]{:T(128)S(6)} add(%copy.1, %two)
  %x.1 = f32[8,128]{1,0:T(8,128)S(1)} get-tuple-element(%p.1), index=1
  %all-reduce.1 = f32[8,128]{1,0:T(8,128)S(1)} all-reduce(%x.1), channel_id=1, GROUPS, \
use_global_device_ids=true, to_apply=%add
  ROOT %tuple.1 = (s32[]{:T(128)}, f32[8,128]{1,0:T(8,128)S(1)}) tuple(%add.1, %all-reduce.1)
}

%condition (p: (s32[], f32[8,128])) -> pred[] {
  %p.2 = (s32[]{:T(128)}, f32[8,128]{1,0:T(8,128)S(1)}) parameter(0)
  %i.2 = s32[]{:T(128)S(6)} get-tuple-element(%p.2), index=0
  %end = s32[]{:T(128)S(6)} constant(28)
  ROOT %lt = pred[]{:T(512)S(6)} compare(%i.2, %end), direction=LT
}

ENTRY %main (x: f32[8,128]) -> f32[8,128] {
  %x = f32[8,128]{1,0:T(8,128)S(1)} parameter(0)
  %zero = s32[]{:T(128)S(6)} constant(1)
  %copy.3 = s32[]{:T(128)S(6)} copy(%zero)
  %tuple.3 = (s32[]{:T(128)}, f32[8,128]{1,0:T(8,128)S(1)}) tuple(%copy.3, %x)
  %while.3 = (s32[]{:T(128)}, f32[8,128]{1,0:T(8,128)S(1)}) while(%tuple.3), \
condition=%condition, body=%body, metadata={op_name="jit(f)/while" stack_frame_id=1}
  ROOT %out = f32[8,128]{1,0:T(8,128)S(1)} get-tuple-element(%while.3), index=1
}
"""


@pytest.mark.parametrize(
    ("printed", "groups"),
    [
        ("replica_groups={}", ((0, 1, 2, 3),)),
        ("replica_groups=[2,2]<=[4]", ((0, 1), (2, 3))),
        ("replica_groups=[2,2]<=[2,2]T(1,0)", ((0, 2), (1, 3))),
        ("replica_groups=mesh['axis_0'=2,'axis_1'=2] {'axis_0'}", ((0, 2), (1, 3))),
        ("replica_groups=mesh['axis_0'=2,'axis_1'=2] {'axis_1','axis_0'}", ((0, 2, 1, 3),)),
        ("replica_groups=mesh['a'=1,'b'=4] {'b':(2)2}", ((0, 1), (2, 3))),
        ("replica_groups=mesh['a'=2,'b'=2], device_ids=(3,2,1,0) {'b'}", ((3, 2), (1, 0))),
    ],
)
def test_tpu_loop_without_printed_count_and_groups(printed, groups):
    (reduce,) = text_cost(LOOP.replace("GROUPS", printed)).collectives
    # 14 times: from 1 by 2 to below 28.
    assert reduce == hlo_cost.Collective(
        "all-reduce", F * 8 * 128, len(groups[0]), groups, True, 14
    )


def test_tpu_asynchronous_copies_slices_and_permutes():
    cost = text_cost("""
ENTRY %main (w: bf16[28,128,128]) -> bf16[1,128,128] {
  %w = bf16[28,128,128]{2,1,0:T(8,128)(2,1)} parameter(0)
  %copy-start.1 = (bf16[28,128,128]{2,1,0:T(8,128)(2,1)S(1)}, \
bf16[28,128,128]{2,1,0:T(8,128)(2,1)}, u32[]{:S(2)}) copy-start(%w)
  %slice-start.1 = ((bf16[28,128,128]{2,1,0:T(8,128)(2,1)}), \
bf16[1,128,128]{2,1,0:T(8,128)(2,1)S(1)}, s32[]{:S(2)}) slice-start(%w), \
slice={[3:4], [0:128], [0:128]}
  %copy-done.1 = bf16[28,128,128]{2,1,0:T(8,128)(2,1)S(1)} copy-done(%copy-start.1)
  %slice-done.1 = bf16[1,128,128]{2,1,0:T(8,128)(2,1)S(1)} slice-done(%slice-start.1)
  %collective-permute-start.1 = (bf16[1,128,128]{2,1,0:T(8,128)(2,1)S(1)}, \
bf16[1,128,128]{2,1,0:T(8,128)(2,1)}, u32[]{:S(2)}, u32[]{:S(2)}) \
collective-permute-start(%slice-done.1), source_target_pairs={{0,2},{2,0},{1,3},{3,1}}
  ROOT %collective-permute-done.1 = bf16[1,128,128]{2,1,0:T(8,128)(2,1)} \
collective-permute-done(%collective-permute-start.1)
}
""")
    layer = 2 * 128 * 128
    assert cost.copied_bytes == (28 + 1) * layer  # both read from HBM
    permute = hlo_cost.Collective("collective-permute", layer, 2, ((0, 2), (1, 3)), False, 1)
    assert cost.collectives == (permute,)


def test_tpu_collective_spread_over_fusions_counts_once():
    gather = """all-gather(%shard), channel_id=54, replica_groups=[2,2]<=[2,2]T(1,0), \
dimensions={0}, frontend_attributes={chain_id="0"}"""
    cost = text_cost(f"""
%start (shard: bf16[64,128]) -> (bf16[64,128], bf16[128,128], u32[]) {{
  %shard = bf16[64,128]{{1,0:T(8,128)(2,1)}} parameter(0)
  %all-gather.1 = bf16[128,128]{{1,0:T(8,128)(2,1)}} {gather}
  ROOT %custom-call.1 = (bf16[64,128]{{1,0:T(8,128)(2,1)}}, bf16[128,128]{{1,0:T(8,128)(2,1)}}, \
u32[]{{:S(2)}}) custom-call(%all-gather.1), custom_call_target="AsyncCollectiveStart"
}}

%step (shard: bf16[64,128], whole: bf16[128,128], x: f32[8]) -> (f32[8], bf16[64,128], \
bf16[128,128]) {{
  %x = f32[8]{{0:T(128)}} parameter(2)
  %negate.1 = f32[8]{{0:T(128)}} negate(%x)
  %shard = bf16[64,128]{{1,0:T(8,128)(2,1)}} parameter(0)
  %whole = bf16[128,128]{{1,0:T(8,128)(2,1)}} parameter(1)
  %all-gather.2 = bf16[128,128]{{1,0:T(8,128)(2,1)}} {gather}
  ROOT %tuple.1 = (f32[8]{{0:T(128)}}, bf16[64,128]{{1,0:T(8,128)(2,1)}}, \
bf16[128,128]{{1,0:T(8,128)(2,1)}}) tuple(%negate.1, %shard, %all-gather.2)
}}

%done (shard: bf16[64,128], whole: bf16[128,128]) -> bf16[128,128] {{
  %shard = bf16[64,128]{{1,0:T(8,128)(2,1)}} parameter(0)
  %whole = bf16[128,128]{{1,0:T(8,128)(2,1)}} parameter(1)
  %all-gather.3 = bf16[128,128]{{1,0:T(8,128)(2,1)}} {gather}
  ROOT %custom-call.2 = bf16[128,128]{{1,0:T(8,128)(2,1)}} \
custom-call(%shard, %whole, %all-gather.3), custom_call_target="AsyncCollectiveDone"
}}

ENTRY %main (w: bf16[64,128], y: f32[8]) -> bf16[128,128] {{
  %w = bf16[64,128]{{1,0:T(8,128)(2,1)}} parameter(0)
  %y = f32[8]{{0:T(128)}} parameter(1)
  %fusion.1 = (bf16[64,128]{{1,0:T(8,128)(2,1)}}, bf16[128,128]{{1,0:T(8,128)(2,1)}}, \
u32[]{{:S(2)}}) fusion(%w), kind=kCustom, calls=%start
  %gte.1 = bf16[64,128]{{1,0:T(8,128)(2,1)}} get-tuple-element(%fusion.1), index=0
  %gte.2 = bf16[128,128]{{1,0:T(8,128)(2,1)}} get-tuple-element(%fusion.1), index=1
  %fusion.2 = (f32[8]{{0:T(128)}}, bf16[64,128]{{1,0:T(8,128)(2,1)}}, \
bf16[128,128]{{1,0:T(8,128)(2,1)}}) fusion(%gte.1, %gte.2, %y), kind=kOutput, calls=%step
  %gte.3 = bf16[64,128]{{1,0:T(8,128)(2,1)}} get-tuple-element(%fusion.2), index=1
  %gte.4 = bf16[128,128]{{1,0:T(8,128)(2,1)}} get-tuple-element(%fusion.2), index=2
  ROOT %fusion.3 = bf16[128,128]{{1,0:T(8,128)(2,1)}} fusion(%gte.3, %gte.4), kind=kCustom, \
calls=%done
}}
""")
    whole = 2 * 128 * 128
    (gathered,) = cost.collectives
    assert gathered == hlo_cost.Collective("all-gather", whole, 2, ((0, 2), (1, 3)), False, 1)


def test_tpu_fused_all_reduce_that_is_a_reduce_scatter():
    cost = text_cost("""
%all-reduce-scatter (input: f32[128,1024]) -> f32[128,512] {
  %input = f32[128,1024]{1,0:T(8,128)} parameter(0)
  %all-reduce.1 = f32[128,1024]{1,0:T(8,128)} all-reduce(%input), replica_groups={{0,1},{2,3}}, \
to_apply=%add, frontend_attributes={from-cross-replica-sharding="true"}
  %zero = u32[] constant(0)
  ROOT %dynamic-slice.1 = f32[128,512]{1,0:T(8,128)S(1)} \
dynamic-slice(%all-reduce.1, %zero, %zero), dynamic_slice_sizes={128,512}
}

ENTRY %main (x: f32[128,1024]) -> f32[128,512] {
  %x = f32[128,1024]{1,0:T(8,128)} parameter(0)
  ROOT %fusion.1 = f32[128,512]{1,0:T(8,128)S(1)} fusion(%x), kind=kCustom, \
calls=%all-reduce-scatter
}
""")
    (scatter,) = cost.collectives
    groups = ((0, 1), (2, 3))
    assert scatter == hlo_cost.Collective("reduce-scatter", F * 128 * 1024, 2, groups, True, 1)


@pytest.mark.parametrize(
    ("target", "kind", "size", "group_size"),
    [
        ('"{1,2}x{0:3}"', "ALL_REDUCE", F * 256, 2),
        ("{{100000,200000,300000,400000}}", "ALL_GATHER", 4 * F * 256, 4),
    ],
)
def test_tpu_collectives_between_slices(target, kind, size, group_size):
    cost = text_cost(f"""
ENTRY %main (x: f32[256]) -> token[] {{
  %x = f32[256]{{0:T(256)}} parameter(0)
  %after-all.1 = token[] after-all()
  %send.1 = (f32[256]{{0:T(256)}}, u32[], token[]) send(%x, %after-all.1), channel_id=2, \
is_host_transfer=true, frontend_attributes={{_xla_host_transfer_rendezvous="all_0",\
_xla_megascale_target={target},_xla_megascale_transfer_type="{kind}"}}
  ROOT %send-done.1 = token[] send-done(%send.1), channel_id=2, is_host_transfer=true
}}
""")
    kind = kind.lower().replace("_", "-")
    assert cost.collectives == (hlo_cost.Collective(kind, size, group_size, (), False, 1),)


def test_tpu_kernel_with_line_breaks_and_markers():
    cost = text_cost("""
ENTRY %main (q: bf16[7,2048,128]) -> bf16[7,2048,128] {
  %q = bf16[7,2048,128]{2,1,0:T(8,128)(2,1)} parameter(0)
  %custom-call.1 = bf16[7,2048,128]{2,1,0:T(8,128)(2,1)} custom-call(), \
custom_call_target="AllocateBuffer"
  ROOT %splash_mha.3 = bf16[7,2048,128]{2,1,0:T(8,128)(2,1)S(1)} custom-call(%q), \
custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={
"xprof_metadata":"{}"
}}, metadata={op_name="jit(f)/splash_mha/pallas_call"}, backend_config={"body":"TUzvUgFN"}
}
""")
    assert cost.kernels == (("splash_mha", 1),)


CYCLES = """
%fused (p0: f32[8]) -> f32[8] {
  %p0 = f32[8]{0:T(128)} parameter(0)
  ROOT %inner = f32[8]{0:T(128)} negate(%p0), backend_config={"estimated_cycles":"9999"}
}

%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %p.1 = (s32[], f32[8]{0:T(128)}) parameter(0)
  %n.1 = s32[] get-tuple-element(%p.1), index=0
  %x.1 = f32[8]{0:T(128)} get-tuple-element(%p.1), index=1
  %fusion.1 = f32[8]{0:T(128)} fusion(%x.1), kind=kLoop, calls=%fused, \
backend_config={"window_config":{"estimated_cycles":"100"}}
  ROOT %tuple.1 = (s32[], f32[8]{0:T(128)}) tuple(%n.1, %fusion.1)
}

%condition (p: (s32[], f32[8])) -> pred[] {
  %p.2 = (s32[], f32[8]{0:T(128)}) parameter(0)
  %n.2 = s32[] get-tuple-element(%p.2), index=0
  %one = s32[] constant(1)
  ROOT %more = pred[] compare(%n.2, %one), direction=GT, backend_config={"estimated_cycles":"2"}
}

%cheap (x: f32[8]) -> f32[8] {
  %x.3 = f32[8]{0:T(128)} parameter(0)
  ROOT %copy.3 = f32[8]{0:T(128)} copy(%x.3), backend_config={"estimated_cycles":"10"}
}

%dear (x: f32[8]) -> f32[8] {
  %x.4 = f32[8]{0:T(128)} parameter(0)
  ROOT %copy.4 = f32[8]{0:T(128)} copy(%x.4), backend_config={"estimated_cycles":"30"}
}

ENTRY %main (n: s32[], x: f32[8], which: pred[]) -> f32[8] {
  %n = s32[] parameter(0)
  %x = f32[8]{0:T(128)} parameter(1)
  %which = pred[] parameter(2)
  %tuple.3 = (s32[], f32[8]{0:T(128)}) tuple(%n, %x)
  %while.3 = (s32[], f32[8]{0:T(128)}) while(%tuple.3), condition=%condition, body=%body, \
metadata={op_name="jit(f)/while" stack_frame_id=1}
  %y = f32[8]{0:T(128)} get-tuple-element(%while.3), index=1
  ROOT %chosen = f32[8]{0:T(128)} conditional(%which, %y, %y), true_computation=%cheap, \
false_computation=%dear, backend_config={"estimated_cycles":"5"}
}
"""


def test_tpu_cycles_count_every_turn_and_what_is_fused_once():
    """The fusion's own estimate has what is in it; of a branch the dearer one counts."""
    cost = text_cost(CYCLES, loop_times={"jit(f)/while": 2.5})
    assert cost.cycles == 2.5 * 100 + 3.5 * 2 + 30 + 5
    least = text_cost(CYCLES, loop_times={"jit(f)/while": 2.5}, branch=min)
    assert cost.cycles - least.cycles == 30 - 10
    with pytest.raises(ValueError, match=r"jit\(f\)/while"):
        text_cost(CYCLES)


def test_a_part_taken_away_leaves_what_its_turns_add():
    once, thrice = (
        text_cost(LOOP.replace("GROUPS", "replica_groups={}").replace("constant(28)", end))
        for end in ("constant(3)", "constant(7)")
    )
    (added,) = (thrice - once).collectives
    assert added.times == 2
    assert (once - once).collectives == ()
