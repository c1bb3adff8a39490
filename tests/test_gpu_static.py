"""The counts of `python -m benchmarks.gpu.static`, read from machine code."""

import dataclasses

import pytest

from benchmarks.gpu import static

# A loop over key blocks inside a loop over heads. A step waits for its block,
# computes logits, masks them or not, and accumulates the values meanwhile.
CODE = """
//--------------------- .text.kernel --------------------------
kernel:
  /*0000*/ MOV R1, c[0x0][0x28] ;
.L_x_0:
  /*0010*/ MOV R2, RZ ;
.L_x_1:
  /*0020*/ SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR4], R3 ;
  /*0030*/ @!P1 BRA `(.L_x_1) ;
  /*0040*/ HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], RZ, !UPT ;
  /*0050*/ HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], R24, gsb0 ;
  /*0060*/ HGMMA.64x256x16.F32.BF16 R56, R200, gdesc[UR12], R56, gsb0 ;
  /*0070*/ WARPGROUP.DEPBAR.LE gsb0, 0x1 ;
  /*0080*/ @P2 BRA `(.L_x_2) ;
  /*0090*/ FSEL R24, R24, R5, P3 ;
  /*00a0*/ FSEL R25, R25, R5, P3 ;
.L_x_2:
  /*00b0*/ MUFU.EX2 R24, R24 ;
  /*00c0*/ WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
  /*00d0*/ MUFU.EX2 R25, R25 ;
  /*00e0*/ LDL R7, [R1+0x8] ;
  /*00f0*/ LDG.E R8, [R10.64] ;
  /*0100*/ @P4 BRA `(.L_x_1) ;
  /*0110*/ @P5 BRA `(.L_x_0) ;
  /*0120*/ EXIT ;
"""


def test_a_step_is_the_shortest_path_around_the_innermost_loop():
  """CODE is machine code of a loop. A jump over the mask shortens its path."""
  [loop] = static.inner_loops(CODE)

  expected = static.Loop(
    # 15 from .L_x_1 to the jump back, without the two FSEL of the mask.
    instructions=15 - 2,
    # The matrix products (HGMMA) have 64, 64 and 256 columns. Two columns take
    # a cycle.
    tensor_cycles=32 + 32 + 128,
    global_loads=1,
    spills=1,
    serialized=False,
    # "2 N64" is two products with 64 columns. "wait 1" waits until at most one
    # product has not ended. "exp" is the instruction MUFU.EX2.
    schedule="2 N64, N256, wait 1, exp, wait 0, exp",
  )
  assert loop == expected


def test_products_that_wait_for_the_one_before_are_serialized():
  # HGMMA is a matrix product, here with 64 columns and two with 256. DEPBAR
  # waits until no product (0x0) is running.
  code = """
//--------------------- .text.kernel --------------------------
kernel:
.L_x_0:
  /*0000*/ HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], RZ, gsb0 ;
  /*0010*/ WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
  /*0020*/ HGMMA.64x256x16.F32.BF16 R56, R200, gdesc[UR12], R56, gsb0 ;
  /*0030*/ WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
  /*0040*/ HGMMA.64x256x16.F32.BF16 R56, R200, gdesc[UR12], R56, gsb0 ;
  /*0050*/ WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
  /*0060*/ @P4 BRA `(.L_x_0) ;
  /*0070*/ EXIT ;
"""

  [loop] = static.inner_loops(code)

  assert loop.serialized
  assert loop.schedule == "N64, wait 0, N256, wait 0, N256, wait 0"


def test_code_without_products_has_no_inner_loops():
  # HGMMA is the instruction of a matrix product.
  lines = [line for line in CODE.splitlines() if "HGMMA" not in line]

  assert static.inner_loops("\n".join(lines)) == []


def test_registers_and_spills_are_read_from_the_output_of_ptxas():
  # The function of the kernel "d_q_v1".
  function = "diff_attention_d_q_v1_mosaic_gpu"
  output_of_ptxas = (
    f"ptxas info    : Compiling entry function '{function}' for 'sm_90a'\n"
    "    0 bytes stack frame, 20 bytes spill stores, 24 bytes spill loads\n"
    "ptxas info    : Used 168 registers, used 3 barriers\n"
  )

  [kernel] = static.parse_kernels(output_of_ptxas)

  assert kernel.name == "d_q_v1"
  assert kernel.registers == 168
  assert kernel.spilled == 20 + 24
  # There is no warning about serialized products.
  assert not kernel.serialized


def test_the_loops_of_a_kernel_are_read_from_its_machine_code():
  """The machine code of a kernel follows the messages of the compiler."""
  output_of_ptxas = (
    "ptxas info    : Compiling entry function"
    " 'diff_attention_d_q_v1_mosaic_gpu' for 'sm_90a'\n"
    "    0 bytes stack frame, 20 bytes spill stores, 24 bytes spill loads\n"
    "ptxas info    : Used 168 registers, used 3 barriers\n"
  )

  [kernel] = static.parse_kernels(output_of_ptxas + CODE)

  assert kernel.loops == tuple(static.inner_loops(CODE))


def test_a_warning_of_ptxas_marks_a_kernel_as_serialized():
  """Serialized matrix products (wgmma) wait for each other, which is slow."""
  function = "diff_attention_forward_v1_mosaic_gpu"
  dump = (
    f"ptxas info    : Compiling entry function '{function}' for 'sm_90a'\n"
    "    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n"
    "ptxas info    : Used 168 registers, used 3 barriers\n"
    "ptxas info    : Potential Performance Loss: wgmma is serialized in"
    f" {function}\n"
  )

  [kernel] = static.parse_kernels(dump)

  assert kernel.serialized


@pytest.mark.parametrize(
  ("case", "kind"),
  [
    pytest.param({"D": 64}, "v1", id="v1"),
    pytest.param({"D": 64, "M": 1}, "v2", id="v2"),
    pytest.param({"D": 64, "M": 1, "G": 1}, "plain", id="plain"),
  ],
)
def test_the_kind_of_attention_follows_from_its_maps(case, kind):
  """G is the number of maps of a head, and M of those with their own keys.

  Both are 2 by default.
  """
  assert static.kind_of(case) == kind


def test_spills_of_a_kernel_are_those_of_all_its_loops():
  first_loop = static.Loop(
    instructions=13,
    tensor_cycles=192,
    global_loads=1,
    spills=1,
    serialized=False,
    schedule="N64",
  )
  second_loop = dataclasses.replace(first_loop, spills=3)

  kernel = static.Kernel(
    name="d_q_v1",
    registers=168,
    # The bytes of all spills, also outside of loops.
    spilled=44,
    serialized=False,
    loops=(first_loop, second_loop),
  )

  assert kernel.spills == 1 + 3
