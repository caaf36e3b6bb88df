"""Weights that a compiled program decodes: wherever it calls, waits or branches, and on
many devices."""

import eqquant
import jax
import jax.numpy as jnp
import pytest
from eqquant.debug._flow import Flow, Weight
from eqquant.debug._in_hlo import decoded_in_hlo
from eqquant.debug._inspect import decoded_on_devices
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P


SIZE = 64 * 64

# In %some an activation of the size of the weight is made of it, or the weight itself.
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
WAYS = {
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
# All of the codes, and what is of the data alone.
FLOWS = [Flow({Weight(SIZE, SIZE, 2, frozenset({SIZE})): SIZE}), Flow(data=True)]


def found(way, operation):
    text = PROGRAM.replace("HERE", way).replace("OPERATION", operation)
    return decoded_in_hlo(text, FLOWS)


@pytest.mark.parametrize("name", WAYS)
def test_what_is_called(name):
    lines = found(WAYS[name], "convert")
    assert lines[0] == "compiled: convert -> f32[64,64]"
    # And what is made of it afterwards.
    assert lines[-1] == "compiled: negate -> f32[64,64]"
    assert found(WAYS[name], "dot") == []


def test_what_is_not_called_is_not_looked_at():
    assert found(WAYS["call"].replace("%some", "%none"), "convert") == []
    assert found(WAYS["branches"].replace("%some", "%none"), "convert") == []


def test_what_gets_more_operands_later_is_taken_for_all_of_them():
    way = START.replace("(%q)", "(%q, %i)") + "calls=%some" + DONE
    assert "compiled: negate -> f32[64,64]" in found(way, "dot")


def test_what_cannot_be_read_is_an_error():
    with pytest.raises(RuntimeError, match="cannot read: %of"):
        found("%of = f32[64,64]{1,0} call(%q, to_apply=%some", "dot")
    with pytest.raises(RuntimeError, match="cannot read: %of"):
        found("%of = (f32[64,64]{1,0} call, to_apply=%some", "dot")


@pytest.mark.parametrize("spec", [P("x"), P(None, "x")], ids=str)
def test_the_part_of_a_device(spec, normal):
    """A device that has the eighth of a weight may not hold that decoded, either."""
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    q = eqquant.quantize(normal(64, 512), "nf4")
    split = eqquant.shard_tree(q, mesh, spec)
    x = jax.device_put(normal(3, 512), NamedSharding(mesh, P()))

    def lines(fn):
        lowered = jax.jit(fn, keep_unused=True).lower(x, split)
        return decoded_on_devices(lowered.compile().as_text(), (x, split))

    assert lines(lambda x, q: x @ q.T) == []
    part = "f32[8,512]" if spec == P("x") else "f32[64,64]"
    decoded = lines(lambda x, q: jnp.sum(x) * q.dequantize())
    assert any(line.endswith(part) for line in decoded), decoded
