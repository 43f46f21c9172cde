"""How `make aot` counts instructions: on short listings in the form that nvdisasm prints."""

from aot.launches import without_number
from aot.machine_code import MachineCode, lines_of, loops_of, memory_instructions


def listing(text):
    """Lines as nvdisasm prints them: a label, or an instruction with its address."""
    parts = [part.strip() for part in text.split(";")]
    lines = [x if x.endswith(":") else f"        /*{16 * n:04x}*/                   {x} ;" for n, x in enumerate(parts)]
    return "\n".join(lines) + "\n"


COUNTED = listing(
    "MOV R67, 0x4000; NOP; .L_x_0:; IMAD R1, R2, R3, R4; VIADD R67, R67, 0x2000;"
    "ISETP.NE.U32.AND P1, PT, R67, 0xc000, PT; @P1 BRA `(.L_x_0); .L_x_1:; BRA `(.L_x_1)"
)
UNIFORM = listing(
    "UMOV UR4, URZ; .L_x_7:; UIADD3 UR4, UP1, UR4, 0x20, URZ; UISETP.NE.U32.AND UP0, UPT, UR4, 0x800, UPT;"
    "@P4 BRA `(.L_x_7)"
)
TWICE = listing(
    "PLOP3.LUT P0, PT, PT, PT, PT, 0x80, 0x0; .L_x_0:; PLOP3.LUT P1, PT, P0, PT, PT, 0x80, 0x0;"
    "PLOP3.LUT P0, PT, PT, PT, PT, 0x8, 0x0; @P1 BRA `(.L_x_0)"
)
UNKNOWN = listing(".L_x_0:; IADD3 R15, R15, 0x4, RZ; ISETP.GE.U32.AND P0, PT, R15, R8, PT; @!P0 BRA `(.L_x_0)")
MEMORY = listing(
    "LDG.E.U8 R1, desc[UR4][R2.64]; LDGSTS.E.BYPASS.128 [R3], desc[UR4][R4.64]; .L_x_0:;"
    "@!P1 LDG.E.U8 R1, desc[UR4][R2.64]; LDG.E.128 R8, desc[UR4][R2.64]; LDGSTS.E.64 [R3], desc[UR4][R4.64], P0;"
    "MEMBAR.ALL.CTA; @P1 BRA `(.L_x_0)"
)


def test_a_loop_runs_as_often_as_its_counter_says():
    for listing, times in ((COUNTED, 4), (UNIFORM, 64), (TWICE, 2), (UNKNOWN, None)):  # from 0x4000 to 0xc000
        assert [loop.runs for loop in loops_of(lines_of(listing))] == [times], listing


def test_loads_of_bytes_in_loops_copies_and_fences():
    lines = lines_of(MEMORY)
    assert memory_instructions(lines, loops_of(lines)) == (1, 2, 1)


def test_padding_is_no_instruction():
    lines = lines_of(COUNTED)
    assert [line.text.split()[0] for line in lines] == ["MOV", "IMAD", "VIADD", "ISETP.NE.U32.AND", "BRA", "BRA"]


def test_blocks_that_fit_into_the_registers():
    for registers, threads, blocks in ((128, 512, 1), (64, 512, 2), (65, 128, 7)):  # registers come in units of eight
        assert MachineCode(registers, 0, 1, 0).blocks_by_registers(threads) == blocks


def test_names_without_their_numbers():
    told = {"sort_1_1__5": "sort", "fusion.116": "fusion", "select_chunks": "select_chunks"}
    assert {name: without_number(name) for name in told} == told
