"""Tests that decoded weights are found in the control flow of compiled programs, and on
several devices."""

import eqquant
import jax
import jax.numpy as jnp
import pytest
from eqquant.debug._flow import Flow, TrackedWeight
from eqquant.debug._in_hlo import decoded_in_hlo
from helpers import load_benchmark
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P


decoded_on_devices = load_benchmark("_decoded_on_devices").decoded_on_devices
SIZE = 64 * 64

# %some computes from the codes either a decoded weight, or an activation of its size.
PROGRAM = """
HloModule jit_f, is_scheduled=true

%some (p: u8[64,32]) -> f32[64,64] {
  %p = u8[64,32]{1,0} parameter(0)
  ROOT %made = f32[64,64]{1,0} OPERATION(%p, %p)
}

%none (p.1: u8[64,32]) -> f32[64,64] {
  %p.1 = u8[64,32]{1,0} parameter(0)
  %one = f32[] constant(1)
  ROOT %ones = f32[64,64]{1,0} broadcast(%one), dimensions={}
}

ENTRY %main (q: u8[64,32], i: s32[]) -> f32[64,64] {
  %q = u8[64,32]{1,0} parameter(0)
  %i = s32[] parameter(1)
  HERE
  ROOT %end = f32[64,64]{1,0} negate(%of)
}
"""
START = "%start = ((u8[64,32]{1,0}), f32[64,64]{1,0}, u32[]) async-start(%q), "
DONE = "\n  %of = f32[64,64]{1,0} async-done(%start)"
CALLS = {
    "call": "%of = f32[64,64]{1,0} call(%q), to_apply=%some",
    "custom call": "%of = f32[64,64]{1,0} custom-call(%q), "
    'custom_call_target="wrapped", called_computations={%some}',
    "barrier": "%t = (u8[64,32]{1,0}, s32[]) tuple(%q, %i)\n"
    "  %b = (u8[64,32]{1,0}, s32[]) opt-barrier(%t)\n"
    "  %c = u8[64,32]{1,0} get-tuple-element(%b), index=0\n"
    "  %of = f32[64,64]{1,0} call(%c), to_apply=%some",
    "asynchronous": START + "calls=%some" + DONE,
    "branches": "%of = f32[64,64]{1,0} conditional(%i, %q, %q), "
    "branch_computations={%none, %some}",
    "true or false": "%of = f32[64,64]{1,0} conditional(%i, %q, %q), "
    "true_computation=%some, false_computation=%none",
}
# The flows of the codes and of the index.
FLOWS = [Flow({TrackedWeight(SIZE, SIZE, 2, frozenset({SIZE})): SIZE}), Flow(data=True)]


def found(call, operation):
    text = PROGRAM.replace("HERE", call).replace("OPERATION", operation)
    return decoded_in_hlo(text, FLOWS)


@pytest.mark.parametrize("name", CALLS)
def test_called_computations(name):
    lines = found(CALLS[name], "convert")
    assert lines[0] == "compiled: convert -> f32[64,64]"
    # The negated weight is a weight.
    assert lines[-1] == "compiled: negate -> f32[64,64]"
    assert found(CALLS[name], "dot") == []


def test_computations_that_are_not_called_are_ignored():
    assert found(CALLS["call"].replace("%some", "%none"), "convert") == []
    assert found(CALLS["branches"].replace("%some", "%none"), "convert") == []


def test_an_async_call_with_fewer_parameters_counts_as_decoding():
    call = START.replace("(%q)", "(%q, %i)") + "calls=%some" + DONE
    assert "compiled: negate -> f32[64,64]" in found(call, "dot")


def test_malformed_lines_raise():
    with pytest.raises(RuntimeError, match="%of"):
        found("%of = f32[64,64]{1,0} call(%q, to_apply=%some", "dot")
    with pytest.raises(RuntimeError, match="%of"):
        found("%of = (f32[64,64]{1,0} call, to_apply=%some", "dot")


@pytest.mark.parametrize("spec", [P("x"), P(None, "x")], ids=str)
def test_shards(spec, normal):
    """A device must not decode its shard."""
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    q = eqquant.quantize(normal(64, 512), "nf4")
    sharded = eqquant.shard_tree(q, mesh, spec)
    x = jax.device_put(normal(3, 512), NamedSharding(mesh, P()))

    def lines(fn):
        lowered = jax.jit(fn, keep_unused=True).lower(x, sharded)
        return decoded_on_devices(lowered.compile().as_text(), (x, sharded))

    assert lines(lambda x, q: x @ q.T) == []
    shard = "f32[8,512]" if spec == P("x") else "f32[64,64]"
    decoded = lines(lambda x, q: jnp.sum(x) * q.dequantize())
    assert any(line.endswith(shard) for line in decoded), decoded
