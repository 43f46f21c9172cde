"""How `make aot` counts instructions: on short listings in the form that nvdisasm prints."""

from aot.launches import without_number
from aot.machine_code import MachineCode, lines_of, loops_of, memory_instructions

COUNTED = """
        /*0000*/                   MOV R67, 0x4000 ;
        /*0010*/                   NOP ;
.L_x_0:
        /*0020*/                   IMAD R1, R2, R3, R4 ;
        /*0030*/                   VIADD R67, R67, 0x2000 ;
        /*0040*/                   ISETP.NE.U32.AND P1, PT, R67, 0xc000, PT ;
        /*0050*/               @P1 BRA `(.L_x_0) ;
.L_x_1:
        /*0060*/                   BRA `(.L_x_1);
"""
UNIFORM = """
        /*0000*/                   UMOV UR4, URZ ;
.L_x_7:
        /*0010*/                   UIADD3 UR4, UP1, UR4, 0x20, URZ ;
        /*0020*/                   UISETP.NE.U32.AND UP0, UPT, UR4, 0x800, UPT ;
        /*0030*/               @P4 BRA `(.L_x_7) ;
"""
TWICE = """
        /*0000*/                   PLOP3.LUT P0, PT, PT, PT, PT, 0x80, 0x0 ;
.L_x_0:
        /*0010*/                   PLOP3.LUT P1, PT, P0, PT, PT, 0x80, 0x0 ;
        /*0020*/                   PLOP3.LUT P0, PT, PT, PT, PT, 0x8, 0x0 ;
        /*0030*/               @P1 BRA `(.L_x_0) ;
"""
UNKNOWN = """
.L_x_0:
        /*0000*/                   IADD3 R15, R15, 0x4, RZ ;
        /*0010*/                   ISETP.GE.U32.AND P0, PT, R15, R8, PT ;
        /*0020*/              @!P0 BRA `(.L_x_0) ;
"""

MEMORY = """
        /*0000*/                   LDG.E.U8 R1, desc[UR4][R2.64] ;
        /*0010*/                   LDGSTS.E.BYPASS.128 [R3], desc[UR4][R4.64] ;
.L_x_0:
        /*0020*/              @!P1 LDG.E.U8 R1, desc[UR4][R2.64] ;
        /*0030*/                   LDG.E.128 R8, desc[UR4][R2.64] ;
        /*0040*/                   LDGSTS.E.64 [R3], desc[UR4][R4.64], P0 ;
        /*0050*/                   MEMBAR.ALL.CTA ;
        /*0060*/               @P1 BRA `(.L_x_0) ;
"""


def runs(listing: str) -> list[int | None]:
    return [loop.runs for loop in loops_of(lines_of(listing))]


def test_a_loop_runs_as_often_as_its_counter_says():
    assert runs(COUNTED) == [4]  # from 0x4000 to 0xc000
    assert runs(UNIFORM) == [64]
    assert runs(TWICE) == [2]


def test_a_loop_whose_end_is_not_a_constant_is_told():
    assert runs(UNKNOWN) == [None]


def test_loads_of_bytes_in_loops_copies_and_fences():
    lines = lines_of(MEMORY)
    assert memory_instructions(lines, loops_of(lines)) == (1, 2, 1)


def test_padding_is_no_instruction():
    lines = lines_of(COUNTED)
    assert [line.text.split()[0] for line in lines] == ["MOV", "IMAD", "VIADD", "ISETP.NE.U32.AND", "BRA", "BRA"]


def test_blocks_that_fit_into_the_registers():
    assert MachineCode(128, 0, 1, 0).blocks_by_registers(512) == 1
    assert MachineCode(64, 0, 1, 0).blocks_by_registers(512) == 2
    assert MachineCode(65, 0, 1, 0).blocks_by_registers(128) == 7  # registers are given in units of eight


def test_names_without_their_numbers():
    assert [without_number(name) for name in ("sort_1_1__5", "fusion.116", "select_chunks")] == [
        "sort",
        "fusion",
        "select_chunks",
    ]
