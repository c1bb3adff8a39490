"""The reader of GPU machine code that `python -m benchmarks.gpu --static` counts with."""

import pytest

from benchmarks.gpu import sass, static

# A loop of steps within a loop of heads. A step waits for its block, makes logits, masks them or not, and adds up values meanwhile.
CODE = """
//--------------------- .text.kernel --------------------------
kernel:
        /*0000*/                   MOV R1, c[0x0][0x28] ;
.L_x_0:
        /*0010*/                   MOV R2, RZ ;
.L_x_1:
        /*0020*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR4], R3 ;
        /*0030*/              @!P1 BRA `(.L_x_1) ;
        /*0040*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], RZ, !UPT ;
        /*0050*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], R24, gsb0 ;
        /*0060*/                   HGMMA.64x256x16.F32.BF16 R56, R200, gdesc[UR12], R56, gsb0 ;
        /*0070*/                   WARPGROUP.DEPBAR.LE gsb0, 0x1 ;
        /*0080*/               @P2 BRA `(.L_x_2) ;
        /*0090*/                   FSEL R24, R24, R5, P3 ;
        /*00a0*/                   FSEL R25, R25, R5, P3 ;
.L_x_2:
        /*00b0*/                   MUFU.EX2 R24, R24 ;
        /*00c0*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*00d0*/                   MUFU.EX2 R25, R25 ;
        /*00e0*/                   LDL R7, [R1+0x8] ;
        /*00f0*/                   LDG.E R8, [R10.64] ;
        /*0100*/               @P4 BRA `(.L_x_1) ;
        /*0110*/               @P5 BRA `(.L_x_0) ;
        /*0120*/                   EXIT ;
"""


def test_a_step_is_the_shortest_way_around_the_innermost_loop():
  [loop] = sass.inner_loops(CODE)
  assert (
    loop
    == sass.Loop(
      instructions=13,  # without the two of the mask, and with a wait that finds its block there
      tensor_cycles=32 + 32 + 128,
      exponentials=2,
      beside=1,
      global_loads=1,
      spills=1,
      serialized=False,
      schedule="2 N64, N256, wait 1, exp, wait 0, exp",
    )
  )


def test_products_that_wait_for_one_another_are_seen():
  lines = CODE.splitlines()
  wait = next(line for line in lines if "DEPBAR.LE gsb0, 0x0" in line)
  waiting = "\n".join(
    part
    for line in lines
    for part in ([line, wait] if "HGMMA" in line else [line])
  )
  [loop] = sass.inner_loops(waiting)
  assert loop.serialized and loop.schedule.startswith(
    "N64, wait 0, N64, wait 0, N256, wait 0"
  )


def test_code_without_products_has_no_inner_loops():
  assert (
    sass.inner_loops(
      "\n".join(line for line in CODE.splitlines() if "HGMMA" not in line)
    )
    == []
  )


@pytest.mark.parametrize(
  ("name", "D", "rate"), [("forward", 128, 712), ("d_kv", 128, 712)]
)
def test_kernels_bound_by_the_tensor_cores_alone_reach_three_quarters_of_the_peak(
  name, D, rate
):
  loop = sass.Loop(
    instructions=10,
    tensor_cycles=2 * D * 4,
    exponentials=1,
    beside=1,
    global_loads=0,
    spills=0,
    serialized=False,
    schedule="",
  )
  most, least = static._cycles(name, [loop, loop])
  assert most == least == 2 * loop.tensor_cycles
  assert round(static.rate(8, D, least)) == rate
